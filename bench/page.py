"""Writes a page of which a part is written by hand."""

from __future__ import annotations

from pathlib import Path

BY_HAND = "<!-- `make bench` writes what is above this line, and keeps what is below it. -->"


def write(path: Path, text: str) -> None:
    """Replaces what the page has above BY_HAND, or the whole page if it lacks that line."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    at = before.find(BY_HAND)
    kept = "\n" + before[at:] if at >= 0 else ""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.rstrip() + "\n" + kept, encoding="utf-8")
