"""Saves without a communicator by many ranks, compared with the work of stock DCP's coordinator."""

from __future__ import annotations

import os
import shutil
import statistics

import programs
from measure import Case, Plan, Table

BY_FILES = programs.BIN / "by_files"
CHUNKS = 100  # per rank
PUBLISHED = 3  # how often the last rank publishes
# Number of ranks -> the layout for which DCP plans: TP, DP, PP.
SIZES = {64: (4, 4, 4), 1024: (8, 16, 8), 16384: (8, 128, 16)}


def _save(plan: Plan, ranks: int) -> tuple[dict, list[dict]]:
    """The figures of all other ranks' saves, and those of the last rank's, which publishes.

    The last rank saves several times, each time in a copy of what the others have left.
    """
    path, copy = plan.root / "by-files", plan.root / "by-files-copy"
    shutil.rmtree(path, ignore_errors=True)
    threads = str(2 * (os.cpu_count() or 1))
    last = []
    try:
        every = programs.json_lines(BY_FILES, "ranks", str(ranks), str(CHUNKS), threads, path)[0]
        for _ in range(PUBLISHED):
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(path, copy)
            os.sync()
            last += programs.json_lines(BY_FILES, "last", str(ranks), str(CHUNKS), copy)
    finally:
        for each in (path, copy):
            shutil.rmtree(each, ignore_errors=True)
    return every, last


def by_files(case: Case, plan: Plan) -> Case:
    # A run at a part of the full size leaves out the largest jobs.
    sizes = {ranks: shape for ranks, shape in SIZES.items() if ranks <= max(64, 16384 * plan.scale)}
    ranks_table = Table(
        f"the save of one rank, {CHUNKS} tensors of 32 bytes",
        "Ranks are threads of one process, a few at a time, each with its own storage. All files "
        "are real files and synced. Calls are calls of the storage. The maxima belong to ranks "
        "that are the last of their group, and therefore merge the group's receipts.",
        ["ranks", "s, median", "s, maximum", "calls, median", "calls, maximum", "syncs",
         "maximum entries listed", "small files", "their MB"])
    published = Table(
        "from the last rank's receipt to the checkpoint",
        f"The last rank runs in a process of its own. It merges all receipts and publishes, "
        f"{PUBLISHED} times, each time in a copy of what the others have left. \"cleaned\" means "
        "that it has also removed the small files. Entries are those that are read: all of a listed "
        "directory. The columns after \"published\" are of the median run.",
        ["ranks", "published s: median", "lowest", "highest", "cleaned s", "CPU s", "peak MiB",
         "calls", "maximum entries listed", "`.metadata` MB"])
    for ranks in sizes:
        every, runs = _save(plan, ranks)
        times = [run["to_published"] for run in runs]
        last = min(runs, key=lambda run: abs(run["to_published"] - statistics.median(times)))
        listed = max(run["most_listed"] for run in [every, *runs])
        ranks_table.rows.append([
            f"{ranks:,}", f"{every['seconds']:.4f}", f"{every['most_seconds']:.3f}",
            f"{every['calls']:,.0f}", f"{every['most_calls']:,.0f}", f"{every['syncs']:.0f}",
            f"{every['most_listed']:,.0f}", f"{every['small_files']:,}",
            f"{every['small_bytes'] / 1e6:.1f}"])
        published.rows.append([
            f"{ranks:,}", f"{last['to_published']:.2f}", f"{min(times):.2f}", f"{max(times):.2f}",
            f"{last['to_end']:.2f}",
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
        "for comparison: stock DCP's coordinator",
        f"{CHUNKS} shards per rank; all plans are made in one process. DCP gathers all ranks' "
        "pickled plans, unpickles them, makes the global plan, pickles it and scatters it before "
        "any rank writes. Nothing is sent here, and the receipts after writing are not counted. "
        "CPU time.",
        ["ranks", "gathered MB", "coordinator s", "of this, unpickling s", "scattered MB",
         "peak MiB"])
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
