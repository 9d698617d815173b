"""The table: medians, ratios against Tilestone, and the spread of the A/A control."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from statistics import median

from measure import CONTROL, Case

SUBJECT = "tilestone"


def control_spread(times: dict[str, list[float]]) -> float:
    """How far the medians of two contestants with the same code lie apart, as a ratio less 1."""
    if CONTROL not in times or SUBJECT not in times:
        return 0.0
    a, b = times[SUBJECT], times[CONTROL]
    whole = max(median(a) / median(b), median(b) / median(a))
    return whole - 1


def table(case: Case) -> str:
    lines = [f"### {case.name}", "", case.what, ""]
    for phase, times in case.times.items():
        if SUBJECT not in times:
            continue
        subject = median(times[SUBJECT])
        spread = control_spread(times)
        lines += [
            f"**{phase}** (control: the same code twice differs by {spread:.0%}; "
            "ratios closer to 1 than that say nothing)",
            "",
            "| who | ratio to tilestone | median s | min s | max s | GB/s |",
            "|---|---|---|---|---|---|",
        ]
        for who in sorted(times, key=lambda name: median(times[name])):
            mid = median(times[who])
            ratio = mid / subject
            said = f"{ratio:.2f}" if who == SUBJECT or abs(ratio - 1) > spread else "≈ 1"
            lines.append(
                f"| {who} | {said} | {mid:.3f} | {min(times[who]):.3f} | {max(times[who]):.3f} "
                f"| {case.bytes / mid / 1e9:.2f} |"
            )
        lines.append("")
    for name, value in case.facts.items():
        lines.append(f"- {name}: {value}")
    return "\n".join([*lines, ""])


def best_limit(times: dict[str, list[float]]) -> float:
    limits = [median(t) for name, t in times.items() if name.startswith("limit:")]
    return min(limits) if limits else float("nan")


def summary(cases: list[Case]) -> str:
    lines = [
        "| case | phase | of the limit | peers' time ÷ tilestone's |",
        "|---|---|---|---|",
    ]
    for case in cases:
        for phase, times in case.times.items():
            if SUBJECT not in times:
                continue
            subject = median(times[SUBJECT])
            peers = {
                name: median(t) / subject
                for name, t in times.items()
                if name not in (SUBJECT, CONTROL) and not name.startswith("limit:")
            }
            said = ", ".join(f"{name} {ratio:.2f}" for name, ratio in sorted(peers.items()))
            limit = best_limit(times)
            of_limit = f"{limit / subject:.2f}" if limit == limit else "-"
            lines.append(f"| {case.name} | {phase} | {of_limit} | {said} |")
    return "\n".join([*lines, ""])


def write(cases: list[Case], machine: dict[str, object], json_path: Path, md_path: Path) -> None:
    data = {"machine": machine, "cases": [asdict(case) for case in cases]}
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    text = [
        "# Benchmarks",
        "",
        "Written by `make bench`. Every contestant runs in the same process over the same tensors,",
        "interleaved, in a new random order each round; a save counts until every byte is durable,",
        "\"cold\" means that the page cache was emptied, \"warm\" that all files were read into it.",
        "Machines differ: read the ratios.",
        "",
        f"Machine: {machine['cores']} cores, {machine['memory_gib']} GiB, {platform.system()} "
        f"{platform.release()}, Python {platform.python_version()}, torch {machine['torch']}; "
        f"memcpy {machine['memcpy_gb_s']:.1f} GB/s. {machine['rounds']} rounds, "
        f"seed {machine['seed']}, {machine['scale']:g} of the full size.",
        "",
        summary(cases),
        *[table(case) for case in cases],
    ]
    md_path.parent.mkdir(parents=True, exist_ok=True)
    md_path.write_text("\n".join(text), encoding="utf-8")
