"""What Tilestone's strategies for stock Megatron-Core do, and how their classes are made.

The base classes are Megatron-Core's, so the classes exist once one is asked for.
"""

from __future__ import annotations

import os
import threading
import types
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from tilestone import _api, _calls, _checkpoint, _core, _opaque, _options
from tilestone._errors import UnsafeError, UnsupportedError
from tilestone.megatron import _ranks
from tilestone.megatron._in_place import (
    Path,
    end_without_tensors,
    entities,
    rebuilt,
    save_in_place,
)
from tilestone.megatron._installed import find_base, find_module
from tilestone.megatron._stock_errors import raises_stocks_errors
from tilestone.megatron._stored import HARMLESS, literal, remove_keys

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BACKENDS = ("torch_dist", "zarr")  # that can be loaded
lock = threading.RLock()  # held while classes are made, or Megatron-Core is changed


def _safe_classes() -> set[str]:
    """Names of the classes that this process lets torch.load make."""
    names: set[str] = set()
    for entry in torch.serialization.get_safe_globals():
        found = entry[0] if isinstance(entry, tuple) else entry
        if isinstance(found, type) and not found.__module__.startswith(("numpy", "torch")):
            names.add(f"{found.__module__}.{found.__qualname__}")
    return names


class _SaveStrategy:
    """Saves the sharded part of a checkpoint in torch_dist, for stock `dist_checkpointing.save`.

    All ranks of the process group save together, as in `tilestone.save`: every failure reaches
    every rank, what has been written is checked and then published by one rename, and the data of
    the checkpoint that stood there goes afterwards. It works alone and inside
    FullyParallelSaveStrategyWrapper, which it does not need: replicas of a shard are shared out
    among the ranks that hold them by the bytes that each has to write.

    common.pt and metadata.json are Megatron-Core's own: see the page "Inside stock Megatron".

    Attributes:
        backend, version: "torch_dist" and 1, which go to metadata.json.
        cached_global_metadata: None. Nothing is kept from one save to the next.
        use_cached_ckpt_structure: without meaning; may be set.
    """

    can_handle_sharded_objects = True

    def __init__(
        self,
        backend: str = "torch_dist",
        version: int = 1,
        *,
        process_group: ProcessGroup | None = None,
        keep_only_main_replica: bool = False,
        timeout: float | None = _core.DEFAULT_TIMEOUT,
        threads: int = 0,
        buffer_bytes: int = _core.DEFAULT_BUFFER_BYTES,
        files_per_rank: int = 1,
        replicate: str = "none",
        replicate_group: ProcessGroup | Collection[int] | None = None,
        max_copy_bytes: int | None = None,
        tp_replica_names: bool = False,
    ) -> None:
        """
        Args:
            backend, version: "torch_dist" and 1.
            process_group: the ranks that save together; by default torch.distributed's default
                group, as stock strategies have it.
            keep_only_main_replica: only main replicas (replica_id 0 or zeros) are written, each by
                its rank, as stock does; FullyParallelSaveStrategyWrapper then decides who writes.
                By default any rank that holds a shard may be its writer, which takes replicas to
                be equal. A replica without data is never one.
            timeout: seconds for the whole save, more than 0; None for no limit.
            threads, buffer_bytes, files_per_rank: as for `tilestone.save`.
            replicate, replicate_group, max_copy_bytes: local copies, as for
                `tilestone.megatron.save`. Not with keep_only_main_replica.
            tp_replica_names: as for `tilestone.megatron.save`.

        Raises:
            UnsupportedError: another backend or version; Megatron-Core can't be imported, or is of
                an unknown version.
        """
        if (backend, version) != ("torch_dist", 1):
            raise UnsupportedError(
                f"the backend {backend!r}, version {version!r}, can't be saved inside Megatron-Core",
                hint="save as 'torch_dist', 1",
            )
        super().__init__(backend, version)  # type: ignore[call-arg]
        self.backend, self.version = backend, version
        self.cached_global_metadata: Any = None
        self.use_cached_ckpt_structure = False
        self.keep_only_main_replica = keep_only_main_replica
        self.process_group = process_group
        self._options = {
            "timeout": timeout,
            "threads": threads,
            "buffer_bytes": buffer_bytes,
            "files_per_rank": files_per_rank,
            "replicate": replicate,
            "replicate_group": replicate_group,
            "max_copy_bytes": max_copy_bytes,
            "tp_replica_names": tp_replica_names,
        }

    @raises_stocks_errors
    def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        """Saves what stock `dist_checkpointing.save` hands over; every rank calls.

        An older metadata.json in the directory goes first: common.pt beside it is the new one by
        now. So where the save fails, the directory holds the tensors that stood there and no whole
        checkpoint.

        Args:
            sharded_state_dict: nested dicts and lists of ShardedTensor and ShardedObject.
            checkpoint_dir: a directory on a file system that all ranks see.

        Raises:
            As `tilestone.save`, the same on every rank.
        """
        save_in_place(
            sharded_state_dict,
            checkpoint_dir,
            self.process_group,
            self.keep_only_main_replica,
            **self._options,
        )

    @raises_stocks_errors
    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Path, *_: Any, **__: Any) -> Any:
        """Refused. Nothing is written; an older metadata.json goes, since common.pt is the new one.

        Raises:
            UnsupportedError: always.
        """
        if _ranks.rank(self.process_group) == 0:
            end_without_tensors(sharded_state_dict, checkpoint_dir)
        raise UnsupportedError(
            "Tilestone's strategy for Megatron-Core saves synchronously only",
            hint="leave async_sharded_save (--async-save) out, or save with a stock strategy",
        )


class _Wanted(_calls.Prepared):
    """What a load asks for: the entities of its template, by numbers."""

    harmless = HARMLESS

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._entities: list[Any] = []
        self.result: Any = None

    def make(self) -> Mapping[Any, Any]:
        """The entities, in the order of the tree."""
        self._entities = entities(self._tree)
        return {str(number): entity for number, entity in enumerate(self._entities)}

    def take(
        self, loaded: dict[Any, Any], report: _calls.LoadReport, kept: set[str]
    ) -> dict[Any, Any]:
        """Puts what was loaded into `result`, of the tree's structure."""
        values = [loaded[str(number)] for number in range(len(self._entities))]
        for entity, value in zip(self._entities, values, strict=True):
            _refuse_opaque(entity, value)
        detached = (v.detach() if isinstance(v, torch.Tensor) else v for v in values)
        self.result = rebuilt(self._tree, detached)
        return loaded


def _refuse_opaque(entity: Any, value: Any) -> None:
    """UnsafeError where an object was not made, since its class is not allowed."""
    opaque = _opaque.find_in(value)
    if opaque is None:
        return
    name = opaque.full_name
    raise UnsafeError(
        f"an object of {name} is made only when allow_classes names it",
        key=entity.unique_key,
        hint=f'if you trust it: TilestoneLoadStrategy(allow_classes=["{name}"]), or '
        "torch.serialization.add_safe_globals",
    )


class _LoadStrategy:
    """Loads the sharded part of a checkpoint for stock `dist_checkpointing.load`.

    Reads what every version of Megatron-Core from 0.9 to 0.19 has written, and Tilestone: torch_dist
    and zarr, sharded in any way, flattened optimizer states included. Checksums are checked where
    the checkpoint has them, nothing in it is executed, and every failure reaches every rank. It
    works alone and inside FullyParallelLoadStrategyWrapper, which it does not need: what several
    ranks want is read once for all of them.

    Attributes:
        cached_global_metadata: None. Nothing is kept from one load to the next.
    """

    can_handle_sharded_objects = True
    stream_ckpt_dequant = False

    def __init__(
        self,
        *,
        process_group: ProcessGroup | None = None,
        allow_classes: Collection[str] = (),
        cast: bool = True,
        verify_checksums: bool = True,
        two_phase: str = "auto",
        timeout: float | None = _core.DEFAULT_TIMEOUT,
        threads: int = 0,
        buffer_bytes: int = _core.DEFAULT_BUFFER_BYTES,
    ) -> None:
        """
        Args:
            process_group: the ranks that load together; by default torch.distributed's default
                group, as stock strategies have it.
            allow_classes: names ("package.module.Class") of classes of which sharded objects may
                be made, beside plain types, those that the process has given to
                torch.serialization.add_safe_globals, and some that are known to do nothing when
                they are made: Namespaces, BytesIO, signals, Megatron's enums.
            cast: convert from the stored dtype where it differs from the wanted one, as stock
                does; False makes it an error.
            verify_checksums, two_phase, timeout, threads, buffer_bytes: as for `tilestone.load`.

        Raises:
            UnsupportedError: Megatron-Core can't be imported, or is of an unknown version.
        """
        super().__init__()
        self.cached_global_metadata: Any = None
        self.process_group = process_group
        self.allow_classes = frozenset(_options.names("allow_classes", allow_classes))
        self._options = {
            "cast": cast,
            "verify_checksums": verify_checksums,
            "two_phase": two_phase,
            "timeout": timeout,
            "threads": threads,
            "buffer_bytes": buffer_bytes,
        }

    @raises_stocks_errors
    def load(self, sharded_state_dict: Any, checkpoint_dir: Path, *_: Any) -> Any:
        """Loads what stock `dist_checkpointing.load` asks for; every rank calls.

        The common state is neither read nor given back.

        Args:
            sharded_state_dict: nested dicts and lists of ShardedTensor and ShardedObject; each
                rank has its own, which may be empty. Their keys may be of any type.
            checkpoint_dir: the checkpoint's directory.

        Returns:
            New dicts and lists of the same structure: tensors over the memory that was given, or
            new ones on the CPU where `data` was None; and what ShardedObjects held.

        Raises:
            As `tilestone.load`, the same on every rank; UnsafeError also for an object of a class
            that is not allowed.
        """
        wanted: Any = _Wanted(sharded_state_dict)
        _api.load(
            wanted,
            literal(checkpoint_dir),
            group=self.process_group,
            allow_classes=self.allow_classes | _safe_classes(),
            sharded_only=True,
            **self._options,  # type: ignore[arg-type]
        )
        return wanted.result

    @raises_stocks_errors
    def load_tensors_metadata(self, checkpoint_dir: Path, *_: Any) -> dict[str, Any]:
        """Megatron-Core's ShardedTensors without data, whole, by key, of all that are stored.

        Reads this rank's part of nothing: only the index. Other ranks need not call.

        Raises:
            As `tilestone.open`.
        """
        with _checkpoint.open(literal(checkpoint_dir)) as checkpoint:
            return self._tensors_of(checkpoint)

    @raises_stocks_errors
    def load_sharded_metadata(self, checkpoint_dir: Path) -> dict[str, Any]:
        """The same with the ShardedObjects, by their unique keys; without the common state.

        Raises:
            As `tilestone.open`; UnsupportedError with the key of an object that is no
            ShardedObject's.
        """
        mapping = find_module("mapping")
        found: dict[str, Any] = {}
        with _checkpoint.open(literal(checkpoint_dir)) as checkpoint:
            for key in checkpoint.object_keys():
                try:
                    found[key] = mapping.ShardedObject.empty_from_unique_key(key)
                except (AssertionError, ValueError, IndexError) as error:
                    raise UnsupportedError("an object that is no ShardedObject's", key=key) from error
            return {**found, **self._tensors_of(checkpoint)}

    @raises_stocks_errors
    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        """Refuses a checkpoint of a backend that can't be loaded, with UnsupportedError."""
        if loaded_backend not in BACKENDS:
            raise UnsupportedError(
                f"the checkpoint is of the backend {loaded_backend!r}",
                hint=f"known are: {', '.join(BACKENDS)}",
            )

    @raises_stocks_errors
    def check_version_compatibility(self, loaded_version: Any) -> None:
        """Refuses a checkpoint of another version of its backend than 1, with UnsupportedError."""
        if loaded_version != 1:
            raise UnsupportedError(
                f"the checkpoint is of version {loaded_version!r} of its backend; known is 1"
            )

    @raises_stocks_errors
    def remove_sharded_tensors(self, checkpoint_dir: Path, key_prefix: str) -> None:
        """Removes tensors and objects whose keys begin with a prefix.

        See `tilestone.megatron.remove_sharded_tensors`.

        Raises:
            As there.
        """
        remove_keys(checkpoint_dir, key_prefix)

    @staticmethod
    def _tensors_of(checkpoint: _checkpoint.Checkpoint) -> dict[str, Any]:
        mapping = find_module("mapping")
        found = {}
        for key in checkpoint.tensor_keys():
            stored = checkpoint[key]
            data = torch.empty(stored.shape, dtype=stored.dtype.torch, device="meta")
            found[key] = mapping.ShardedTensor.from_rank_offsets(key, data).without_data()
        return found


def _make_save_class() -> type:
    base = find_base()
    parent = (
        find_module("strategies.torch").TorchDistSaveShardedStrategy
        if base is None
        else base.AsyncSaveShardedStrategy
    )
    return _named("TilestoneSaveStrategy", _SaveStrategy, parent)


def _make_load_class() -> type:
    base = find_base()
    parent = object if base is None else base.LoadShardedStrategy
    return _named("TilestoneLoadStrategy", _LoadStrategy, parent)


def _named(name: str, ours: type, parent: type) -> type:
    contents = {"__module__": "tilestone.megatron.stock", "__doc__": ours.__doc__}
    return types.new_class(name, (ours, parent), {}, lambda space: space.update(contents))


_MAKERS = {
    "TilestoneSaveStrategy": _make_save_class,
    "TilestoneLoadStrategy": _make_load_class,
}
NAMES = tuple(_MAKERS)
_made: dict[str, type] = {}


def find_class(name: str) -> Any:
    """The class of one of NAMES.

    Raises:
        UnsupportedError: Megatron-Core can't be imported, or is of an unknown version.
    """
    with lock:
        if name not in _made:
            _made[name] = _MAKERS[name]()
        return _made[name]
