"""Save planning: Tilestone's in C++ (plan_scale) compared with stock DCP's in Python."""

from __future__ import annotations

from statistics import median

import programs
from measure import Case, Plan, Table

PLAN_SCALE = programs.BIN / "plan_scale"
RULE_ROUNDS = 9
COLUMNS = ["layout", "ranks", "tensors", "chunks per rank", "CPU s", "decoded and added",
           "finished", "ns per chunk", "peak GiB"]


def _layout(line: dict) -> str:
    expert = f", EP {line['ep']}" if line["ep"] > 1 else ""
    return f"TP {line['tp']}, DP {line['dp']}, PP {line['pp']}{expert}"


def _row(line: dict) -> list[str]:
    return [
        _layout(line), f"{line['ranks']:,}", f"{line['tensors']:,}",
        f"{line['listed'] / line['ranks']:,.0f}", f"{line['seconds']:.2f}",
        f"{line['add']:.2f}", f"{line['finish']:.2f}",
        f"{line['seconds'] / line['listed'] * 1e9:.0f}", f"{line['peak_gib']:.2f}",
    ]


def _exchange(*numbers: int) -> dict:
    return programs.json_lines(PLAN_SCALE, "exchange", *map(str, numbers))[0]


def _of_size(plan: Plan, ranks: int) -> int:
    """`ranks` scaled down for a run at a part of the full size."""
    return max(1, int(ranks * min(1.0, plan.scale)))


def planning(case: Case, plan: Plan) -> Case:
    large = Table("by exchange: the coordinator's CPU time, on one core",
                  "DP-replicated bf16 parameters and the flat ranges of a distributed optimizer.",
                  COLUMNS)
    for numbers in ((8, 16, 8, 500), (2, 64, 8, 500, 16), (8, 128, 16, 1000),
                    (2, 512, 16, 1000, 64)):
        tp, dp, pp, tensors, *ep = numbers
        dp = max(ep[0] if ep else 1, _of_size(plan, dp))
        line = _exchange(tp, dp, pp, tensors, *ep)
        large.rows.append(_row(line))
        kind = "MoE" if ep else "dense"
        what = f"plan {kind} {line['ranks']} x {tensors}"
        case.figures[f"{what}, s"] = line["seconds"]
        case.figures[f"{what}, GiB"] = line["peak_gib"]
    case.tables.append(large)
    case.tables.append(_rule(case))
    case.tables.append(_dcp(case, plan))
    case.tables.append(_megatron(case, plan))
    return case


def _megatron(case: Case, plan: Plan) -> Table:
    """Both functions take and return Python's dicts."""
    ranks, shards = _of_size(plan, 2048), 1000
    found = programs.python("megatron_distribution.py", str(ranks), str(shards))
    ours, stock = found["seconds"], found["stock_seconds"]
    case.figures["distribution, s"] = ours
    case.figures["distribution, stock s"] = stock
    return Table(
        "Megatron-Core's distribution of a fully parallel save",
        "`distribute_shards_to_ranks` for a data-parallel group; both choose the same ranks. CPU "
        "time of one rank; every rank computes it.",
        ["ranks", "shards", "megatron-core s", "tilestone s", "megatron-core ÷ tilestone"],
        [[f"{ranks:,}", f"{shards:,}", f"{stock:.2f}", f"{ours:.3f}", f"{stock / ours:.0f}"]],
    )


def _rule(case: Case) -> Table:
    sizes = [(4, 4, 4), (4, 4, 4), (8, 16, 8), (8, 128, 16)]  # the first one twice, as a control
    lines: list[list[dict]] = [[] for _ in sizes]
    for _ in range(RULE_ROUNDS):
        for size, numbers in enumerate(sizes):
            lines[size] += programs.json_lines(PLAN_SCALE, "rule", *map(str, numbers), "1000")
    seconds = [median(line["seconds"] for line in of_size) for of_size in lines]
    spread = max(seconds[0], seconds[1]) / min(seconds[0], seconds[1]) - 1
    table = Table("by rule: one rank's CPU time",
                  f"Nothing is exchanged. Medians of {RULE_ROUNDS} alternating runs. Two "
                  f"medians of the same size differ by {spread:.0%}.",
                  ["layout", "ranks", "tensors", "chunks per rank", "CPU ms", "peak GiB"])
    for line, took in list(zip((of_size[0] for of_size in lines), seconds))[1:]:
        table.rows.append([_layout(line), f"{line['ranks']:,}", f"{line['tensors']:,}",
                           f"{line['listed']:,}", f"{took * 1e3:.2f}", f"{line['peak_gib']:.3f}"])
        case.figures[f"rule {line['ranks']}, s"] = took
    case.figures["rule, spread"] = spread
    return table


def _dcp(case: Case, plan: Plan) -> Table:
    """For the same tensors. DCP plans one box per tensor and rank, Tilestone plans more boxes."""
    dp = _of_size(plan, 16)
    found = programs.python("dcp_planning.py", "8", str(dp), "8", "500")
    ours = _exchange(8, dp, 8, 500)
    theirs = found["unpickle_seconds"] + found["global_seconds"]
    case.figures["plan, dcp ÷ tilestone"] = theirs / ours["seconds"]
    return Table(
        "compared with stock DCP's planning steps",
        f"{found['ranks']:,} ranks x 500 tensors; all plans are made in one process. The "
        "coordinator's step begins with all ranks' encoded plans: DCP unpickles them and calls "
        "`create_global_plan`. DCP gets one box per tensor and rank, because it has no flat "
        "ranges; Tilestone plans the boxes of the flat ranges. CPU time.",
        ["step", "dcp s", "tilestone s", "dcp ÷ tilestone"],
        [
            ["coordinator: plans decoded and assigned", f"{theirs:.2f}", f"{ours['seconds']:.3f}",
             f"{theirs / ours['seconds']:.0f}"],
            ["of this, after decoding (Tilestone: with decoding)", f"{found['global_seconds']:.2f}",
             f"{ours['seconds']:.3f}", f"{found['global_seconds'] / ours['seconds']:.0f}"],
            ["a rank: its local plan (Tilestone: with encoding)", f"{found['local_seconds']:.4f}",
             f"{ours['local_seconds']:.5f}",
             f"{found['local_seconds'] / ours['local_seconds']:.0f}"],
        ],
    )


def growth(case: Case, plan: Plan) -> Case:
    table = Table(
        "planning by exchange, cost against size",
        "CPU time per planned chunk. It should be constant or grow logarithmically.",
        COLUMNS)
    if plan.scale < 0.5:
        sizes = [(8, dp, 8, 100) for dp in (1, 4)]
    else:
        sizes = [(8, dp, 8, 200) for dp in (1, 4, 16, 64, 256)]
        sizes += [(8, 16, 8, tensors) for tensors in (50, 800)]
        sizes += [(2, dp, 16, 200, 8) for dp in (8, 32, 128, 512)]
    for numbers in sizes:
        table.rows.append(_row(_exchange(*numbers)))
    case.tables.append(table)
    return case
