"""The documentation of tilestone.megatron has no duplicates, and names only things that exist."""

from __future__ import annotations

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def _sections(text: str) -> dict[str, str]:
    """The sections of a text by second-level heading."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_readme_has_one_short_section_on_tilestone_megatron() -> None:
    sections = _sections((ROOT / "README.md").read_text())
    assert [name for name, text in sections.items() if "tilestone.megatron" in text] == [
        "From Megatron-Core"
    ]
    assert len(sections["From Megatron-Core"].split()) < 80
    assert "(docs/megatron.md)" in sections["From Megatron-Core"]


def test_the_page_on_megatron_links_to_what_exists() -> None:
    page = ROOT / "docs" / "megatron.md"
    text = page.read_text()
    anchors = {re.sub(r"[^\w\- ]", "", name).lower().replace(" ", "-") for name in _sections(text)}
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        assert (page.parent / path).exists(), target
        assert path or anchor in anchors, target


def test_every_python_test_that_the_incidents_name_exists() -> None:
    named = re.findall(r"`(test_\w+)`", (ROOT / "docs" / "incidents.md").read_text())
    sources = [path.read_text() for path in pathlib.Path(__file__).parent.glob("test_*.py")]
    written = {name for text in sources for name in re.findall(r"^def (test_\w+)", text, re.M)}
    assert named and set(named) <= written, sorted(set(named) - written)
