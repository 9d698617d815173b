"""What the message of an error says, apart from its wording."""

from __future__ import annotations

import re


def mentions(text: str, *facts: str) -> bool:
    """Whether `text` contains each of the facts (a rank, a key, an option, a value), in this order
    and as whole words: "rank 1" is not in "rank 12"."""
    begin = 0
    for fact in facts:
        # A word may not go on beyond the fact: no word character on both sides of an end.
        before = r"(?<!\w)" if re.match(r"\w", fact) else ""
        after = r"(?!\w)" if re.search(r"\w\Z", fact) else ""
        found = re.compile(before + re.escape(fact) + after).search(text, begin)
        if found is None:
            return False
        begin = found.end()
    return True
