"""Runs docs/megatron_guide.md from top to bottom, on one rank and on several."""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any

import pytest

from ranks import Worlds
from tilestone.megatron.strategies import base

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "megatron_guide.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def _run_all(rank: int, world: int, folder: str) -> None:
    before, registered = os.getcwd(), {key: dict(of) for key, of in base.default_strategies.items()}
    os.chdir(folder)
    try:
        names: dict[str, Any] = {"__name__": "guide"}
        for number, block in enumerate(BLOCKS):
            exec(compile(block, f"docs/megatron_guide.md, block {number}", "exec"), names)
    finally:
        os.chdir(before)
        base.default_strategies.clear()
        base.default_strategies.update(registered)


def test_the_guide_runs_on_one_rank(tmp_path: pathlib.Path) -> None:
    assert len(BLOCKS) > 10 and TEXT.count("```python") == TEXT.count("```") / 2
    _run_all(0, 1, str(tmp_path))


def test_the_guide_runs_on_several_ranks(worlds: Worlds, tmp_path: pathlib.Path) -> None:
    worlds[2].run(_run_all, str(tmp_path))


@pytest.mark.parametrize("row", re.findall(r"^\| (\d\. .*?) \| (.*?) \|$", TEXT, re.MULTILINE))
def test_the_files_of_each_step_exist(row: tuple[str, str]) -> None:
    places = (ROOT / "python/tilestone/megatron", ROOT / "python/tilestone", ROOT / "tilestone")
    for name in re.findall(r"`([^`]+)`", row[1]):
        assert any((place / name).exists() for place in places), (row[0], name)
