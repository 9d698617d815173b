"""Runs the code of documentation pages, each from top to bottom."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest

import torch

DOCS = pathlib.Path(__file__).parents[2] / "docs"
# Pages whose blocks in ```python are one program. Other pages show pieces.
PAGES = ["first_ten_minutes", "huggingface"]


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(
    page: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DOCS / f"{page}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) > 3
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page}
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/{page}.md, block {number}", "exec"), names)


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
    (block,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {
        "model": torch.nn.Linear(64, 128), "rank": 0, "world_size": 1, "token": "job 17 start 0",
    }  # fmt: skip
    exec(compile(block, "README.md", "exec"), names)
    assert names["part"].shape == (128, 64)
    assert sorted(each.name for each in (tmp_path / "ckpt").iterdir()) == [
        "step-1200", "step-1300", "step-1400",
    ]  # fmt: skip
