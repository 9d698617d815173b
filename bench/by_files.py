"""Saves without a communicator by many ranks, beside what stock DCP's coordinator does for them."""

from __future__ import annotations

import os
import shutil

import programs
from measure import Case, Plan, Table

BY_FILES = programs.BIN / "by_files"
CHUNKS = 100  # of each rank
# Ranks, and the layout over which DCP plans that many: TP, DP, PP.
SIZES = {64: (4, 4, 4), 1024: (8, 16, 8), 16384: (8, 128, 16)}


def _save(plan: Plan, ranks: int) -> tuple[dict, dict]:
    """What the ranks' saves cost, and what the last one's did, which published."""
    path = plan.root / "by-files"
    shutil.rmtree(path, ignore_errors=True)
    threads = str(2 * (os.cpu_count() or 1))
    try:
        every = programs.json_lines(BY_FILES, "ranks", str(ranks), str(CHUNKS), threads, path)[0]
        last = programs.json_lines(BY_FILES, "last", str(ranks), str(CHUNKS), path)[0]
    finally:
        shutil.rmtree(path, ignore_errors=True)
    return every, last


def by_files(case: Case, plan: Plan) -> Case:
    # A run of a part of the full size leaves the largest jobs out.
    sizes = {ranks: shape for ranks, shape in SIZES.items() if ranks <= max(64, 16384 * plan.scale)}
    ranks_table = Table(
        f"a rank's save, {CHUNKS} tensors of 32 bytes",
        "Ranks are threads of one process, a few at a time, each with a storage of its own; every "
        "file is real and synced. Calls are the storage's. Some ranks find that all others of "
        "their group have written, and put the group's reports together: the most.",
        ["ranks", "s, median", "s, most", "calls, median", "calls, most", "syncs",
         "most entries listed", "small files", "their MB"])
    published = Table(
        "from the last rank's report to the checkpoint",
        "The last rank in a process of its own merges all reports and publishes; \"cleaned\": it "
        "has also removed the small files.",
        ["ranks", "published s", "cleaned s", "CPU s", "peak MiB", "calls", "most entries listed",
         "`.metadata` MB"])
    for ranks in sizes:
        every, last = _save(plan, ranks)
        listed = max(every["most_listed"], last["most_listed"])
        ranks_table.rows.append([
            f"{ranks:,}", f"{every['seconds']:.4f}", f"{every['most_seconds']:.3f}",
            f"{every['calls']:,.0f}", f"{every['most_calls']:,.0f}", f"{every['syncs']:.0f}",
            f"{every['most_listed']:,.0f}", f"{every['small_files']:,}",
            f"{every['small_bytes'] / 1e6:.1f}"])
        published.rows.append([
            f"{ranks:,}", f"{last['to_published']:.2f}", f"{last['to_end']:.2f}",
            f"{last['processor_seconds']:.2f}",
            f"{last['peak_bytes'] / 2**20:,.0f}", f"{last['calls']:,}",
            f"{last['most_listed']:,}", f"{last['metadata_bytes'] / 1e6:.1f}"])
        case.figures[f"published {ranks}, s"] = last["to_published"]
        case.figures[f"listed {ranks}"] = listed
        case.figures[f"calls {ranks}"] = every["calls"]
    case.tables += [ranks_table, published, _dcp(case, sizes)]
    return case


def _dcp(case: Case, sizes: dict[int, tuple[int, int, int]]) -> Table:
    table = Table(
        "beside it: stock DCP's coordinator",
        f"{CHUNKS} shards a rank, plans made in one process. All ranks' pickled plans are gathered, "
        "unpickled, made global, pickled and scattered before any rank writes; nothing is sent "
        "here, and what ranks report after writing is not counted. Processor time.",
        ["ranks", "gathered MB", "coordinator s", "of it unpickled s", "scattered MB", "peak MiB"])
    for tp, dp, pp in sizes.values():
        try:
            found = programs.python("dcp_planning.py", str(tp), str(dp), str(pp), str(CHUNKS))
        except RuntimeError as error:
            case.fail(f"{tp * dp * pp:,} ranks", "dcp", error)
            continue
        whole = found["unpickle_seconds"] + found["global_seconds"] + found["scatter_seconds"]
        table.rows.append([
            f"{found['ranks']:,}", f"{found['gathered_bytes'] / 1e6:.1f}", f"{whole:.2f}",
            f"{found['unpickle_seconds']:.2f}", f"{found['scattered_bytes'] / 1e6:.1f}",
            f"{found['peak_bytes'] / 2**20:,.0f}"])
        case.figures[f"dcp coordinator {found['ranks']}, s"] = whole
    return table
