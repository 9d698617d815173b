"""The engine of tilestone; use the package `tilestone`."""

from collections.abc import Callable, Mapping, Sequence
from typing import overload

import numpy
import numpy.typing


VERSION: str = '0.1.0'

def log(level: str, message: str) -> None:
    """Logs a message as the engine does."""

def leave_threads_behind() -> None:
    """
    At exit: threads that are stuck in foreign code wait there when they come back.
    """

class Box:
    """
    A half-open n-dimensional range of a tensor's elements: `offset` and `shape`, both in elements.
    """

    def __init__(self, offset: Sequence[int], shape: Sequence[int]) -> None: ...

    @property
    def offset(self) -> tuple[int, ...]:
        """First element, per dim."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent, per dim."""

    @property
    def numel(self) -> int:
        """Number of elements."""

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index: array[box.slices]."""

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

    def __getstate__(self) -> tuple[tuple[int, ...], tuple[int, ...]]: ...

    def __setstate__(self, arg: tuple[Sequence[int], Sequence[int]], /) -> None: ...

class Shard:
    """
    Split along tensor dim `dim` with torch.chunk's sizes: chunks of ceil(n / ranks), the last ones shorter or empty.
    """

    def __init__(self, dim: int) -> None: ...

    @property
    def dim(self) -> int: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class StridedShard:
    """
    torch's _StridedShard: `dim` is first cut into `split` parts by mesh dims further right, and each part into this mesh dim's shards (FSDP2 over TP).
    """

    def __init__(self, dim: int, split: int) -> None: ...

    @property
    def dim(self) -> int: ...

    @property
    def split(self) -> int: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class Replicate:
    """The same on every rank of the mesh dim."""

    def __init__(self) -> None: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class Partial:
    """A sum that is still to be made; refused when it is saved."""

    def __init__(self) -> None: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class Mesh:
    """Ranks in a named n-dimensional grid, as torch's DeviceMesh."""

    def __init__(self, shape: Sequence[int], ranks: Sequence[int] | None = None, names: Sequence[str] = []) -> None:
        """
        `ranks` holds the global ranks in C order; without it they are 0, 1, 2 ...
        Raises InvalidArgumentError on a rank or name that occurs twice, or a wrong count.
        """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def ranks(self) -> list[int]: ...

    @property
    def names(self) -> list[str]: ...

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Where a global rank sits in the mesh; None for a rank outside it."""

    def rank_at(self, coordinate: Sequence[int]) -> int: ...

    def __repr__(self) -> str: ...

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
    The boxes that the rank at `coordinate` of the mesh holds of a tensor of `global_shape` (elements); an empty shard gives one empty box.
    Raises InvalidArgumentError on Partial, a dim out of range or a wrong number of placements. Sizes follow torch.chunk, as torch's DTensor does.
    """

def held_boxes(global_shape: Sequence[int], mesh: Mesh, coordinate: Sequence[int], placements: Sequence[Shard | StridedShard | Replicate | Partial], local_shape: Sequence[int]) -> LocalBoxes:
    """
    local_boxes for a rank whose local tensor really has `local_shape`: where FSDP2 over tensor parallelism splits unevenly, the reading of the placements that gives that shape (torch's own description is then not what the rank holds).
    Raises UnsupportedError where two readings fit, InvalidArgumentError where none does.
    """

def replica_id(mesh: Mesh, coordinate: Sequence[int], placements: Sequence[Shard | StridedShard | Replicate | Partial]) -> tuple[int, ...]:
    """
    The coordinate along the Replicate dims only; all zeros for the main replica.
    """

def replica_holders(mesh: Mesh, coordinate: Sequence[int], placements: Sequence[Shard | StridedShard | Replicate | Partial]) -> list[int]:
    """Global ranks that hold the same boxes, ascending, this one included."""

def flat_range_to_boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """
    The elements [begin, end) of a flattened tensor of `shape` as at most 2n - 1 disjoint boxes in flat order.
    """

class MergedSharding:
    """What a rank holds of the checkpoint's tensor."""

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Of the checkpoint's tensor, elements per dim."""

    @property
    def strides(self) -> tuple[int, ...]:
        """Of the whole tensor as it would lie contiguously, in elements."""

    @property
    def held(self) -> LocalBoxes:
        """What the rank holds."""

    @property
    def replica_id(self) -> tuple[int, ...]:
        """All zeros on exactly one of the ranks that hold the same."""

    @property
    def holders(self) -> list[int]:
        """
        Global ranks that hold the same, ascending, this one included; empty where the meshes don't say.
        """

def merge_shardings(local_shape: Sequence[int], global_shape: Sequence[int], mesh: Mesh, placements: Sequence[Shard | StridedShard | Replicate | Partial], checkpoint_mesh: Mesh, checkpoint_placements: Sequence[Shard | StridedShard | Replicate | Partial], rank: int) -> MergedSharding:
    """
    Merges a parameter's mesh and placements with those that the checkpoint gives it (expert weights under expert parallelism inside FSDP2), for the global rank `rank`, which is in both meshes. A Shard of the checkpoint lies outside of the parameter's own shards, unless the parameter splits the same ranks along the same dim already; which ranks those are is found from the meshes' ranks, names have no meaning. Shapes in elements; the global shape is the one that the parameter knows.
    Raises InvalidArgumentError where the two contradict one another.
    """

def find_rule(patterns: Sequence[str], name: str) -> int | None:
    """
    Place of the most specific pattern that fits a run of the name's components; None where none does. See tilestone.PlacementRules.
    Raises InvalidArgumentError where two that match are equally specific.
    """

class TensorView:
    """A borrowed view of a tensor's memory."""

    @staticmethod
    def strided(data: int, dtype: str, shape: Sequence[int], strides: Sequence[int], begin: int, bytes: int, owner: object) -> TensorView:
        """
        Memory at address `data` inside [begin, begin + bytes); strides in elements.
        """

    @staticmethod
    def on_device(dtype: str, shape: Sequence[int], memory: object, owner: object) -> TensorView:
        """Memory that is copied to and from piece by piece."""

    @staticmethod
    def without_data(dtype: str, shape: Sequence[int]) -> TensorView:
        """A tensor that a load allocates."""

    @staticmethod
    def from_dlpack(array: object, writable: bool) -> TensorView | None:
        """
        An array that speaks DLPack; None for one that doesn't, or is read-only.
        """

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def with_owner(self, owner: object) -> TensorView:
        """The same memory, which another object keeps alive."""

    @property
    def owner(self) -> object: ...

    @property
    def bytes(self) -> numpy.typing.NDArray[numpy.uint8]:
        """The memory of a contiguous view as uint8, shared with it."""

def shares_elements(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """
    Whether several elements may lie in one place, as those of an expanded tensor do.
    """

def is_writable(data: int, bytes: int) -> bool:
    """Whether memory of this process is mapped for writing."""

def itemsize(dtype: str) -> int:
    """Bytes an element."""

def dtypes() -> list[str]:
    """Names of all element types."""

def value_text(object: object, bridge: object, limit: int = 4096) -> str:
    """
    How the command line shows an object: Python's repr where Python has one.
    """

def pickled_classes(pickled: bytes, archive: bool) -> list[str]:
    """
    The classes whose objects a pickled object would come back with as Opaque.

    Raises InvalidArgumentError for one that could not be read back.
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

    @property
    def key(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def local_shape(self) -> tuple[int, ...]: ...

    @property
    def global_shape(self) -> tuple[int, ...]: ...

    @property
    def box(self) -> Box: ...

    @property
    def boxes(self) -> list[Box]: ...

    @property
    def replica_id(self) -> tuple[int, ...]: ...

    @property
    def holders(self) -> list[int]: ...

    @holders.setter
    def holders(self, arg: Sequence[int], /) -> None: ...

    @property
    def allow_shape_mismatch(self) -> bool: ...

    @allow_shape_mismatch.setter
    def allow_shape_mismatch(self, arg: bool, /) -> None: ...

    @property
    def is_regular_grid(self) -> bool: ...

class ShardedObject:
    @staticmethod
    def make(key: str, data: object | None, global_shape: Sequence[int], global_offset: Sequence[int], replica_id: Sequence[int], bridge: object) -> ShardedObject: ...

    @property
    def unique_key(self) -> str: ...

class ShardedTensorFactory:
    @staticmethod
    def make(key: str, data: TensorView, original: object, build: object, merge: object, replica_id: Sequence[int], flattened_range: tuple[int, int] | None, bridge: object) -> ShardedTensorFactory: ...

class LocalNonpersistent:
    @staticmethod
    def make(value: object | None) -> LocalNonpersistent: ...

def distribute_shards(bytes: Sequence[int], holders: Sequence[int], main_is_outside: Sequence[bool], holder_sets: Sequence[Sequence[int]], ranks: int, files: tuple[Sequence[int], Sequence[int]] | None = None) -> list[int]:
    """
    Megatron-Core's distribution of shards, given in the order of their ids: a rank for each.
    `holders[i]` says which of `holder_sets` holds shard i; ranks are 0 to `ranks` - 1.
    `files`: (for each shard the file that has most of it or -1, for each file the rank that wrote it or -1): a file's shards go to its writer.
    Raises InvalidArgumentError on a shard without holders or a number out of range.
    """

def agree(work: str, comm: object, say: Callable[[int, bytes], bytes], decide: Callable[[int, list[bytes]], tuple[bytes, bool]], seconds: float) -> bytes:
    """
    Rounds in which all ranks fail together. In each, every rank says say(round, answer of the round before), and rank 0 decides (answer, whether it is the last), which every rank gets.
    What either raises on any rank every rank raises. Returns the last answer.
    """

class CallMemory:
    """What a communicator of a rank remembers from one call to the next."""

    def __init__(self) -> None: ...

class Communicator:
    """One rank's end of a group. Timeouts are seconds."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def describe(self) -> str: ...

    def __repr__(self) -> str: ...

    def gather(self, mine: bytes, root: int, timeout: float | None = None) -> list[bytes]:
        """At root every rank's bytes, by rank; elsewhere an empty list."""

    def scatter(self, parts: Sequence[bytes], root: int, timeout: float | None = None) -> bytes: ...

    def broadcast(self, mine: bytes, root: int, timeout: float | None = None) -> bytes: ...

    def all_to_all(self, to: Sequence[bytes], timeout: float | None = None) -> list[bytes]: ...

def solo() -> Communicator:
    """A group of one rank."""

def mpi_world(timeout: float | None = None) -> Communicator:
    """
    A duplicate of MPI_COMM_WORLD; every rank of the job calls, within `timeout` seconds. MPI_Init, which it calls when nobody has, waits for all ranks without a limit. Raises UnsupportedError in a build without MPI.
    """

def run_ranks(n: int, body: Callable[[Communicator], object]) -> None:
    """
    Runs body(comm) on n threads of this process, one a rank, and returns when all have ended. Ranks that wait for one that raised get RankFailedError. Of several errors the original is raised, not one that another rank's has caused.
    """

class SessionStats:
    """What a session has counted, on this rank."""

    @property
    def saves(self) -> int:
        """Saves that were planned."""

    @property
    def plans_exchanged(self) -> int:
        """Saves for which the ranks sent their plans to rank 0."""

    @property
    def plans_from_cache(self) -> int:
        """
        Saves whose plan was that of an earlier one; the others, but for those of which plans were sent, this rank has planned by rule.
        """

    @property
    def plan_bytes_sent(self) -> int:
        """Of this rank's plans, bytes."""

    def __repr__(self) -> str: ...

class Session:
    """What one rank keeps from one save to the next."""

    @overload
    def __init__(self, comm: object | None, seconds: float, check: object) -> None: ...

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

    def prepare(self, make: Callable[[], SaveRequest]) -> int:
        """Makes staging memory ready for a state; its bytes."""

    def by_files(self, path: bytes) -> ByFiles:
        """This rank's place in the next save by files to a path; it counts."""

class SaveResult:
    """What a save did."""

    @property
    def save_id(self) -> str:
        """The attempt's unique name."""

    @property
    def bytes_written(self) -> int:
        """By this rank."""

    @property
    def items_written(self) -> int:
        """By this rank."""

    @property
    def copies(self) -> int:
        """Of shards that other ranks write, by this rank (`replicate`)."""

    @property
    def copy_bytes(self) -> int:
        """Of their elements; in bytes_written too."""

    @property
    def common_differs(self) -> bool:
        """Whether the ranks' common states were compared, and are not the same."""

    @property
    def published(self) -> bool:
        """
        Whether the checkpoint exists. Always, but for a save by files that did not wait and of which other ranks are still to write.
        """

    def __repr__(self) -> str: ...

class CopyCost:
    """What `replicate` adds to what one rank writes."""

    @property
    def copies(self) -> int:
        """Of shards that other ranks write."""

    @property
    def bytes(self) -> int:
        """Of their elements."""

    def __repr__(self) -> str: ...

class ByFiles:
    """A rank's place in a save without a communicator."""

    def __init__(self, rank: int, world_size: int, token: str, number: int, wait: bool, torch_rank_local: bool) -> None: ...

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def number(self) -> int: ...

class SaveRequest:
    """What a rank brings to a save."""

    def __init__(self, state: object, path: bytes, bridge: object, format: str, dialect: str, overwrite: bool, agreement: str, validate_access: bool, common_differs: str, timeout: float, threads: int, buffer_bytes: int, files_per_rank: int, attributes: Mapping[str, str], tensor_attributes: object, progress: object | None, compared_common: object | None = None, by_files: ByFiles | None = None, replicate: str = 'none', replicate_group: Sequence[int] = [], max_copy_bytes: int | None = None, tp_replica_names: bool = False) -> None: ...

class LoadRequest:
    """What a rank brings to a load."""

    def __init__(self, wanted: object | None, path: bytes, bridge: object, follow_links: bool, cast: bool, verify_checksums: bool, two_phase: str, cache: str, not_in_checkpoint: str, not_requested: str | None, other_shape: str, sharded_only: bool, validate_access: bool, timeout: float, threads: int, buffer_bytes: int, progress: object | None, objects_by_grid: bool = False, log_report: bool = True, own_rank: int | None = None) -> None: ...

def save(prepare: Callable[[], SaveRequest], path: bytes, comm: object, seconds: float) -> SaveResult: ...

def save_by_files(options: SaveRequest, prepare: Callable[[], SaveRequest], session: Session | None = None) -> SaveResult: ...

def plan_copies(prepare: Callable[[], SaveRequest], path: bytes, comm: object, seconds: float) -> list[CopyCost]: ...

def plan_copies_by_files(options: SaveRequest, prepare: Callable[[], SaveRequest]) -> CopyCost: ...

def load(prepare: Callable[[], LoadRequest], take: Callable[[dict[object, object], list[str], list[str], list[str], set[str]], object], path: bytes, comm: object, seconds: float) -> None: ...

DEFAULT_TIMEOUT: float = 1800.0

DEFAULT_BUFFER_BYTES: int = 268435456

class StepwiseSave:
    """A save between its steps."""

    @property
    def save_id(self) -> str: ...

    @property
    def items(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def next(self) -> str:
        """The next step; "": the save is over."""

    def stage(self) -> None: ...

    def write(self) -> None: ...

    def report(self) -> None: ...

    def publish(self) -> SaveResult: ...

    def give_up(self) -> None: ...

def begin_save(prepare: Callable[[], SaveRequest], path: bytes, comm: object, seconds: float) -> StepwiseSave: ...

def begin_save_by_files(options: SaveRequest, prepare: Callable[[], SaveRequest], session: Session | None = None) -> StepwiseSave: ...

class Damage:
    """A damaged place of a checkpoint."""

    @property
    def file(self) -> str: ...

    @property
    def offset(self) -> int:
        """In the file, bytes."""

    @property
    def size(self) -> int:
        """Bytes of the range that is known to hold the damage."""

    @property
    def key(self) -> str:
        """Empty for bytes outside items."""

    @property
    def problem(self) -> str: ...

    @property
    def unsafe(self) -> bool:
        """Looks like an attack, not like damage."""

    @property
    def copy(self) -> bool:
        """Of a copy; the shard's own item is in another file."""

    @property
    def intact_in(self) -> str:
        """
        A file in which the same elements are intact, where loads read them; "": none.
        """

    def __repr__(self) -> str: ...

class VerifyReport:
    """What verify checked and found."""

    @property
    def files(self) -> int: ...

    @property
    def items(self) -> int: ...

    @property
    def bytes(self) -> int:
        """Bytes that were checked."""

    @property
    def items_without_checksum(self) -> int:
        """Items whose writer recorded no checksum."""

    @property
    def damages(self) -> list[Damage]:
        """By file and offset; empty for a sound one."""

    @property
    def seconds(self) -> float: ...

    @property
    def ok(self) -> bool:
        """True when nothing is damaged."""

class RepairReport:
    """What repair has mended, and what is left."""

    @property
    def mended(self) -> list[Damage]:
        """The damages that it mended, as they were found."""

    @property
    def now(self) -> VerifyReport:
        """What verify finds afterwards."""

def repair(path: bytes, cache: str, buffer_bytes: int, threads: int, follow_links: bool, progress: object | None) -> RepairReport: ...

class Leftover:
    """A file that no checkpoint at its location needs."""

    @property
    def name(self) -> str:
        """In the location."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def what(self) -> str: ...

    @property
    def why(self) -> str:
        """Why it is not needed."""

    def __repr__(self) -> str: ...

def leftovers(path: bytes, remove: bool, force: bool, follow_links: bool) -> list[Leftover]: ...

class Removal:
    """What remove_keys has removed."""

    @property
    def keys(self) -> list[str]:
        """Of tensors, and unique ones of objects; sorted."""

    @property
    def files(self) -> list[str]:
        """Data files of which nothing is left."""

    @property
    def bytes(self) -> int:
        """Of these files."""

    @property
    def by_other(self) -> bool:
        """Another caller has removed the keys while this one waited."""

def remove_keys(path: bytes, prefix: str, seconds: float) -> Removal: ...

class Checkpoint:
    @staticmethod
    def open(path: bytes, verify_checksums: bool, cache: str, buffer_bytes: int, threads: int, follow_links: bool) -> Checkpoint: ...

    def keys(self) -> list[str]: ...

    def tensor_keys(self) -> list[str]: ...

    def object_keys(self) -> list[str]: ...

    def is_tensor(self, key: str) -> bool: ...

    def is_object(self, key: str) -> bool: ...

    def similar(self, key: str) -> list[str]:
        """Keys that resemble `key`."""

    def path_of(self, key: str) -> list[str | int]:
        """Where the writer's tree had the key; empty when that is not recorded."""

    def dtype(self, key: str) -> str: ...

    def shape(self, key: str) -> tuple[int, ...]: ...

    def boxes(self, key: str) -> list[Box]: ...

    def files_of(self, key: str) -> list[str]: ...

    def read(self, key: str, box: Box | None) -> TensorView: ...

    def read_many(self, keys: Sequence[str]) -> list[TensorView]: ...

    def read_into(self, key: str, box: Box | None, target: TensorView) -> None: ...

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
    def attributes(self) -> dict[str, str]: ...

    @property
    def tensor_bytes(self) -> int: ...

    def verify(self, progress: object | None) -> VerifyReport: ...

def encode_access(tensors: Sequence[tuple[str, str, Sequence[int], Sequence[int], Sequence[int], bool]], objects: Sequence[tuple[str, bool]]) -> bytes:
    """
    What one rank holds, for check_access: shards as (key, dtype's name, global shape, offset, shape, whether it is the main replica), and objects as (unique key, whether main). InvalidArgumentError for a shard outside its tensor.
    """

def check_access(ranks: Sequence[bytes]) -> None:
    """
    Raises unless the main replicas of all ranks hold each tensor and each grid of objects once: MismatchError, CoverageError, InvalidArgumentError with key, box and ranks. ranks[r]: what encode_access() gave on rank r.
    """

class NameLock:
    """
    A lock that try_lock() gave. It goes with the object or the process; a forked child has no part in it.
    """

    def release(self) -> None:
        """Gives it up; once more does nothing."""

def try_lock(directory: bytes, name: str) -> NameLock | None:
    """
    A lock on a name in a directory, or None when somebody else holds it. Makes the file and the directories that it needs; they stay.
    UnsupportedError where files can't be locked.
    """

def is_locked(directory: bytes, name: str) -> bool:
    """
    Whether somebody, who may be the caller, holds the lock. Makes and changes nothing.
    UnsupportedError where files can't be locked.
    """

class UnpublishedSave:
    """A save without a communicator that is no checkpoint yet."""

    @property
    def save_id(self) -> str:
        """The attempt's unique name."""

    @property
    def world_size(self) -> int:
        """How many ranks it has; 0: it has only begun, and that is not known."""

    @property
    def format(self) -> str:
        """As `save` was given it."""

    @property
    def dialect(self) -> str:
        """As `save` was given it."""

    @property
    def missing_count(self) -> int:
        """How many of its ranks have not written."""

    @property
    def missing(self) -> list[int]:
        """The lowest of these ranks, at most 16."""

    @property
    def failure(self) -> str:
        """The error that a rank has left; "": none."""

    @property
    def abandoned(self) -> bool:
        """It will be no checkpoint, and gc removes its files."""

    @property
    def alive(self) -> bool | None:
        """
        Whether a rank of it works, as far as it was watched: True once something of it changed, False when nothing did for a minute, else None.
        """

    @property
    def complete(self) -> bool:
        """All its ranks have written: it can be published."""

    def __str__(self) -> str: ...

    def __repr__(self) -> str: ...

def unpublished(path: bytes, watch: float) -> list[UnpublishedSave]: ...

def publish(path: bytes, save_id: str, timeout: float, threads: int) -> str: ...

def abandon(path: bytes, save_id: str, period: float) -> str: ...

def cli(argv: Sequence[bytes]) -> int:
    """
    Runs one command (argv[0] is the program's name, all as the system has them); its exit code.
    """
