"""Conversion to safetensors, and comparison of two checkpoints: time and peak memory.

    conversions.py [--mib 8192] [--rounds 1] [--dir DIR]    all contestants, as rows of a table
    conversions.py --one CONTESTANT --dir DIR               one of them, in this fresh process; JSON

The checkpoint holds a model of 16 MiB tensors in bfloat16 and an optimizer's step, saved by
torch.distributed.checkpoint. A second one differs in one element. The page cache is emptied before
each run (as root; otherwise runs are warm, which is said). Peak memory is the kernel's VmHWM minus
the resident memory before the call; a round takes each contestant once, in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import format_utils

from limits import drop_caches
from memory import peak

EACH = 16 << 20  # bytes of a tensor


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _convert(root: Path) -> None:
    import tilestone

    tilestone.convert(root / "a", root / "out", only="model")


def _by_torch_save(root: Path) -> None:
    """What people run: the whole checkpoint as one file, and that file as safetensors."""
    from safetensors.torch import save_file

    format_utils.dcp_to_torch_save(root / "a", root / "whole.pt")
    model = torch.load(root / "whole.pt", weights_only=True)["model"]
    (root / "out").mkdir()
    save_file(model, root / "out" / "model.safetensors", metadata={"format": "pt"})
    _sync(root / "out")


def _diff(root: Path) -> None:
    from tilestone import _core

    with contextlib.redirect_stdout(io.StringIO()):
        code = _core.cli([b"tilestone", b"diff", os.fsencode(root / "a"), os.fsencode(root / "b")])
    if code != 1:
        raise RuntimeError(f"diff ended with {code}")


def _loaded(path: Path) -> dict[str, torch.Tensor]:
    found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(each.size, dtype=each.properties.dtype)
        for key, each in found.items()
        if isinstance(each, dcp.TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def _by_loading(root: Path) -> None:
    a, b = (_loaded(root / name) for name in "ab")
    differing = [key for key in a if not torch.equal(a[key], b[key])]
    if len(differing) != 1:
        raise RuntimeError(f"{len(differing)} tensors differ")


CONTESTANTS: dict[str, Callable[[Path], None]] = {
    "tilestone convert": _convert,
    "dcp_to_torch_save, then save_file": _by_torch_save,
    "tilestone diff": _diff,
    "both loaded by DCP, torch.equal": _by_loading,
}


def _clean(root: Path) -> None:
    shutil.rmtree(root / "out", ignore_errors=True)
    (root / "whole.pt").unlink(missing_ok=True)


def one(name: str, root: Path) -> dict[str, float]:
    """Runs one contestant in this process."""
    import safetensors.torch  # noqa: F401
    import tilestone  # noqa: F401

    _clean(root)
    taken: dict[str, float] = {}

    def work() -> None:
        began = time.monotonic()
        CONTESTANTS[name](root)
        taken["seconds"] = time.monotonic() - began

    taken["peak_bytes"] = peak(os.getpid(), work)
    _clean(root)
    return taken


def make(root: Path, mib: int) -> int:
    """Makes the two checkpoints. Returns the bytes of the tensors of one."""
    numbers = torch.Generator().manual_seed(1)
    shape = (EACH // 2 // 4096, 4096)
    count = max(1, (mib << 20) // EACH)
    model = {
        f"layers.{i}.weight": torch.empty(shape, dtype=torch.bfloat16).normal_(generator=numbers)
        for i in range(count)
    }
    state = {"model": model, "optimizer": {"step": 7}}
    dcp.save(state, checkpoint_id=root / "a", no_dist=True)
    model[f"layers.{count // 2}.weight"][-1, -1] += 1
    dcp.save(state, checkpoint_id=root / "b", no_dist=True)
    return count * EACH


def _cold() -> bool:
    try:
        drop_caches()
    except PermissionError:
        return False
    return True


def compare(root: Path, mib: int, rounds: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    made = [sys.executable, __file__, "--make", str(mib), "--dir", str(root)]
    subprocess.run(made, check=True)  # in another process, so that its memory is given back
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    is_cold = True
    for _ in range(rounds):
        for name, results in found.items():
            is_cold = _cold() and is_cold
            command = [sys.executable, __file__, "--one", name, "--dir", str(root)]
            ended = subprocess.run(command, check=False, capture_output=True, text=True)
            if ended.returncode != 0:
                print(f"{name} failed ({ended.returncode}): {ended.stderr[-300:]}", flush=True)
                continue
            results.append(json.loads(ended.stdout.splitlines()[-1]))
    bytes_ = max(1, mib // 16) * EACH
    print(f"{bytes_ / 2**30:.1f} GiB, {rounds} rounds, {'cold' if is_cold else 'warm'}; load of the "
          f"machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("| what | median s | min s | max s | GB/s of one checkpoint | peak memory MiB |\n|---|---|---|---|---|---|")
    for name, results in found.items():
        if not results:
            continue
        seconds = [each["seconds"] for each in results]
        most = max(each["peak_bytes"] for each in results)
        middle = statistics.median(seconds)
        print(f"| {name} | {middle:.2f} | {min(seconds):.2f} | {max(seconds):.2f} "
              f"| {bytes_ / middle / 1e9:.2f} | {most / 2**20:,.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=8192, help="size of one checkpoint")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dir", type=Path, default=Path("build/bench/conversions"))
    parser.add_argument("--one", choices=list(CONTESTANTS))
    parser.add_argument("--make", type=int, metavar="MIB", help="only make the checkpoints")
    options = parser.parse_args()
    root = options.dir.resolve()
    if options.one:
        print(json.dumps(one(options.one, root)))
    elif options.make:
        make(root, options.make)
    else:
        try:
            compare(root, options.mib, options.rounds)
        finally:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
