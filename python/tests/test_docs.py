"""Runs the code of documentation pages, each from top to bottom."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs"
# Pages whose blocks in ```python are one program. Other pages show pieces.
PAGES = ["first_ten_minutes"]


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
