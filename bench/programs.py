"""Runs the benchmark programs, and measures their time and peak memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

BENCH = Path(__file__).resolve().parent
BIN = BENCH.parent / "build" / "release" / "bin"


@dataclass
class Run:
    output: str
    seconds: float
    peak_bytes: int


# Runs a program and reports its time and peak memory. It is a small process of its own, because the
# kernel's peak of a program includes the peak of the process that executed it.
LAUNCHER = """
import json, os, sys, time
begin = time.perf_counter()
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(pid, 0)
facts = {"seconds": time.perf_counter() - begin, "peak_bytes": usage.ru_maxrss << 10}
os.write(int(os.environ["FACTS"]), json.dumps(facts).encode())
sys.exit(os.waitstatus_to_exitcode(status))
"""


def run(*command: str | Path) -> Run:
    """Runs a program. Raises RuntimeError with the last line of its errors if it fails."""
    reading, writing = os.pipe()
    try:
        ran = subprocess.run([sys.executable, "-c", LAUNCHER, *map(str, command)], check=False,
                             capture_output=True, text=True, pass_fds=[writing],
                             env={**os.environ, "FACTS": str(writing)})
        if ran.returncode != 0:
            last = ran.stderr.strip().splitlines()[-1:] or ["no message"]
            raise RuntimeError(f"{Path(command[0]).name} ended with {ran.returncode}: {last[0]}")
        facts = json.loads(os.read(reading, 4096))
    finally:
        os.close(reading)
        os.close(writing)
    return Run(ran.stdout, facts["seconds"], facts["peak_bytes"])


def json_lines(*command: str | Path) -> list[dict]:
    return [json.loads(line) for line in run(*command).output.splitlines()]


def python(script: str, *arguments: str | Path) -> dict:
    """Runs a script of this folder in a fresh interpreter. Returns the JSON object it prints."""
    return json.loads(run(sys.executable, BENCH / script, *arguments).output.splitlines()[-1])
