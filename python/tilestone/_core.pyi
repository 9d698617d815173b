"""The engine of tilestone; use the package `tilestone`."""

from collections.abc import Callable, Mapping, Sequence
from typing import overload

import numpy
import numpy.typing


VERSION: str = '0.1.0'

def log(level: int, message: str) -> None:
    """Logs a message as the engine does; the level is one of `logging`."""

def leave_threads_behind() -> None:
    """
    For the exit of the program: makes threads that are stuck in foreign code wait when they return.
    """

class Box:
    """
    A half-open n-dimensional range of a tensor's elements: `offset` and `shape`, both in elements.
    """

    def __init__(self, offset: Sequence[int], shape: Sequence[int]) -> None: ...

    @property
    def offset(self) -> tuple[int, ...]:
        """The first element in each dim."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of elements in each dim."""

    @property
    def numel(self) -> int:
        """Number of elements."""

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index: array[box.slices]."""

    def __repr__(self) -> str: ...

    def __reduce__(self) -> tuple[object, ...]: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

class Shard:
    """
    Splits tensor dim `dim` into torch.chunk's sizes: chunks of ceil(n / ranks) elements, of which the last ones are shorter or empty.
    """

    def __init__(self, dim: int) -> None: ...

    @property
    def dim(self) -> int: ...

    def __repr__(self) -> str: ...

    def __reduce__(self) -> tuple[object, ...]: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

class StridedShard:
    """
    torch's _StridedShard: mesh dims further right first split `dim` into `split` parts; then each part is split into this mesh dim's shards (FSDP2 over TP).
    """

    def __init__(self, dim: int, split: int) -> None: ...

    @property
    def dim(self) -> int: ...

    @property
    def split(self) -> int: ...

    def __repr__(self) -> str: ...

    def __reduce__(self) -> tuple[object, ...]: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

class Replicate:
    """The same on every rank of the mesh dim."""

    def __init__(self) -> None: ...

    def __repr__(self) -> str: ...

    def __reduce__(self) -> tuple[object, ...]: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

class Partial:
    """A pending sum over the mesh dim; it can't be saved."""

    def __init__(self) -> None: ...

    def __repr__(self) -> str: ...

    def __reduce__(self) -> tuple[object, ...]: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

class Mesh:
    """Ranks in an n-dimensional grid with names, like torch's DeviceMesh."""

    def __init__(self, shape: Sequence[int], ranks: Sequence[int] | None = None, names: Sequence[str] = []) -> None:
        """
        `ranks` holds the global ranks in C order; by default they are 0, 1, 2 ...
        Raises InvalidArgumentError if a rank or name occurs twice or their number is wrong.
        """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def ranks(self) -> list[int]: ...

    @property
    def names(self) -> list[str]: ...

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """The position of a global rank in the mesh; None for a rank outside it."""

    def rank_at(self, coordinate: Sequence[int]) -> int: ...

    def __repr__(self) -> str: ...

    def __reduce__(self) -> tuple[object, ...]: ...

class LocalBoxes:
    """What one rank holds of a tensor."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""

    @property
    def boxes(self) -> list[Box]:
        """Its boxes in the global tensor."""

    @property
    def locals(self) -> list[Box]:
        """locals[i] is the box of the local tensor that holds boxes[i]."""

def local_boxes(global_shape: Sequence[int], mesh: Mesh, coordinate: Sequence[int], placements: Sequence[Shard | StridedShard | Replicate | Partial]) -> LocalBoxes:
    """
    The boxes that the rank at `coordinate` of the mesh holds of a tensor with shape `global_shape` (in elements). An empty shard gives one empty box. Sizes follow torch.chunk, as in torch's DTensor.
    Raises InvalidArgumentError for Partial, a dim out of range or a wrong number of placements.
    """

def held_boxes(global_shape: Sequence[int], mesh: Mesh, coordinate: Sequence[int], placements: Sequence[Shard | StridedShard | Replicate | Partial], local_shape: Sequence[int]) -> LocalBoxes:
    """
    The same as local_boxes, for a rank whose local tensor has `local_shape`. If FSDP2 over tensor parallelism splits unevenly, torch's own reading of the placements does not describe what the rank holds; this function uses the reading that gives the local shape.
    Raises UnsupportedError if both readings give this shape but different elements, InvalidArgumentError if neither does.
    """

def replica_id(mesh: Mesh, coordinate: Sequence[int], placements: Sequence[Shard | StridedShard | Replicate | Partial]) -> tuple[int, ...]:
    """
    The coordinate along the Replicate dims only; all zeros for the main replica.
    """

def replica_holders(mesh: Mesh, coordinate: Sequence[int], placements: Sequence[Shard | StridedShard | Replicate | Partial]) -> list[int]:
    """
    The global ranks that hold the same boxes, ascending, this one included.
    """

def flat_range_to_boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """
    The elements [begin, end) of a flattened tensor with shape `shape`, as at most 2n - 1 disjoint boxes in flat order (n: the number of dims).
    """

class MergedSharding:
    """The part of the checkpoint's tensor that a rank holds."""

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor, in elements."""

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the checkpoint's tensor if it were contiguous, in elements."""

    @property
    def held(self) -> LocalBoxes:
        """The boxes that the rank holds."""

    @property
    def replica_id(self) -> tuple[int, ...]:
        """All zeros on exactly one of the ranks that hold the same boxes."""

    @property
    def holders(self) -> list[int]:
        """
        The global ranks that hold the same boxes, ascending, this one included; empty if the meshes don't determine them.
        """

def merge_shardings(local_shape: Sequence[int], global_shape: Sequence[int], mesh: Mesh, placements: Sequence[Shard | StridedShard | Replicate | Partial], checkpoint_mesh: Mesh, checkpoint_placements: Sequence[Shard | StridedShard | Replicate | Partial], rank: int) -> MergedSharding:
    """
    Merges a parameter's own mesh and placements with those that the checkpoint has for it (expert weights under expert parallelism with FSDP2), for the global rank `rank`, which must be in both meshes. A Shard of the checkpoint is applied outside the parameter's own shards, unless the parameter already splits the same ranks along the same dim. Ranks are matched by their numbers, not by the names of mesh dims. Shapes are in elements; `global_shape` is the parameter's own.
    Raises InvalidArgumentError if the two contradict each other.
    """

def find_rule(patterns: Sequence[str], name: str) -> int | None:
    """
    The index of the most specific pattern that matches the name; None if no pattern matches. See tilestone.PlacementRules.
    Raises InvalidArgumentError if two matching patterns are equally specific.
    """

class TensorView:
    """A borrowed view of a tensor's memory."""

    @staticmethod
    def strided(data: int, dtype: str, shape: Sequence[int], strides: Sequence[int], begin: int, bytes: int, owner: object) -> TensorView:
        """
        Memory at address `data`, which must be inside [begin, begin + bytes); strides are in elements.
        """

    @staticmethod
    def on_device(dtype: str, shape: Sequence[int], memory: object, owner: object) -> TensorView:
        """Memory on a device, which is copied from and to block by block."""

    @staticmethod
    def of_torch(tensor: object, for_load: bool, owner: object) -> TensorView | None:
        """
        A view of a dense torch.Tensor or Parameter in host memory; None if it needs more than a look at its memory.
        """

    @staticmethod
    def without_data(dtype: str, shape: Sequence[int]) -> TensorView:
        """A tensor without memory, which a load allocates."""

    @staticmethod
    def from_dlpack(array: object, writable: bool) -> TensorView | None:
        """
        A view of an array that supports DLPack; None if the array does not support it, or is read-only but `writable` is True.
        """

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def with_owner(self, owner: object) -> TensorView:
        """A view of the same memory that another object keeps alive."""

    @property
    def owner(self) -> object: ...

    @property
    def bytes(self) -> numpy.typing.NDArray[numpy.uint8]:
        """The memory of a contiguous view as an array of uint8, without a copy."""

def shares_elements(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """
    Whether several elements may share memory, as those of an expanded tensor do.
    """

def is_writable(data: int, bytes: int) -> bool:
    """Whether memory of this process is mapped for writing."""

def itemsize(dtype: str) -> int:
    """Bytes per element."""

def dtypes() -> list[str]:
    """Names of all element types."""

def pickled_classes(pickled: bytes, archive: bool) -> list[str]:
    """
    The names of the classes whose objects a load of this pickle would return as Opaque.

    Raises InvalidArgumentError if the pickle could not be read back.
    """

class ShardedTensor:
    @staticmethod
    def from_rank_offsets(key: str, data: TensorView, offsets: Sequence[tuple[int, int, int]], replica_id: Sequence[int], prepend_axis_num: int) -> ShardedTensor: ...

    @staticmethod
    def from_rank_offsets_flat(key: str, data: TensorView, local_shape: Sequence[int], begin: int, end: int, offsets: Sequence[tuple[int, int, int]], replica_id: Sequence[int], prepend_axis_num: int) -> ShardedTensor: ...

    @staticmethod
    def from_placements(key: str, local: TensorView, global_shape: Sequence[int], mesh: Mesh, placements: Sequence[Shard | StridedShard | Replicate | Partial], rank: int) -> ShardedTensor: ...

    @staticmethod
    def from_param(key: str, local: TensorView, param_shape: Sequence[int], mesh: Mesh, placements: Sequence[Shard | StridedShard | Replicate | Partial], checkpoint_mesh: Mesh, checkpoint_placements: Sequence[Shard | StridedShard | Replicate | Partial], rank: int) -> ShardedTensor: ...

    @staticmethod
    def from_box(key: str, data: TensorView, global_shape: Sequence[int], box: Box, replica_id: Sequence[int], prepend_axis_num: int) -> ShardedTensor: ...

    @staticmethod
    def from_box_flat(key: str, data: TensorView, global_shape: Sequence[int], box: Box, begin: int, end: int, replica_id: Sequence[int], prepend_axis_num: int) -> ShardedTensor: ...

    @staticmethod
    def from_pieces(key: str, data: TensorView, global_shape: Sequence[int], pieces: Sequence[tuple[Box, TensorView]]) -> ShardedTensor: ...

    def of_other_data(self, key: str, data: TensorView) -> ShardedTensor | None:
        """
        Like this one, made from data of the same shape: with other elements, dtype and key. None if it has to be made anew.
        """

    @property
    def key(self) -> str: ...

    @property
    def global_shape(self) -> tuple[int, ...]: ...

    @property
    def boxes(self) -> list[Box]: ...

    @property
    def holders(self) -> list[int]: ...

    @holders.setter
    def holders(self, arg: Sequence[int], /) -> None: ...

    @property
    def replica_id(self) -> tuple[int, ...]: ...

    @replica_id.setter
    def replica_id(self, arg: Sequence[int], /) -> None: ...

    @property
    def unknown_replicas(self) -> bool: ...

    @unknown_replicas.setter
    def unknown_replicas(self, arg: bool, /) -> None: ...

    @property
    def allow_shape_mismatch(self) -> bool: ...

    @allow_shape_mismatch.setter
    def allow_shape_mismatch(self, arg: bool, /) -> None: ...

    @property
    def is_regular_grid(self) -> bool: ...

class ShardedObject:
    @staticmethod
    def make(key: str, data: object | None, global_shape: Sequence[int], global_offset: Sequence[int], replica_id: Sequence[int], bridge: object | None) -> ShardedObject: ...

    @property
    def unique_key(self) -> str: ...

class ShardedTensorFactory:
    @staticmethod
    def make(key: str, data: TensorView, original: object, build: object, merge: object, replica_id: Sequence[int], flattened_range: tuple[int, int] | None, bridge: object) -> ShardedTensorFactory: ...

class LocalNonpersistent:
    @staticmethod
    def make(value: object | None) -> LocalNonpersistent: ...

def agree(work: str, comm: object, say: Callable[[int, bytes], bytes], decide: Callable[[int, list[bytes]], tuple[bytes, bool]], seconds: float) -> bytes:
    """
    Runs rounds in which all ranks fail together. In each round, every rank calls say(round, answer of the previous round) and sends the result to rank 0. Rank 0 calls decide(round, results), which returns (answer, is the last round), and every rank gets the answer.
    If either function raises on any rank, every rank raises. Returns the last answer.
    """

class CallMemory:
    """What a rank's communicator keeps from one call to the next."""

    def __init__(self) -> None: ...

class Communicator:
    """One rank's end of a group. Timeouts are in seconds."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def describe(self) -> str: ...

    def __repr__(self) -> str: ...

    def gather(self, mine: bytes, timeout: float | None = None) -> list[bytes]:
        """
        On rank 0, every rank's bytes in the order of ranks; on other ranks an empty list.
        """

    def scatter(self, parts: Sequence[bytes], timeout: float | None = None) -> bytes: ...

    def broadcast(self, mine: bytes, timeout: float | None = None) -> bytes: ...

    def all_to_all(self, to: Sequence[bytes], timeout: float | None = None) -> list[bytes]: ...

def solo() -> Communicator:
    """A group of one rank."""

def mpi_world(timeout: float | None = None) -> Communicator:
    """
    A duplicate of MPI_COMM_WORLD. Every rank of the job must call this, within `timeout` seconds. It calls MPI_Init if that was not called yet, which waits for all ranks without a limit. Raises UnsupportedError in a build without MPI.
    """

class SessionStats:
    """A session's counters, on this rank."""

    @property
    def saves(self) -> int:
        """Saves that were planned."""

    @property
    def plans_exchanged(self) -> int:
        """Saves for which the ranks sent their plans to rank 0."""

    @property
    def plans_from_cache(self) -> int:
        """
        Saves that used the plan of an earlier save. For the saves in neither count, this rank made a new plan alone.
        """

    @property
    def plan_bytes_sent(self) -> int:
        """Bytes of this rank's plans."""

    def __repr__(self) -> str: ...

class Session:
    """What one rank keeps from one save to the next."""

    @overload
    def __init__(self, comm: object | None, seconds: float, check: object) -> None: ...

    @overload
    def __init__(self, comm: object | None) -> None: ...

    @overload
    def __init__(self, rank: int, world_size: int, token: str) -> None: ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def token(self) -> str: ...

    @property
    def stats(self) -> SessionStats: ...

    def prepare(self, make: Callable[[], SaveRequest], max_staged_bytes: int | None) -> int:
        """Prepares staging memory for a state; returns its size in bytes."""

    def by_files(self, path: bytes) -> ByFiles:
        """
        This rank's part in the next save by files to a path. Each call counts as one save.
        """

class ByFiles:
    def __init__(self) -> None: ...

    @property
    def rank(self) -> int: ...

    @rank.setter
    def rank(self, arg: int, /) -> None: ...

    @property
    def world_size(self) -> int: ...

    @world_size.setter
    def world_size(self, arg: int, /) -> None: ...

    @property
    def token(self) -> str: ...

    @token.setter
    def token(self, arg: str, /) -> None: ...

    @property
    def number(self) -> int: ...

    @number.setter
    def number(self, arg: int, /) -> None: ...

    @property
    def wait(self) -> bool: ...

    @wait.setter
    def wait(self, arg: bool, /) -> None: ...

    @property
    def torch_rank_local(self) -> bool: ...

    @torch_rank_local.setter
    def torch_rank_local(self, arg: bool, /) -> None: ...

class LocalCopies:
    def __init__(self) -> None: ...

    @property
    def group(self) -> list[int]: ...

    @group.setter
    def group(self, arg: Sequence[int], /) -> None: ...

    @property
    def max_bytes(self) -> int | None: ...

    @max_bytes.setter
    def max_bytes(self, arg: int | None, /) -> None: ...

class Checks:
    def __init__(self) -> None: ...

    @property
    def access(self) -> bool: ...

    @access.setter
    def access(self, arg: bool, /) -> None: ...

    @property
    def common_differs(self) -> str: ...

    @common_differs.setter
    def common_differs(self, arg: str, /) -> None: ...

    @property
    def checksums(self) -> bool: ...

    @checksums.setter
    def checksums(self, arg: bool, /) -> None: ...

class Differences:
    def __init__(self) -> None: ...

    @property
    def not_in_checkpoint(self) -> str: ...

    @not_in_checkpoint.setter
    def not_in_checkpoint(self, arg: str, /) -> None: ...

    @property
    def not_requested(self) -> str | None: ...

    @not_requested.setter
    def not_requested(self, arg: str | None, /) -> None: ...

    @property
    def other_shape(self) -> str: ...

    @other_shape.setter
    def other_shape(self, arg: str, /) -> None: ...

class Reading:
    def __init__(self) -> None: ...

    @property
    def two_phase(self) -> str: ...

    @two_phase.setter
    def two_phase(self, arg: str, /) -> None: ...

    @property
    def cache(self) -> str | None: ...

    @cache.setter
    def cache(self, arg: str | None, /) -> None: ...

    @property
    def follow_links(self) -> bool: ...

    @follow_links.setter
    def follow_links(self, arg: bool, /) -> None: ...

class Resources:
    def __init__(self) -> None: ...

    @property
    def threads(self) -> int: ...

    @threads.setter
    def threads(self, arg: int, /) -> None: ...

    @property
    def buffer_bytes(self) -> int: ...

    @buffer_bytes.setter
    def buffer_bytes(self, arg: int, /) -> None: ...

    @property
    def files_per_rank(self) -> int: ...

    @files_per_rank.setter
    def files_per_rank(self, arg: int, /) -> None: ...

class Keep:
    def __init__(self) -> None: ...

    @property
    def last(self) -> int: ...

    @last.setter
    def last(self, arg: int, /) -> None: ...

    @property
    def every(self) -> int: ...

    @every.setter
    def every(self, arg: int, /) -> None: ...

    @property
    def best(self) -> tuple[str, str, int] | None: ...

    @best.setter
    def best(self, arg: tuple[str, str, int] | None, /) -> None: ...

    @property
    def newer_than(self) -> float | None: ...

    @newer_than.setter
    def newer_than(self, arg: float | None, /) -> None: ...

class RunStep:
    """What a CheckpointManager adds to a save."""

class SaveOptions:
    def __init__(self) -> None: ...

    @property
    def format(self) -> str: ...

    @format.setter
    def format(self, arg: str, /) -> None: ...

    @property
    def dialect(self) -> str: ...

    @dialect.setter
    def dialect(self, arg: str, /) -> None: ...

    @property
    def by_files(self) -> ByFiles | None: ...

    @by_files.setter
    def by_files(self, arg: ByFiles | None, /) -> None: ...

    @property
    def overwrite(self) -> bool: ...

    @overwrite.setter
    def overwrite(self, arg: bool, /) -> None: ...

    @property
    def checks(self) -> Checks: ...

    @checks.setter
    def checks(self, arg: Checks, /) -> None: ...

    @property
    def copies(self) -> LocalCopies | None: ...

    @copies.setter
    def copies(self, arg: LocalCopies | None, /) -> None: ...

    @property
    def reuse(self) -> str | None: ...

    @reuse.setter
    def reuse(self, arg: bytes | None, /) -> None: ...

    @property
    def resources(self) -> Resources: ...

    @resources.setter
    def resources(self, arg: Resources, /) -> None: ...

    @property
    def timeout(self) -> float: ...

    @timeout.setter
    def timeout(self, arg: float, /) -> None: ...

    @property
    def tp_replica_names(self) -> bool: ...

    @tp_replica_names.setter
    def tp_replica_names(self, arg: bool, /) -> None: ...

    @property
    def separation_hint(self) -> str: ...

    @separation_hint.setter
    def separation_hint(self, arg: str, /) -> None: ...

    @property
    def verify_integrity(self) -> bool: ...

    @verify_integrity.setter
    def verify_integrity(self, arg: bool, /) -> None: ...

    @property
    def attributes(self) -> dict[str, str]: ...

    @attributes.setter
    def attributes(self, arg: Mapping[str, str], /) -> None: ...

    @property
    def step(self) -> RunStep: ...

    @step.setter
    def step(self, arg: RunStep | None, /) -> None: ...

    def write_safetensors(self, files: Mapping[str, str], other_file: str, pieces: Mapping[str, tuple[Sequence[int], Sequence[int]]]) -> None: ...

class LoadOptions:
    def __init__(self) -> None: ...

    @property
    def own_rank(self) -> int | None: ...

    @own_rank.setter
    def own_rank(self, arg: int | None, /) -> None: ...

    @property
    def format(self) -> str: ...

    @format.setter
    def format(self, arg: str, /) -> None: ...

    @property
    def unmarked(self) -> str: ...

    @unmarked.setter
    def unmarked(self, arg: str, /) -> None: ...

    @property
    def cast(self) -> bool: ...

    @cast.setter
    def cast(self, arg: bool, /) -> None: ...

    @property
    def differences(self) -> Differences: ...

    @differences.setter
    def differences(self, arg: Differences, /) -> None: ...

    @property
    def checks(self) -> Checks: ...

    @checks.setter
    def checks(self, arg: Checks, /) -> None: ...

    @property
    def reading(self) -> Reading: ...

    @reading.setter
    def reading(self, arg: Reading, /) -> None: ...

    @property
    def resources(self) -> Resources: ...

    @resources.setter
    def resources(self, arg: Resources, /) -> None: ...

    @property
    def timeout(self) -> float: ...

    @timeout.setter
    def timeout(self, arg: float, /) -> None: ...

    @property
    def rename(self) -> bool: ...

    @rename.setter
    def rename(self, arg: object | None, /) -> None: ...

    @property
    def fill_empty(self) -> bool: ...

    @fill_empty.setter
    def fill_empty(self, arg: bool, /) -> None: ...

    @property
    def sharded_only(self) -> bool: ...

    @sharded_only.setter
    def sharded_only(self, arg: bool, /) -> None: ...

    @property
    def objects_by_grid(self) -> bool: ...

    @objects_by_grid.setter
    def objects_by_grid(self, arg: bool, /) -> None: ...

    @property
    def log_report(self) -> bool: ...

    @log_report.setter
    def log_report(self, arg: bool, /) -> None: ...

class OpenOptions:
    def __init__(self) -> None: ...

    @property
    def format(self) -> str: ...

    @format.setter
    def format(self, arg: str, /) -> None: ...

    @property
    def unmarked(self) -> str: ...

    @unmarked.setter
    def unmarked(self, arg: str, /) -> None: ...

    @property
    def checks(self) -> Checks: ...

    @checks.setter
    def checks(self, arg: Checks, /) -> None: ...

    @property
    def reading(self) -> Reading: ...

    @reading.setter
    def reading(self, arg: Reading, /) -> None: ...

    @property
    def resources(self) -> Resources: ...

    @resources.setter
    def resources(self, arg: Resources, /) -> None: ...

class AsyncOptions:
    def __init__(self) -> None: ...

    @property
    def on_error(self) -> str: ...

    @on_error.setter
    def on_error(self, arg: str, /) -> None: ...

    @property
    def in_flight(self) -> str: ...

    @in_flight.setter
    def in_flight(self, arg: str, /) -> None: ...

    @property
    def max_staged_bytes(self) -> int | None: ...

    @max_staged_bytes.setter
    def max_staged_bytes(self, arg: int | None, /) -> None: ...

class ConvertOptions:
    def __init__(self) -> None: ...

    @property
    def format(self) -> str: ...

    @format.setter
    def format(self, arg: str, /) -> None: ...

    @property
    def dialect(self) -> str: ...

    @dialect.setter
    def dialect(self, arg: str, /) -> None: ...

    @property
    def keys(self) -> list[str]: ...

    @keys.setter
    def keys(self, arg: Sequence[str], /) -> None: ...

    @property
    def only(self) -> str: ...

    @only.setter
    def only(self, arg: str, /) -> None: ...

    @property
    def rename_by(self) -> bool: ...

    @rename_by.setter
    def rename_by(self, arg: object | None, /) -> None: ...

    @property
    def cast(self) -> str: ...

    @cast.setter
    def cast(self, arg: str, /) -> None: ...

    @property
    def optimizer(self) -> str: ...

    @optimizer.setter
    def optimizer(self, arg: str, /) -> None: ...

    @property
    def layout_file(self) -> str: ...

    @layout_file.setter
    def layout_file(self, arg: str, /) -> None: ...

    @property
    def shard_bytes(self) -> int: ...

    @shard_bytes.setter
    def shard_bytes(self, arg: int, /) -> None: ...

    @property
    def files(self) -> dict[str, str]: ...

    @files.setter
    def files(self, arg: Mapping[str, str], /) -> None: ...

    @property
    def other_file(self) -> str: ...

    @other_file.setter
    def other_file(self, arg: str, /) -> None: ...

    @property
    def dry_run(self) -> bool: ...

    @dry_run.setter
    def dry_run(self, arg: bool, /) -> None: ...

    @property
    def reading(self) -> Reading: ...

    @reading.setter
    def reading(self, arg: Reading, /) -> None: ...

    @property
    def checks(self) -> Checks: ...

    @checks.setter
    def checks(self, arg: Checks, /) -> None: ...

    @property
    def resources(self) -> Resources: ...

    @resources.setter
    def resources(self, arg: Resources, /) -> None: ...

    @property
    def timeout(self) -> float: ...

    @timeout.setter
    def timeout(self, arg: float, /) -> None: ...

def check_options(options: SaveOptions) -> None:
    """Raises what a save with them raises."""

DEFAULT_TIMEOUT: float = 1800.0

class NewSibling:
    """
    The directory beside a place in which a folder is made that then takes it.
    """

    def __init__(self, path: bytes, save_id: str) -> None: ...

    def begin(self) -> None: ...

    def publish(self, made: str) -> None:
        """Moves a folder of the directory, which is durable, to the place."""

    def abandon(self) -> None: ...

def clean_beside(path: bytes) -> None:
    """Removes what dead processes have left beside a place."""

def refuse_url(path: bytes) -> None:
    """
    Raises UnsupportedError if the path is a URL, as it was written or as pathlib shortens it.
    """

def identity_of(path: bytes) -> str:
    """The text that is the same for each path that leads to a place."""

def is_url(path: bytes) -> bool:
    """Whether a path is a URL, as it was written or as pathlib shortens it."""

def object_store_problem() -> str:
    """
    Why no object store can be used here: no S3, or no credentials. Empty if one can.
    """

def other_than_model(path: bytes) -> tuple[str, str]:
    """
    What stands at a place, but a folder of a model, and the file that shows it; "": nothing else.
    """

def names_at(path: bytes) -> list[str]:
    """The names of files and directories directly at a place, sorted."""

def bytes_at(path: bytes, name: str, offset: int = 0, size: int | None = None) -> bytes | None:
    """The bytes of a file at a place; None if there is no such file."""

def put_file(path: bytes, name: str, content: bytes) -> None:
    """Makes a file, or replaces it, in one step and durably."""

def remove_file(path: bytes, name: str) -> None:
    """Removes a file durably; does nothing if there is none."""

def register_store(scheme: str, open: Callable[[str], object]) -> None:
    """As tilestone.register_store. `open` returns a tilestone.Store."""

class SaveResult:
    """What a save did."""

    @property
    def save_id(self) -> str: ...

    @property
    def bytes_written(self) -> int:
        """The bytes that this rank has written."""

    @property
    def items_written(self) -> int:
        """The items that this rank has written, without copies."""

    @property
    def copies(self) -> int:
        """The copies that this rank has written of other ranks' shards."""

    @property
    def copy_bytes(self) -> int:
        """The bytes of these copies, which bytes_written includes."""

    @property
    def bytes_shared(self) -> int:
        """
        The bytes of this rank's items in files of an earlier checkpoint (`reuse`), not written anew.
        """

    @property
    def common_differs(self) -> bool:
        """
        Whether the ranks' common states were compared and differ (Checks.common_differs).
        """

    @property
    def published(self) -> bool:
        """
        Whether the checkpoint exists. False only by files without `wait`: others still write.
        """

    @property
    def timings(self) -> dict[str, float]:
        """
        Seconds of this rank's steps: "preparing" (in Python, the state), "planning", "staging" (if it was taken), "writing", "reporting" and "publishing". What came between them is in none of them.
        """

    def __repr__(self) -> str: ...

    def __getstate__(self) -> list[object]: ...

    def __setstate__(self, arg: list[object], /) -> None: ...

class SaveRequest:
    """A rank's state, path and options for a save."""

    def __init__(self, state: object, path: bytes, bridge: object, options: SaveOptions, *, tensor_attributes: dict[str, dict[str, object]], progress: object | None, compared_common: object | None) -> None: ...

class LoadRequest:
    """A rank's template, path and options for a load."""

    def __init__(self, wanted: object | None, path: bytes, bridge: object, options: LoadOptions, *, progress: object | None, optimizer: Sequence[str]) -> None: ...

def save(prepare: Callable[[], SaveRequest], path: bytes, comm: object | None, seconds: float, bare: SaveRequest | None) -> SaveResult: ...

def difference_from_saved(prepare: Callable[[], SaveRequest], path: bytes, session: object, seconds: float) -> str: ...

def load(prepare: Callable[[], LoadRequest], take: Callable[[dict[object, object], list[str], list[str], list[str], set[str]], object], path: bytes, comm: object, seconds: float) -> tuple[int, dict[str, float]]: ...

class ForeignSave:
    """The coordinator's part of a save that torch plans."""

    def __init__(self, path: bytes, save_id: str, overwrite: bool, seconds: float) -> None: ...

    @property
    def save_id(self) -> str: ...

    @property
    def sibling(self) -> str:
        """
        The directory beside the path in which the ranks write; empty: in the path.
        """

    def commit(self, receipts: Sequence[bytes], world_size: int, index: bytes, files: Sequence[str], seconds: float) -> None: ...

    def abandon(self, none_writes: bool) -> None: ...

def write_foreign(path: bytes, save_id: str, rank: int, world_size: int, sibling: str, first_file: int, encoded: Sequence[tuple[str, bytes, tuple[str, tuple[int, ...], Box] | None]], chunks: Sequence[tuple[str, tuple[int, ...], Box, TensorView]], resources: Resources, seconds: float) -> tuple[bytes, int, list[tuple[str, int, int]], list[tuple[str, int, int]]]:
    """
    Writes items to new files. Returns the receipt, how many files were written, and the (file, offset, length) of each item.
    """

class Pending:
    """A step of a save that ends on another thread."""

    def done(self) -> bool: ...

    def result(self, seconds: float) -> None: ...

    def wait(self) -> None:
        """Returns once it has ended, well or not."""

    def on_done(self, callback: Callable[[], object]) -> None: ...

class AsyncSave:
    """A save that goes on in the background."""

    @property
    def save_id(self) -> str: ...

    @property
    def bytes(self) -> int: ...

    @property
    def skipped(self) -> bool: ...

    @property
    def staged(self) -> Pending: ...

    @property
    def durable(self) -> Pending: ...

    def seal(self) -> None:
        """Ends lazy staging."""

    def result(self) -> SaveResult:
        """Once it is durable: what the save did."""

    def expect_other_thread(self) -> None:
        """
        Raises InvalidArgumentError in a callback of the save, which must not wait for it.
        """

    def abandon(self) -> None: ...

class Hold:
    """Keeps a save from reporting and publishing what it wrote."""

    def __init__(self) -> None: ...

    @property
    def written(self) -> Pending: ...

    def release(self) -> None: ...

def async_save(session: object, prepare: Callable[[], SaveRequest], path: bytes, seconds: float, options: AsyncOptions, watched: object | None, bare: SaveRequest | None, hold: Hold | None) -> AsyncSave: ...

def end_async_saves(seconds: float) -> list[str]: ...

class Damage:
    """A damaged part of a checkpoint."""

    @property
    def file(self) -> str:
        """"": elements of a tensor that no file holds."""

    @property
    def offset(self) -> int:
        """Bytes, in the file."""

    @property
    def size(self) -> int:
        """Bytes; the damage lies within this range."""

    @property
    def key(self) -> str:
        """"": the bytes belong to no item."""

    @property
    def problem(self) -> str: ...

    @property
    def unsafe(self) -> bool:
        """Looks like an attack, not like damage; reads throw UnsafeError."""

    @property
    def copy(self) -> bool:
        """A copy is damaged, not the item that the index names."""

    @property
    def intact_in(self) -> str:
        """
        The file with an intact instance of the same item, which loads read instead. For an item that repair has encoded anew, the file of the index that describes it. "": there is none.
        """

    @property
    def item_offset(self) -> int | None:
        """
        Where the damaged item begins in the file, according to the checkpoint. `offset` may lie inside the item, or at the end of a file that is too short. None: no single item is damaged.
        """

    @property
    def beyond_end(self) -> bool:
        """The item reaches beyond the end of its file."""

    def __repr__(self) -> str: ...

class ShortFile:
    """A data file that is shorter than it should be."""

    @property
    def file(self) -> str: ...

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def expected(self) -> int:
        """Bytes: that its save has written, or else that its items need."""

    @property
    def keys(self) -> int:
        """Keys with items that reach beyond its end."""

    @property
    def first_key(self) -> str:
        """One of them."""

    def __repr__(self) -> str: ...

class VerifyReport:
    """What verify checked and found."""

    @property
    def files(self) -> int: ...

    @property
    def items(self) -> int: ...

    @property
    def bytes(self) -> int:
        """Bytes checked."""

    @property
    def items_without_checksum(self) -> int:
        """Items whose writer recorded no checksum."""

    @property
    def damages(self) -> list[Damage]:
        """Ordered by file and offset."""

    @property
    def short_files(self) -> list[ShortFile]:
        """In the order of their names."""

    @property
    def notes(self) -> list[str]:
        """What the files have beside the checkpoint."""

    @property
    def seconds(self) -> float: ...

    def __repr__(self) -> str: ...

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""

class RepairReport:
    """What a repair has repaired, and what is left."""

    @property
    def mended(self) -> list[Damage]:
        """
        Damages, as found before the repair. What another repair has mended meanwhile is left out.
        """

    @property
    def now(self) -> VerifyReport:
        """What verify finds after the repair."""

    def __repr__(self) -> str: ...

def repair(path: bytes, options: OpenOptions, progress: object | None) -> RepairReport: ...

class Leftover:
    """A file that the checkpoint at its location does not need."""

    @property
    def name(self) -> str:
        """In the location; "../NAME" is a directory beside it."""

    @property
    def size(self) -> int:
        """Bytes; for a directory, the sum over its files."""

    @property
    def what(self) -> str:
        """"data file of the save 0123...", ..."""

    @property
    def why(self) -> str:
        """Why it is not needed, as a clause: "it was not published"."""

    def __repr__(self) -> str: ...

def leftovers(path: bytes, remove: bool, force: bool, follow_links: bool) -> list[Leftover]: ...

class Removal:
    """What remove_keys has removed."""

    @property
    def keys(self) -> list[str]:
        """Of tensors, and unique keys of objects; sorted."""

    @property
    def files(self) -> list[str]:
        """Data files that were removed as a whole, sorted."""

    @property
    def bytes(self) -> int:
        """Total size of these files."""

    @property
    def by_other(self) -> bool:
        """Another caller removed the keys while this one waited."""

    def __repr__(self) -> str: ...

def remove_keys(path: bytes, prefix: str, seconds: float) -> Removal: ...

def check_hashes(path: bytes, save_id: str, rank: int, ranks: int) -> list[tuple[str, str, bool]]: ...

def sha256_of_file(folder: bytes, name: str) -> str: ...

class Checkpoint:
    @staticmethod
    def open(path: bytes, options: OpenOptions) -> Checkpoint: ...

    def mapped(self) -> Checkpoint: ...

    def keys(self) -> list[str]: ...

    def tensor_keys(self) -> list[str]: ...

    def object_keys(self) -> list[str]: ...

    def is_tensor(self, key: str) -> bool: ...

    def is_object(self, key: str) -> bool: ...

    def path_of(self, key: str) -> list[str | int]:
        """The path of the key in the writer's tree; empty if it is not recorded."""

    def dtype(self, key: str) -> str: ...

    def shape(self, key: str) -> tuple[int, ...]: ...

    def boxes(self, key: str) -> list[Box]: ...

    def files_of(self, key: str) -> list[str]: ...

    def read(self, key: str, box: Box | None) -> TensorView: ...

    def read_many(self, keys: Sequence[str]) -> list[TensorView]: ...

    def read_into(self, key: str, box: Box | None, target: TensorView) -> None: ...

    def read_parts(self, keys: Sequence[str], boxes: Sequence[Box], targets: Sequence[TensorView]) -> None:
        """
        Reads a box of a tensor into each target. The lists have the same length.
        """

    def read_object(self, key: str, bridge: object) -> object: ...

    def tensor_attributes(self, key: str, bridge: object) -> dict[str, object]: ...

    def common(self, bridge: object) -> object: ...

    def read_object_bytes(self, key: str) -> bytes: ...

    @property
    def files(self) -> list[str]: ...

    @property
    def writer(self) -> str: ...

    @property
    def save_id(self) -> str: ...

    @property
    def rank_local(self) -> bool: ...

    @property
    def format(self) -> str: ...

    @property
    def dialect(self) -> str: ...

    @property
    def world_size(self) -> int | None: ...

    @property
    def hosts(self) -> list[str]: ...

    @property
    def save_timings(self) -> list[dict[str, float]]: ...

    @property
    def attributes(self) -> dict[str, str]: ...

    @property
    def tensor_bytes(self) -> int: ...

    def verify(self, progress: object | None) -> VerifyReport: ...

def encode_access(tensors: Sequence[tuple[str, str, Sequence[int], Sequence[int], Sequence[int], bool]], objects: Sequence[tuple[str, bool]]) -> bytes:
    """
    Encodes what one rank holds, for check_access: shards as (key, name of dtype, global shape, offset, shape, is the main replica), and objects as (unique key, is the main replica). Raises InvalidArgumentError for a shard outside its tensor.
    """

def check_access(ranks: Sequence[bytes]) -> None:
    """
    Checks that the main replicas of all ranks hold each tensor and each grid of objects exactly once. Raises MismatchError, CoverageError or InvalidArgumentError, with key, box and ranks. ranks[r]: the result of encode_access() on rank r.
    """

class UnpublishedSave:
    """A save without a communicator that is not published yet."""

    @property
    def save_id(self) -> str: ...

    @property
    def world_size(self) -> int:
        """0 if its head can't be read."""

    @property
    def format(self) -> str:
        """That were passed to the save."""

    @property
    def dialect(self) -> str:
        """That were passed to the save."""

    @property
    def missing_count(self) -> int:
        """How many ranks have not written."""

    @property
    def missing(self) -> list[int]:
        """The lowest of them, at most 16."""

    @property
    def failure(self) -> str:
        """The error with which it has failed; "" if it has not."""

    @property
    def abandoned(self) -> bool:
        """
        Abandoned or failed: it can't become a checkpoint any more; gc removes its files.
        """

    @property
    def alive(self) -> bool | None:
        """
        Whether one of its ranks is working, as seen while it was watched (FindOptions.watch): True if one holds its claim or a file changed, False if not for at least a minute, None if not known.
        """

    @property
    def text(self) -> str:
        """Its state and what can be done about it, a sentence for users."""

    def __repr__(self) -> str: ...

    @property
    def complete(self) -> bool:
        """Whether all its ranks have written, so that it can be published."""

    def __str__(self) -> str: ...

def unpublished(path: bytes, watch: float) -> list[UnpublishedSave]: ...

def publish(path: bytes, save_id: str, timeout: float, threads: int) -> str: ...

def abandon(path: bytes, save_id: str, period: float) -> str: ...

class ConvertedKey:
    """A tensor or object that a conversion copies."""

    @property
    def key(self) -> str: ...

    @property
    def source_key(self) -> str:
        """Its key in the source."""

    @property
    def is_object(self) -> bool: ...

    @property
    def dtype(self) -> str:
        """Of the new tensor."""

    @property
    def source_dtype(self) -> str: ...

    @property
    def shape(self) -> list[int]: ...

    @property
    def file(self) -> str:
        """The safetensors file of the tensor; otherwise empty."""

    def __repr__(self) -> str: ...

class ConvertResult:
    """What a conversion has copied."""

    @property
    def format(self) -> str:
        """Of the new checkpoint."""

    @property
    def dialect(self) -> str: ...

    @property
    def keys(self) -> list[ConvertedKey]:
        """In the order of the new keys."""

    @property
    def left_out(self) -> int:
        """Keys of the source that the options leave out."""

    @property
    def has_common(self) -> bool:
        """Megatron-Core's common state was copied."""

    @property
    def bytes(self) -> int:
        """Of the tensors, as written."""

    @property
    def seconds(self) -> float: ...

    def __repr__(self) -> str: ...

def convert(source: bytes, target: bytes, options: ConvertOptions, progress: object | None, comm: object | None = None) -> ConvertResult: ...

class DeltaReport:
    """What a delta holds."""

    @property
    def base(self) -> str:
        """
        The id of the version that it begins with. A whole version begins with that of no tensors.
        """

    @property
    def result(self) -> str:
        """The id of the version that it leads to, made of all its tensors."""

    @property
    def unchanged(self) -> int:
        """How many tensors are as in the base."""

    @property
    def changed(self) -> int:
        """How many tensors have other elements."""

    @property
    def added(self) -> int:
        """How many tensors are new, or have another dtype or shape."""

    @property
    def removed(self) -> int:
        """How many tensors of the base are gone."""

    @property
    def left_out(self) -> int:
        """How many objects the new version has: a delta has only tensors."""

    @property
    def bytes(self) -> int:
        """The size of the delta."""

    @property
    def whole_bytes(self) -> int:
        """The size of the new version's tensors."""

    @property
    def seconds(self) -> float:
        """How long it took."""

    def __repr__(self) -> str: ...

class DeltaBase:
    """A version in memory, for the next delta."""

    def __init__(self) -> None: ...

    @property
    def id(self) -> str: ...

def save_live_delta(prepare: Callable[[], SaveRequest], path: bytes, comm: object, seconds: float, base: DeltaBase, from_: bytes | None, writes: bool) -> DeltaReport: ...

def apply_live_deltas(prepare: Callable[[], LoadRequest], paths: Sequence[bytes], comm: object, seconds: float, options: OpenOptions, may_be_other: bool) -> DeltaReport | None: ...

def delta_versions(path: bytes) -> list[tuple[int, str, bool]]:
    """(number, name, whether it is whole) of each version in the directory."""

def version_name(number: int) -> str: ...

def make_delta(a: bytes, b: bytes, path: bytes, options: OpenOptions, progress: object | None) -> DeltaReport: ...

def apply_delta(base: bytes, path: bytes, target: bytes, options: OpenOptions, progress: object | None) -> DeltaReport: ...

class StepInfo:
    """What the folder of a run's step holds."""

    @property
    def step(self) -> int: ...

    @property
    def name(self) -> str:
        """The name of its folder."""

    @property
    def state(self) -> str:
        """"durable", "unfinished", "damaged" or "foreign"."""

    @property
    def problem(self) -> str:
        """Why it is not durable, as a clause; "" if it is."""

    @property
    def is_saved_to(self) -> bool:
        """A save, a repair or a removal is under way there."""

    @property
    def is_link(self) -> bool:
        """The folder is a symbolic link; it is never pruned."""

    @property
    def format(self) -> str:
        """"torch_dist"; "" if there is no checkpoint that can be read."""

    @property
    def dialect(self) -> str:
        """"pytorch"."""

    @property
    def writer(self) -> str:
        """The program that saved it: "Tilestone 0.1.0"."""

    @property
    def bytes(self) -> int:
        """Of all its files."""

    @property
    def time(self) -> float | None:
        """When it was saved, in seconds since 1970; None: not known."""

    @property
    def metrics(self) -> dict[str, float]:
        """What was given to CheckpointManager.save."""

    @property
    def save_id(self) -> str:
        """The id of its save; "": not known."""

    @property
    def hint(self) -> str:
        """The file in the run's directory that says all this; "": there is none."""

    def __repr__(self) -> str: ...

    @property
    def line(self) -> str:
        """The id of the run that saved it; "older": it has none."""

    @property
    def ordinal(self) -> int:
        """
        One more than the highest in the directory when its save began; 0: it has no run id.
        """

    @property
    def parent(self) -> int | None:
        """
        The step that it continues; None: it begins a line, or that is not known.
        """

class ManagedRun:
    """What a CheckpointManager knows of its run."""

    def __init__(self, path: bytes, every: int, keep: Keep | None, name: str, strict: bool, reuse: bool, on_hosts: bool) -> None: ...

    def expect_same_steps(self, comm: object | None, terms: Sequence[tuple[str, str]], seconds: float) -> None: ...

    def is_due(self, step: int) -> bool: ...

    def is_saved(self, step: int) -> bool: ...

    def save(self, comm: object | None, step: int, metrics: Mapping[str, float], overwrite: bool, seconds: float, difference: Callable[[str], str], write: Callable[[str, RunStep], None], once_more: Callable[[], Mapping[str, float] | None]) -> None:
        """Saves a step that is due."""

    def failed(self) -> None: ...

    def prune_after(self, step: int) -> None: ...

    def wait(self) -> None: ...

    def end(self) -> None: ...

    def restore(self, comm: object | None, step: int | None, fallback: bool, seconds: float, load: Callable[[int, str], None]) -> int | None: ...

    def name_of(self, step: int) -> str:
        """
        The folder of a step: the one that exists, else the one that a save makes.
        """

    def new_name_of(self, step: int) -> str:
        """The folder that a save of the step makes."""

    def steps(self) -> list[StepInfo]: ...

    def latest(self) -> int | None: ...

    def best(self, rule: tuple[str, str, int]) -> int | None: ...

class FastTier:
    """The fast tier of a CheckpointManager."""

    def __init__(self, run: ManagedRun, path: bytes, keep: int, drain_every: int, drain_bytes_per_second: int | None, reuse: bool, copies: bool, domains: Sequence[str], meeting: object | None, draining: object | None, copying: object | None, seconds: float) -> None: ...

    def begin(self, step: int, forced: bool, begun: RunStep) -> Pending: ...

    def leave(self, begun: RunStep, why: str) -> None:
        """The step is saved straight to the run's directory."""

    def has_begun(self, begun: RunStep) -> bool:
        """Whether what the save has raised may be of the hosts."""

    def is_full(self) -> bool:
        """
        Whether a save has failed because a host's disk was full, and none went straight since.
        """

    def went_straight(self) -> None: ...

    def undrained(self, step: int, or_draining: bool) -> dict[str, float] | None:
        """
        The metrics of a step that this host keeps; None: it has none, or without or_draining it is copying the step.
        """

    def path_of(self, comm: object | None, step: int, seconds: float) -> str: ...

    def restore(self, comm: object | None, step: int | None, fallback: bool, seconds: float, load: Callable[[int, str, str], None]) -> int | None: ...

    def wait(self) -> None: ...

    def end(self) -> None: ...

def read_megatron_tracker(run: bytes, name: str) -> tuple[int, bool]:
    """(iteration, whether it is the release checkpoint)."""

def expect_megatron_run(run: bytes) -> None:
    """Refuses the folder of a checkpoint."""

def choose_megatron_step(load: bytes | None, non_persistent: bytes | None, pretrained: bytes | None, iteration: int | None) -> tuple[int, bool, str] | None:
    """
    (iteration, whether it is the release checkpoint, the place); None: no checkpoint.
    """

def move_megatron_tracker(run: bytes, iteration: int, release: bool, interval: int, only_newest: bool) -> list[str]:
    """Returns the folders that the checkpoint replaces."""

def remove_megatron_steps(run: bytes, names: Sequence[str]) -> None: ...

def cli(argv: Sequence[bytes]) -> int:
    """
    Runs one command; returns its exit code. argv[0] is the program's name; all words are as the system passes them.
    """
