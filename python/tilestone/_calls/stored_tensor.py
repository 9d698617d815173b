"""A tensor of an open checkpoint, which is read when it is indexed or converted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from tilestone import _core
from tilestone._errors import InvalidArgumentError
from tilestone._objects.dtypes import DType

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import EllipsisType

    from tilestone._objects.given import BoxLike
    from tilestone._protocols import SupportsDlpack

Index: TypeAlias = "int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]"


class StoredTensor:
    """A tensor of an open checkpoint. Nothing is read until it is indexed, converted or `read`.

    Attributes:
        key: its name in the checkpoint.
        shape: shape of the whole tensor, in elements.
        dtype: a DType, which is equal to its name.
    """

    __slots__ = ("_handle", "_read", "dtype", "key", "shape")

    def __init__(self, handle: _core.Checkpoint, read: Callable[..., Any], key: str) -> None:
        """Called by the checkpoint; read(key, box, framework=, out=) is its `Checkpoint.read`."""
        self._handle = handle
        self._read = read
        self.key = key
        self.shape: tuple[int, ...] = handle.shape(key)
        self.dtype = DType(handle.dtype(key))

    @property
    def boxes(self) -> list[_core.Box]:
        """The boxes of the stored chunks; in rank-local checkpoints they may overlap."""
        return self._handle.boxes(self.key)

    @property
    def files(self) -> list[str]:
        """The file of each box in `boxes`."""
        return self._handle.files_of(self.key)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements of the whole tensor."""
        count = 1
        for n in self.shape:
            count *= n
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.size * self.dtype.itemsize

    def read(
        self,
        box: BoxLike | None = None,
        *,
        framework: str | None = None,
        out: SupportsDlpack | None = None,
    ) -> Any:
        """Reads the tensor or one box of it, as `Checkpoint.read` does."""
        return self._read(self.key, box, framework=framework, out=out)

    def numpy(self) -> Any:
        """Reads the whole tensor as a numpy array."""
        return self.read(framework="numpy")

    def torch(self) -> Any:
        """Reads the whole tensor as a torch tensor."""
        return self.read(framework="torch")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """numpy.asarray(tensor) reads the whole tensor."""
        if copy is False:
            raise ValueError(f"{self.key}: a stored tensor can't become an array without a copy")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.key}: a tensor without dims has no length")
        return self.shape[0]

    def __getitem__(self, index: Index) -> Any:
        """Reads a part by numpy's basic indexing: tensor[:128, 64:], tensor[-1], tensor[..., ::2].

        Only the box from the first to the last element of each dim is read. A step other than 1 is
        applied to the box in memory.

        Raises:
            InvalidArgumentError (an IndexError for an integer): the index does not fit the shape,
                or is none of an int, a slice, or one Ellipsis.
        """
        picks = [self._pick(one, dim) for dim, one in enumerate(self._one_per_dim(index))]
        array = self.read([_ends(pick) for pick in picks])
        for dim in reversed(range(self.ndim)):
            array = _taken(picks[dim], array, dim)
        return array

    def _one_per_dim(self, index: Index) -> list[Any]:
        parts = list(index) if isinstance(index, tuple) else [index]
        gaps = [at for at, part in enumerate(parts) if part is Ellipsis]
        missing = self.ndim - (len(parts) - len(gaps))
        if missing < 0 or len(gaps) > 1:
            raise self._misfit(index)
        at = gaps[0] if gaps else len(parts)
        return [*parts[:at], *[slice(None)] * missing, *parts[at + len(gaps) :]]

    def _pick(self, part: Any, dim: int) -> range | int:
        """Of the indices along a dim, those that a part of an index takes."""
        try:
            if isinstance(part, bool):
                raise self._misfit(part)
            picked: range | int = range(self.shape[dim])[part]
            return picked
        except IndexError:  # with which iteration over a sequence ends
            raise _OutsideError(
                f"the index {part} is outside dim {dim} of the shape {self.shape}", key=self.key
            ) from None
        except (TypeError, ValueError):
            raise self._misfit(part) from None

    def _misfit(self, index: object) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"a stored tensor of shape {self.shape} can't be indexed by {index!r}: give an int or a "
            "slice for each dim, or one Ellipsis in the place of several",
            key=self.key,
        )

    def __repr__(self) -> str:
        return f"StoredTensor({self.key!r}, dtype={str(self.dtype)!r}, shape={self.shape})"


class _OutsideError(InvalidArgumentError, IndexError):
    """An integer index outside the tensor."""


def _ends(pick: range | int) -> tuple[int, int]:
    """The range that is read of a dim."""
    if isinstance(pick, int):
        return pick, pick + 1
    ends = sorted((pick[0], pick[-1])) if pick else (0, -1)
    return ends[0], ends[1] + 1


def _taken(pick: range | int, array: Any, dim: int) -> Any:
    """What a pick takes of the range that was read; a dim of which it takes one index goes."""
    before = (slice(None),) * dim
    if isinstance(pick, int):
        return array[(*before, 0)]
    if pick and pick.step < 0:  # torch knows no negative steps
        array = array.flip(dim) if hasattr(array, "flip") else array[(*before, slice(None, None, -1))]
    step = abs(pick.step) if pick else 1
    return array if step == 1 else array[(*before, slice(None, None, step))]
