"""Finds the elements of the model's tensors in the buckets of the job that saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Tuple

from tilestone._errors import InvalidArgumentError, MismatchError
from tilestone.megatron.distributed_optimizer.layout import Layout, Slice
from tilestone.megatron.distributed_optimizer.pieces import Piece


@dataclass(frozen=True)
class Source:
    """A box of a model's tensor in a bucket.

    Attributes:
        layout: layout of the model-parallel rank that saved it.
        place: the numbers of the buffer and of the bucket.
        piece: the box; its start is relative to the beginning of the bucket.
    """

    layout: Layout
    place: Tuple[int, int]
    piece: Piece


@dataclass(frozen=True)
class SharedBox:
    """A box of a slice, and the bucket that holds it.

    Attributes:
        source: the box in the bucket that holds it.
        theirs: the shared box in the bucket.
        ours: the same box in the slice's flattened parameter.
    """

    source: Source
    theirs: Piece
    ours: Piece


class Sources:
    """The boxes that some layouts hold.

    Args:
        layouts: layouts of the model-parallel ranks of the job that saved. If several have a copy
            of a box, that of the first layout is read.

    Raises:
        CheckpointingException: two layouts belong to the same model-parallel rank.
    """

    def __init__(self, layouts: Iterable[Layout]) -> None:
        self._by_key: dict[str, dict[object, Source]] = {}
        self.layouts: dict[str, Layout] = {}
        for layout in layouts:
            if layout.prefix in self.layouts:
                raise InvalidArgumentError(f"two layouts were given for {layout.prefix}")
            self.layouts[layout.prefix] = layout
            for place, bucket in layout.buckets():
                for parameter in bucket.parameters:
                    for piece in parameter.pieces:
                        source = Source(layout, place, piece.moved(parameter.start))
                        boxes = self._by_key.setdefault(piece.key, {})
                        boxes.setdefault((piece.offset, piece.shape), source)

    def find(self, part: Slice) -> list[SharedBox]:
        """Finds the elements of a slice.

        Raises:
            CheckpointingException: no layout holds some of them, or one of the parameter's tensors
                has another global shape in a layout (and allow_shape_mismatch is not set).
        """
        found = []
        wanted = part.numel
        there = 0
        for piece in part.parameter.pieces:
            is_padded = self._is_other_shape(piece)
            boxes = list(self._find_piece(part, piece))
            found.extend(boxes)
            if is_padded:
                # The elements of this piece that no layout holds are padding.
                wanted -= sum(box.numel for box in piece.within(part.begin, part.end))
            else:
                there += sum(one.ours.numel for one in boxes)
        if there != wanted:
            raise MismatchError(
                f"the known layouts of the job that saved hold {there} of {wanted} elements "
                "of the parameter's slice",
                key=part.parameter.key,
                hint=f"known layouts: {', '.join(sorted(self.layouts))}",
            )
        return found

    def _find_piece(self, part: Slice, piece: Piece) -> Iterator[SharedBox]:
        for source in self._by_key.get(piece.key, {}).values():
            shared = piece.cut(source.piece.offset, source.piece.shape)
            for ours in [] if shared is None else shared.within(part.begin, part.end):
                theirs = source.piece.cut(ours.offset, ours.shape)
                assert theirs is not None
                yield SharedBox(source, theirs, ours)

    def _is_other_shape(self, piece: Piece) -> bool:
        """Whether the tensor has another global shape in a layout; raises if it may not."""
        for source in self._by_key.get(piece.key, {}).values():
            there = source.piece.global_shape
            if there != piece.global_shape and not piece.allow_shape_mismatch:
                raise MismatchError(
                    f"the tensor has global shape {there} in the layout of {source.layout.prefix}, "
                    f"not {piece.global_shape}",
                    key=piece.key,
                )
            if there != piece.global_shape:
                return True
        return False
