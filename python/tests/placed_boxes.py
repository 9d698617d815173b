"""What a rank holds of a tensor, by placements alone. Only the package of the tests says it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tilestone import _core
from tilestone.geometry import Box, Mesh


class Held(NamedTuple):
    """locals[i] is the box of the local tensor that holds boxes[i] of the global one."""

    local_shape: tuple[int, ...]
    boxes: list[Box]
    locals: list[Box]


def held_boxes(
    shape: Sequence[int], mesh: Mesh, at: Sequence[int], placements: list[Any],
    local_shape: Sequence[int] | None = None,
) -> Held:  # fmt: skip
    """Of the rank at a coordinate of the mesh; `local_shape`: what it really has."""
    return Held(*_core._boxes_of(shape, mesh, at, placements, local_shape))  # type: ignore[attr-defined]
