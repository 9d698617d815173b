"""Runs examples/megatron as its documentation describes."""

from __future__ import annotations

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def test_megatron_core_trainings_resume_in_other_layouts(tmp_path: pathlib.Path) -> None:
    program = ROOT / "examples" / "megatron" / "continuations.py"
    ran = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "checkpoints")],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "WRONG" not in ran.stdout and ran.stdout.count("max_delta loaded") == 3
    lines = [x for x in ran.stdout.splitlines() if x.startswith(("TP", "PP", "EP", "one"))]
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    assert len(cells) == 9
    for layout, tensors, missing, mismatched, loaded, last in cells:
        assert int(tensors) > 40 and (missing, mismatched, loaded) == ("0", "0", "0.0"), layout
        assert float(last) < 1e-5
    # In the layout of the original training, the result is equal bit for bit, also with dropout.
    assert [row[-1] for row in cells if row[0] in ("TP 2 x PP 2", "PP 2 x EP 2")] == ["0.0"] * 3
