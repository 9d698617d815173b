"""Runs docs/from_dcp.md from top to bottom, on one rank and on several."""

from __future__ import annotations

import os
import pathlib
import re
import warnings
from typing import Any

import pytest
from ranks import Worlds

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "from_dcp.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def _run_all(rank: int, world: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    before = os.getcwd()
    os.chdir(folder)
    try:
        names: dict[str, Any] = {"__name__": "guide"}
        for number, block in enumerate(BLOCKS):
            exec(compile(block, f"docs/from_dcp.md, block {number}", "exec"), names)
    finally:
        os.chdir(before)


@pytest.mark.parametrize("world", [1, 2])
def test_the_guide_runs(world: int, worlds: Worlds, tmp_path: pathlib.Path) -> None:
    assert len(BLOCKS) > 10
    worlds[world].run(_run_all, str(tmp_path))
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
