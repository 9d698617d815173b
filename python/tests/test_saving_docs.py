"""Runs the Python examples of the pages about saving unchanged."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import numpy
import pytest

import tilestone
import torch

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGES = ["saving", "saving_by_files", "local_copies"]
TEXT = "\n".join((DOCS / f"{page}.md").read_text() for page in PAGES)
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
TOKEN = "the first start of job 4711"
#: The folder in which the examples save. Each example runs in a folder of its own.
PLACE = "/checkpoints"


def _state() -> dict[str, Any]:
    return {"w": numpy.arange(6.0), "step": 3}


def _prepare(example: str, path: str) -> None:
    """Makes the files that an example expects."""
    if "tilestone.unpublished" in example:
        half = {"w": tilestone.ShardedTensor.from_rank_offsets("w", numpy.ones(3), (0, 0, 2))}
        tilestone.save(
            half, path, by_files=tilestone.ByFiles(0, 2, TOKEN, wait=False)
        )
    elif "tilestone.load" in example:
        tilestone.save({"w": numpy.zeros(6), "step": 7}, path)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.split("\n")[0][:60])
def test_an_example_of_the_pages_about_saving_runs_unchanged(
    example: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "step-100")
    _prepare(example, path)
    names: dict[str, Any] = {
        "tilestone": tilestone, "state": _state(), "path": path, "rank": 0, "world_size": 1,
        "token": TOKEN, "tp_group": [0],
    }  # fmt: skip
    if "optimizer.step()" in example:
        weight = torch.ones(1, requires_grad=True)
        names.update(loss=weight.sum(), optimizer=torch.optim.SGD([weight], lr=0.1))
    exec(compile(example.replace(PLACE, str(tmp_path)), "docs about saving", "exec"), names)
    if isinstance(names.get("saving"), tilestone.AsyncSave):
        names["saving"].result()
    if "tilestone.unpublished" in example:
        assert "1 of its 2 ranks has not written (rank 1)" in capsys.readouterr().out
        return
    if "tilestone.megatron" in example:
        assert tilestone.open(path).common()["step"] == 3
        return
    assert tilestone.open(path).keys() == ["step", "w"]
    if "tilestone.load" in example:
        assert names["state"]["step"] == 3  # values are not loaded in place
        assert (names["state"]["w"] == 0).all()


def test_the_examples_are_found() -> None:
    assert len(EXAMPLES) >= 6
