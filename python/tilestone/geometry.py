"""Boxes of tensors, and the boxes that ranks hold according to meshes and placements.

    from tilestone.geometry import Mesh, Replicate, Shard, held_boxes

Offsets and shapes are in elements. The functions are pure: they need no ranks, no files and no
torch. `Mesh` and the placements mean the same as torch's classes of these names.
"""

from tilestone._core import (
    Box,
    LocalBoxes,
    MergedSharding,
    Mesh,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    flat_range_to_boxes,
    held_boxes,
    local_boxes,
    merge_shardings,
    replica_holders,
    replica_id,
)

__all__ = [
    "Box",
    "LocalBoxes",
    "MergedSharding",
    "Mesh",
    "Partial",
    "Replicate",
    "Shard",
    "StridedShard",
    "flat_range_to_boxes",
    "held_boxes",
    "local_boxes",
    "merge_shardings",
    "replica_holders",
    "replica_id",
]
