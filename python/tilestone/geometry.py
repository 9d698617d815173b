"""Boxes of tensors, meshes of ranks, and placements over meshes.

    from tilestone.geometry import Mesh, Replicate, Shard

Offsets and shapes are in elements. `Mesh` and the placements mean the same as torch's classes of
these names.
"""

from tilestone._core import (
    Box,
    Mesh,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    flat_range_to_boxes,
)

__all__ = [
    "Box",
    "Mesh",
    "Partial",
    "Replicate",
    "Shard",
    "StridedShard",
    "flat_range_to_boxes",
]
