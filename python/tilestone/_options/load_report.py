"""What a load reports."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class LoadReport:
    """What a load found: differences between its templates and the checkpoint, and its timings.

    The lists are the union over all ranks, and the same on each. Except for `not_requested`, a list
    is empty unless the option of its name is "report".

    Attributes:
        not_in_checkpoint: wanted keys that are not in the checkpoint, sorted.
        not_requested: keys of the checkpoint that no rank wants, sorted; unless the option is
            "report", only those below a dict or list of a template (not the root).
        other_shape: keys of tensors whose wanted global shape differs from the stored one, sorted.
        bytes_loaded: stored bytes of what this rank loaded of tensors.
        timings: seconds that each step took on this rank, with the waiting for other ranks, in the
            order of the steps: "preparing" (the template), "describing" (which checkpoint is there),
            "choosing" (what to read; objects are read), "exchanging" (with other ranks), "reading"
            and "handing over" (what was loaded). Reports that differ only in them are equal.
    """

    not_in_checkpoint: list[str] = dataclasses.field(default_factory=list)
    not_requested: list[str] = dataclasses.field(default_factory=list)
    other_shape: list[str] = dataclasses.field(default_factory=list)
    bytes_loaded: int = dataclasses.field(default=0, compare=False)
    timings: dict[str, float] = dataclasses.field(default_factory=dict, compare=False)
