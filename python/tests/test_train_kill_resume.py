"""Runs the scripts of docs/train_kill_resume.md on two ranks, then from their checkpoints on three."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
from typing import Any

import torch
from ranks import Worlds

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "train_kill_resume.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def _run_all(rank: int, world: int, folder: str) -> list[Any]:
    """Returns the step that each script began from, and its model's whole weights at the end."""
    before = os.getcwd()
    os.chdir(folder)
    ends = []
    names: dict[str, Any] = {"__name__": "train"}
    try:
        for number, block in enumerate(BLOCKS):
            exec(compile(block, f"docs/train_kill_resume.md, block {number}", "exec"), names)
            weights = [each.full_tensor().detach() for each in names["model"].parameters()]
            counts = {float(each["step"]) for each in names["optimizer"].state.values()}
            ends.append((names["begun"] or 0, counts, weights))
    finally:
        os.chdir(before)
    return ends


def test_the_scripts_resume_on_other_ranks(worlds: Worlds, tmp_path: pathlib.Path) -> None:
    assert len(BLOCKS) == 2
    first = worlds[2].run(_run_all, str(tmp_path))[0]
    assert [(begun, counts) for begun, counts, _ in first] == [(0, {30.0})] * 2
    # As if the job had been killed before the last save. (test_manager_kills.py kills in saves.)
    for step in ("run/step-00000030", "dcp_run/step-30"):
        shutil.rmtree(tmp_path / step)
    again = worlds[3].run(_run_all, str(tmp_path))[0]
    assert [(begun, counts) for begun, counts, _ in again] == [(20, {30.0})] * 2
    for (_, _, there), (_, _, here) in zip(first, again, strict=True):
        for a, b in zip(there, here, strict=True):
            torch.testing.assert_close(a, b)
