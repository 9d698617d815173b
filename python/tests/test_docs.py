"""Runs the code of documentation pages, each from top to bottom."""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any

import pytest
import torch

import ranks
import tilestone

DOCS = pathlib.Path(__file__).parents[2] / "docs"
# Pages whose blocks in ```python are one program. Other pages show pieces.
PAGES = ["first_ten_minutes", "huggingface"]


BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _run(code: str, name: str, names: dict[str, Any]) -> None:
    exec(compile(code, name, "exec"), names)


def _child(folder: pathlib.Path, code: str, name: str, given: Any, *args: Any) -> None:
    os.chdir(folder)
    _run(code, name, {"__name__": "__main__", **(given(*args) if given else {})})


def _in_a_fresh_process(*args: Any) -> None:
    """Runs code in a folder: (folder, code, its name, a function that makes the names, its args)."""
    process = ranks.context().Process(target=_child, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0, args


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(
    page: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DOCS / f"{page}.md").read_text()
    blocks = BLOCK.findall(text)
    assert len(blocks) > 3
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page}
    for number, block in enumerate(blocks):
        name = f"docs/{page}.md, block {number}"
        if block.startswith("# resume.py"):
            _in_a_fresh_process(tmp_path, block, name, None)
        else:
            _run(block, name, names)


def test_the_page_of_benchmarks_keeps_what_is_written_by_hand(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(DOCS.parent / "bench")
    import page

    text = (DOCS / "benchmarks.md").read_text()
    measured, by_hand = text.split(page.BY_HAND)
    assert "## Targets" in measured
    assert "## On your own machine" in by_hand
    (tmp_path / "page.md").write_text(text)
    page.write(tmp_path / "page.md", "# Benchmarks\n\nnew figures\n\n")
    assert (tmp_path / "page.md").read_text() == (
        f"# Benchmarks\n\nnew figures\n\n{page.BY_HAND}{by_hand}"
    )
    page.write(tmp_path / "new" / "page.md", measured)
    assert (tmp_path / "new" / "page.md").read_text() == measured.rstrip() + "\n"


def test_the_python_of_the_readme_runs_unchanged(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DOCS.parent / "README.md").read_text()
    section = text.split("\n## Python\n")[1].split("\n## ")[0]
    (block,) = BLOCK.findall(section)
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(64, 128)
    names: dict[str, Any] = {
        "model": model, "optimizer": torch.optim.AdamW(model.parameters()),
        "rank": 0, "world_size": 1, "token": "job 17 start 0",
    }  # fmt: skip
    _run(block, "README.md", names)
    assert names["part"].shape == (128, 64)
    assert sorted(each.name for each in (tmp_path / "ckpt").iterdir()) == [
        "step-1200", "step-1300", "step-1400",
    ]  # fmt: skip


@pytest.mark.parametrize("page", ["README.md", "docs/object_stores.md"])
def test_the_python_of_object_stores_runs_unchanged(
    page: str, object_server: Any, bucket: str
) -> None:
    object_server.files().makedirs("training", exist_ok=True)
    text = (DOCS.parent / page).read_text()
    (block,) = [each for each in BLOCK.findall(text) if "s3://training" in each]
    state = {"weight": torch.arange(32.0).reshape(16, 2), "step": 3}
    names: dict[str, Any] = {"state": state, "tilestone": tilestone}
    try:
        _run(block, page, names)
    finally:
        object_server.files().rm("training/", recursive=True)
    assert names["state"]["weight"] is state["weight"] and names.get("step", 4) == 4


def _training(last: int, steps_before: int) -> dict[str, Any]:
    """What the loops of README and of the page on run directories need, in a fresh process."""
    torch.manual_seed(last)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    def train(state: Any) -> float:
        assert state["optim"] is optimizer
        before = int(optimizer.state[model.weight]["step"]) if optimizer.state else 0
        assert before == steps_before + train.calls  # type: ignore[attr-defined]
        train.calls += 1  # type: ignore[attr-defined]
        loss = model(torch.ones(1, 3)).sum()
        loss.backward()
        optimizer.step()
        return float(loss)

    train.calls = 0  # type: ignore[attr-defined]
    import tilestone

    return {
        "tilestone": tilestone, "make": lambda: (model, optimizer), "model": model,
        "optimizer": optimizer, "train": train, "last": last,
    }  # fmt: skip


@pytest.mark.parametrize("page", ["README.md", "docs/run_directories.md"])
def test_the_loop_of_a_run_goes_on_in_a_fresh_process(page: str, tmp_path: pathlib.Path) -> None:
    (block,) = [
        each
        for each in BLOCK.findall((DOCS.parent / page).read_text())
        if "manager.restore(state)" in each
    ]
    _in_a_fresh_process(tmp_path, block, page, _training, 150, 0)
    _in_a_fresh_process(tmp_path, block, page, _training, 210, 100)
    assert (tmp_path / "run" / "step-00000200").is_dir()
