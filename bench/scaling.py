"""Cost against size. Varies bytes, tensors and ranks, one at a time."""

from __future__ import annotations

import shutil

import programs
from limits import drop_caches
from measure import Case, Plan, Table

MIB = 1 << 20
HEADER = ["", "ranks, save → load", "tensors", "MiB", "save s", "load s", "save µs per unit",
          "load µs per unit"]


def _run(plan: Plan, savers: int, loaders: int, tensors: int, size: int) -> dict:
    path = plan.root / "scaling"
    shutil.rmtree(path, ignore_errors=True)
    drop_caches()
    found = programs.json_lines(programs.BIN / "scaling", str(savers), str(loaders), str(tensors),
                                str(size), path)[0]
    shutil.rmtree(path)
    return found


def _row(what: str, found: dict, units: float) -> list[str]:
    return [
        what, f"{found['savers']} → {found['loaders']}", f"{found['tensors']:,}",
        f"{found['bytes'] / MIB:,.0f}", f"{found['save_seconds']:.3f}",
        f"{found['load_seconds']:.3f}", f"{found['save_seconds'] / units * 1e6:,.1f}",
        f"{found['load_seconds'] / units * 1e6:,.1f}",
    ]


def scaling(case: Case, plan: Plan) -> Case:
    part = min(1.0, plan.scale)
    table = Table(
        "saves, and warm loads in another layout, from C++",
        "Ranks are threads of one process. Tensors are sharded by rows for the save and by columns "
        "for the load. A unit is a MiB, a tensor or a rank. Every loaded byte is compared.",
        HEADER)
    for mib in (64, 256, 1024):
        size = max(16, int(mib * part)) * MIB
        table.rows.append(_row("bytes", _run(plan, 1, 1, 16, size), size / MIB))
    for count in (1_000, 10_000, 100_000):
        tensors = max(100, int(count * part))
        table.rows.append(_row("tensors of 4 KiB", _run(plan, 1, 1, tensors, tensors * 4096),
                               tensors))
    for savers, loaders in ((1, 2), (4, 3), (16, 24), (64, 48)):
        table.rows.append(_row("ranks of 4 MiB", _run(plan, savers, loaders, 16, savers * 4 * MIB),
                               savers))
    for savers, loaders in ((1, 2), (4, 3), (16, 24), (64, 48)):
        table.rows.append(_row("ranks, 64 MiB in all", _run(plan, savers, loaders, 16, 64 * MIB),
                               savers))
    case.tables.append(table)
    return case
