"""Writes the tables: targets and ratios first, then the times of each case."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from statistics import median

import page
from measure import CONTROL, Case, Table
from targets import SUBJECT, all_targets, best_limit, control_spread

INTRODUCTION = """\
`make bench` writes this page, up to "On your own machine". All contestants of a case use the same
tensors. They run interleaved, in a new random order in each round. A save ends when every byte is durable. Before a cold load the
page cache is emptied; "again" is a second load right after the cold one; before a warm load all
files are read into the page cache. Every save here is synchronous, so it blocks a trainer for its
whole time. Each case has a control: the same code as a second contestant. Ratios that are nearer to
1 than the control's spread are not quoted. The spread is the difference of the two medians, or the
typical difference within a round divided by the square root of the number of rounds, if that is
larger. Machines differ, so compare ratios, not seconds. [cache.md](cache.md) explains what `auto`,
the default of `cache`, does.
"""


def table(case: Case) -> str:
    lines = [f"### {case.name}", "", case.what, ""]
    if case.rounds_left_out:
        lines += [f"{case.rounds_left_out} rounds were left out for lack of time.", ""]
    for phase, times in case.times.items():
        lines += _phase_table(case, phase, times)
    for failure in case.failures:
        lines += [f"- **failed**: {failure}"]
    if case.failures:
        lines.append("")
    for extra in case.tables:
        lines += _extra_table(extra)
    return "\n".join(lines)


def _phase_table(case: Case, phase: str, times: dict[str, list[float]]) -> list[str]:
    if SUBJECT not in times:
        return []
    subject = median(times[SUBJECT])
    spread = control_spread(times)
    lines = [
        f"**{phase}** (control's spread: {spread:.0%})",
        "",
        "| who | ratio to tilestone | median s | min s | max s | GB/s |",
        "|---|---|---|---|---|---|",
    ]
    for who in sorted(times, key=lambda name: median(times[name])):
        mid = median(times[who])
        lines.append(
            f"| {who} | {_ratio(mid / subject, spread, who)} | {mid:.3f} | {min(times[who]):.3f} "
            f"| {max(times[who]):.3f} | {case.bytes / mid / 1e9:.2f} |"
        )
    return [*lines, ""]


def _ratio(ratio: float, spread: float, who: str = "") -> str:
    return f"{ratio:.2f}" if who == SUBJECT or max(ratio, 1 / ratio) - 1 > spread else "≈ 1"


def _extra_table(extra: Table) -> list[str]:
    rows = ["| " + " | ".join(row) + " |" for row in [extra.header, ["---"] * len(extra.header)]]
    rows += ["| " + " | ".join(row) + " |" for row in extra.rows]
    return [f"**{extra.title}**", "", extra.note, "", *rows, ""]


def targets_table(cases: dict[str, Case]) -> str:
    lines = [
        "## Targets",
        "",
        "A peer's name (\"DCP\") means its time ÷ Tilestone's. Spread: that of the case's control.",
        "",
        "| what | target | measured | spread | |",
        "|---|---|---|---|---|",
    ]
    for target in all_targets():
        sign = "≤" if target.at_most else "≥"
        goal = f"{sign} {target.goal:g} {target.unit}"
        found = target.measure(cases)
        if found is None:
            lines.append(f"| {target.what} | {goal} | - | - | not measured in this run |")
            continue
        spread = f"{found.spread:.0%}" if found.spread else "-"
        lines.append(f"| {target.what} | {goal} | {found.value:.3g} {target.unit} | {spread} "
                     f"| {target.verdict(found)} |")
    return "\n".join([*lines, ""])


def summary(cases: dict[str, Case]) -> str:
    lines = [
        "## Ratios",
        "",
        "| case | phase | share of the limit | others' time ÷ tilestone's | spread |",
        "|---|---|---|---|---|",
    ]
    for case in cases.values():
        for phase, times in case.times.items():
            if SUBJECT not in times:
                continue
            subject = median(times[SUBJECT])
            spread = control_spread(times)
            others = [
                f"{name} {_ratio(median(t) / subject, spread)}"
                for name, t in sorted(times.items())
                if name not in (SUBJECT, CONTROL) and not name.startswith("limit:")
            ]
            others += [f"{failure.split(',')[0]} failed" for failure in case.failures]
            limit = best_limit(times)
            of_limit = f"{limit / subject:.2f}" if limit is not None else "-"
            lines.append(f"| {case.name} | {phase} | {of_limit} | {', '.join(others)} "
                         f"| {spread:.0%} |")
    return "\n".join([*lines, ""])


def failures(cases: dict[str, Case]) -> str:
    lines = [f"- {case.name}: {failure}" for case in cases.values() for failure in case.failures]
    return "\n".join(["## Failures", "", *lines, ""]) if lines else ""


def save(cases: dict[str, Case], machine: dict, path: Path) -> None:
    data = {"machine": machine, "cases": {name: asdict(case) for name, case in cases.items()}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> tuple[dict[str, Case], dict]:
    data = json.loads(path.read_text(encoding="utf-8"))
    cases = {}
    for name, fields in data["cases"].items():
        tables = [Table(**extra) for extra in fields.pop("tables")]
        cases[name] = Case(**fields, tables=tables)
    return cases, data["machine"]


def merged(paths: list[Path]) -> tuple[dict[str, Case], dict]:
    """The cases of the first run. Those that later runs measured are theirs."""
    cases, machine = load(paths[0])
    for path in paths[1:]:
        later, facts = load(path)
        cases.update(later)
        machine.setdefault("again", []).append(
            {"cases": list(later), "minutes": facts["minutes"], "memcpy_gb_s": facts["memcpy_gb_s"]})
    return cases, machine


def _again(machine: dict) -> list[str]:
    return [f"Measured in a later run of {run['minutes']:.0f} minutes (memcpy "
            f"{run['memcpy_gb_s']:.1f} GB/s): {', '.join(run['cases'])}."
            for run in machine.get("again", [])]


def _of_part(machine: dict) -> list[str]:
    if machine["scale"] == 1:
        return []
    return ["", f"Cases and targets are named by the full size; {machine['scale']:g} of it was measured."]


def render(cases: dict[str, Case], machine: dict, path: Path) -> None:
    text = [
        "# Benchmarks",
        "",
        INTRODUCTION,
        f"Machine: {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}, "
        f"Python {machine['python']}, torch {machine['torch']}; memcpy "
        f"{machine['memcpy_gb_s']:.1f} GB/s. {machine['rounds']} rounds, seed {machine['seed']}, "
        f"{machine['scale']:g} of the full size, {machine.get('minutes', 0):.0f} minutes.",
        *_again(machine),
        *([machine["remark"]] if "remark" in machine else []),
        *_of_part(machine),
        "",
        targets_table(cases),
        summary(cases),
        failures(cases),
        "## Cases",
        "",
        *[table(case) for case in cases.values()],
    ]
    page.write(path, "\n".join(text))
