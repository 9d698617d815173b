"""Tilestone's strategies for stock Megatron-Core, and how their classes are made.

Their base classes are Megatron-Core's, so the classes are made only on demand. Only this module
imports Megatron-Core.
"""

from __future__ import annotations

import importlib
import re
import threading
import types
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from tilestone import _core
from tilestone._calls import collective, save_load
from tilestone._errors import UnsafeError, UnsupportedError
from tilestone._objects.opaque import find_in
from tilestone._options import valid
from tilestone._options.load_report import LoadReport
from tilestone._options.values import Checks, LocalCopies, Reading, Resources
from tilestone.megatron import _ranks
from tilestone.megatron._calls.background import save_in_background
from tilestone.megatron._calls.in_place import Path, entities, save_in_place
from tilestone.megatron._ranks import within_call
from tilestone.megatron.core import raises_stocks_errors
from tilestone.megatron._stored import (
    DIALECT,
    HARMLESS,
    StockStoredEntities,
    literal,
    open_sharded,
    remove_keys,
    sharded_metadata,
    tensors_metadata,
)
from tilestone.megatron.dict_utils import dict_list_map_outplace

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_PACKAGE = "megatron.core.dist_checkpointing"
_OLDEST, _NEWEST = (0, 13), (0, 19)


def find_module(module: str) -> Any:
    """Imports a module of Megatron-Core, whose version must be a supported one."""
    try:
        core = importlib.import_module("megatron.core")
        found = importlib.import_module(f"{_PACKAGE}.{module}")
    except ImportError as error:
        raise UnsupportedError(
            f"Megatron-Core can't be imported: {error}",
            hint="install megatron-core, or use tilestone.megatron, which does not need it",
        ) from error
    _check_version(str(getattr(core, "__version__", "")))
    return found


def _check_version(version: str) -> None:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and _OLDEST <= (int(numbers[1]), int(numbers[2])) <= _NEWEST:
        return
    oldest, newest = (".".join(map(str, ends)) for ends in (_OLDEST, _NEWEST))
    raise UnsupportedError(
        f"Megatron-Core {version or 'of an unknown version'} is not supported; versions {oldest} "
        f"to {newest} are",
        hint="use tilestone.megatron in place of megatron.core.dist_checkpointing",
    )


def find_base() -> Any:
    """Imports strategies.base; None for versions from 0.19 on, which do not have it."""
    find_module("mapping")
    try:
        return importlib.import_module(f"{_PACKAGE}.strategies.base")
    except ModuleNotFoundError:
        return None


BACKENDS = ("torch_dist", "zarr")  # backends that can be loaded
lock = threading.RLock()  # held while classes are made or Megatron-Core is changed


def _safe_classes() -> set[str]:
    """Names of the classes that this process allows torch.load to instantiate."""
    names: set[str] = set()
    for entry in torch.serialization.get_safe_globals():
        found = entry[0] if isinstance(entry, tuple) else entry
        if isinstance(found, type) and not found.__module__.startswith(("numpy", "torch")):
            names.add(f"{found.__module__}.{found.__qualname__}")
    return names


class _SaveStrategy:
    """Saves the sharded part of a checkpoint in torch_dist, for stock `dist_checkpointing.save`.

    All ranks of the process group save together, as in `tilestone.save`: a failure is raised on
    every rank; what has been written is checked and then published by one rename; after that the
    data of the previous checkpoint is removed. The strategy works alone and inside
    FullyParallelSaveStrategyWrapper, but does not need the wrapper: it divides the writing of
    replicated shards among the ranks that hold them, by the bytes that each rank has to write.

    Megatron-Core itself writes common.pt and metadata.json: see the page "Inside stock Megatron".

    Attributes:
        backend, version: "torch_dist" and 1, which are written to metadata.json.
        cached_global_metadata: None. Nothing is kept from one save to the next.
        use_cached_ckpt_structure: ignored; may be set.
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
        resources: Resources = Resources(),
        copies: LocalCopies | None = None,
        tp_replica_names: bool = False,
        separation_hint: str | None = None,
    ) -> None:
        """
        Args:
            backend, version: "torch_dist" and 1.
            process_group: the ranks that save together; None: torch.distributed's default
                group, as in stock strategies.
            keep_only_main_replica: write only main replicas (replica_id 0 or all zeros), each by
                its own rank, as stock strategies do; FullyParallelSaveStrategyWrapper then chooses
                the writers. By default any rank that holds a shard may write it, so replicas must
                be equal. A rank whose replica has no data never writes the
                shard.
            timeout: limit for the whole save in seconds, more than 0; None: no limit.
            resources: as for `tilestone.save`.
            copies: local copies, as for `tilestone.megatron.save`. Can't be combined with
                keep_only_main_replica.
            tp_replica_names, separation_hint: as for
                `strategies.torch.TorchDistSaveShardedStrategy`.

        Raises:
            UnsupportedError: another backend or version is given; Megatron-Core can't be imported,
                or its version is not supported.
        """
        if (backend, version) != ("torch_dist", 1):
            raise UnsupportedError(
                f"can't save with the backend {backend!r}, version {version!r}, in Megatron-Core",
                hint="save with 'torch_dist', 1",
            )
        super().__init__(backend, version)  # type: ignore[call-arg]
        self.backend, self.version = backend, version
        self.cached_global_metadata: Any = None
        self.use_cached_ckpt_structure = False
        self.keep_only_main_replica = keep_only_main_replica
        self.process_group = process_group
        self.separation_hint = separation_hint
        self._options: dict[str, Any] = {
            "timeout": timeout,
            "resources": resources,
            "copies": copies,
            "tp_replica_names": tp_replica_names,
        }

    @raises_stocks_errors
    def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        """Saves the sharded part that stock `dist_checkpointing.save` passes. Every rank calls.

        An older metadata.json in the directory is removed first, because common.pt is already the
        new one. So if the save fails, the directory still holds the old tensors, but is not a
        complete checkpoint.

        Args:
            sharded_state_dict: nested dicts and lists of ShardedTensor and ShardedObject.
            checkpoint_dir: a directory on a file system that all ranks share.

        Raises:
            As `tilestone.save`, the same on every rank.
        """
        self._save(sharded_state_dict, checkpoint_dir)

    @raises_stocks_errors
    def async_save(
        self, sharded_state_dict: Any, checkpoint_dir: Path, async_strategy: str = "mcore"
    ) -> Any:
        """Plans the save, and writes in a thread of this process. Every rank calls.

        When it returns, the state may change. The process that Megatron-Core's queue starts only
        waits for the thread. Finalizing the request publishes what was written.

        Args:
            sharded_state_dict, checkpoint_dir: as for save().
            async_strategy: "mcore" or "nvrx" (0.19): whose queue will take the request.

        Returns:
            Megatron-Core's AsyncRequest, or that of nvidia-resiliency-ext.

        Raises:
            As save().
        """
        kind = _request_class(async_strategy)
        request = self._save(sharded_state_dict, checkpoint_dir, save=save_in_background)
        return kind(request.async_fn, (), request.finalize_fns[:1])

    def _save(self, sharded_state_dict: Any, checkpoint_dir: Path, **how: Any) -> Any:
        return save_in_place(
            sharded_state_dict, checkpoint_dir, self.process_group, self.keep_only_main_replica,
            separation_hint=self.separation_hint or "", **self._options, **how,
        )  # fmt: skip


def _request_class(async_strategy: str) -> Any:
    """The class of a request for a queue."""
    find = getattr(find_module("strategies.torch"), "get_async_strategy", None)
    if find is None:  # up to 0.18
        return find_module("strategies.async_utils").AsyncRequest
    return find(async_strategy)[1]["AsyncRequest"]


class _Wanted(collective.Prepared):
    """The request of a load: the entities of its template, by number."""

    harmless = HARMLESS
    engine: Mapping[str, Any] = {"unmarked": DIALECT, "sharded_only": True}

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._entities: list[Any] = []
        self.result: Any = None

    def make(self) -> Mapping[Any, Any]:
        """Returns the entities, in the order of the tree."""
        self._entities = entities(self._tree)
        return {str(number): entity for number, entity in enumerate(self._entities)}

    def finish(
        self, loaded: dict[Any, Any], report: LoadReport, kept: set[str]
    ) -> dict[Any, Any]:
        """Puts the loaded values into `result`, in the structure of the tree."""
        values = [loaded[str(number)] for number in range(len(self._entities))]
        for entity, value in zip(self._entities, values, strict=True):
            _refuse_opaque(entity, value)
        detached = (v.detach() if isinstance(v, torch.Tensor) else v for v in values)
        self.result = dict_list_map_outplace(lambda _: next(detached), self._tree)
        return loaded


def _refuse_opaque(entity: Any, value: Any) -> None:
    """Raises UnsafeError if an object was not instantiated because its class is not allowed."""
    opaque = find_in(value)
    if opaque is None:
        return
    name = opaque.full_name
    raise UnsafeError(
        f"{name} is instantiated only if allow_classes contains it",
        key=entity.unique_key,
        hint=f'if you trust the class: TilestoneLoadStrategy(allow_classes=["{name}"]), or '
        "torch.serialization.add_safe_globals",
    )


class _LoadStrategy:
    """Loads the sharded part of a checkpoint for stock `dist_checkpointing.load`.

    It reads the checkpoints of Megatron-Core 0.9 to 0.19 and of Tilestone: torch_dist and zarr, any
    sharding, flattened optimizer states included. Checksums are checked if the checkpoint has them,
    no code in the checkpoint is executed, and a failure is raised on every rank. The strategy works
    alone and inside FullyParallelLoadStrategyWrapper, but does not need the wrapper: what several
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
        checks: Checks = Checks(),
        reading: Reading = Reading(),
        timeout: float | None = _core.DEFAULT_TIMEOUT,
        resources: Resources = Resources(),
    ) -> None:
        """
        Args:
            process_group: the ranks that load together; None: torch.distributed's default
                group, as in stock strategies.
            allow_classes: names ("package.module.Class") of further classes that sharded objects
                may contain. Always allowed are plain types, the classes that the process has passed
                to torch.serialization.add_safe_globals, and classes whose creation is known to have
                no effect: Namespaces, BytesIO, signals, Megatron's enums.
            cast: convert tensors whose stored dtype differs from the wanted one, as stock
                strategies do. False: a different dtype is an error.
            checks, reading, timeout, resources: as for `tilestone.load`.

        Raises:
            UnsupportedError: Megatron-Core can't be imported, or its version is not supported.
        """
        super().__init__()
        self.cached_global_metadata: Any = None
        self.process_group = process_group
        self.allow_classes = frozenset(valid.names("allow_classes", allow_classes))
        self._options: dict[str, Any] = {
            "cast": cast,
            "checks": checks,
            "reading": reading,
            "timeout": timeout,
            "resources": resources,
        }

    @raises_stocks_errors
    def load(self, sharded_state_dict: Any, checkpoint_dir: Path, *_: Any) -> Any:
        """Loads the entities that stock `dist_checkpointing.load` passes. Every rank calls.

        The common state is neither read nor returned.

        Args:
            sharded_state_dict: nested dicts and lists of ShardedTensor and ShardedObject. Each
                rank has its own, which may be empty. Its keys may be of any type.
            checkpoint_dir: the checkpoint's directory.

        Returns:
            New dicts and lists of the same structure. Tensors share the memory of the given ones,
            or are new tensors on the CPU if `data` was None; ShardedObjects become their objects.

        Raises:
            As `tilestone.load`, the same on every rank; UnsafeError also for an object of a class
            that is not allowed.
        """
        wanted: Any = _Wanted(sharded_state_dict)
        save_load.load(
            wanted,
            literal(checkpoint_dir),
            group=self.process_group or _ranks.group_of_call(),
            allow_classes=self.allow_classes | _safe_classes(),
            **self._options | {"timeout": within_call(self._options["timeout"])},
        )
        return wanted.result

    @raises_stocks_errors
    def load_tensors_metadata(self, checkpoint_dir: Path, *_: Any) -> dict[str, Any]:
        """Returns Megatron-Core's ShardedTensors of all stored tensors, without data, by key.

        Reads only the index. Other ranks need not call.

        Raises:
            As `tilestone.open`.
        """
        with open_sharded(checkpoint_dir) as checkpoint:
            return tensors_metadata(checkpoint, find_module("mapping").ShardedTensor)

    @raises_stocks_errors
    def load_sharded_metadata(self, checkpoint_dir: Path) -> dict[str, Any]:
        """Returns also the ShardedObjects, by unique key; the common state is not included.

        Raises:
            As `tilestone.open`; UnsupportedError with the key of a stored object that is not a
            ShardedObject.
        """
        return sharded_metadata(checkpoint_dir, find_module("mapping"), StockStoredEntities)

    @raises_stocks_errors
    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        """Raises UnsupportedError if checkpoints of this backend can't be loaded."""
        if loaded_backend not in BACKENDS:
            raise UnsupportedError(
                f"the backend {loaded_backend!r} of the checkpoint is not supported",
                hint=f"supported backends: {', '.join(BACKENDS)}",
            )

    @raises_stocks_errors
    def check_version_compatibility(self, loaded_version: Any) -> None:
        """Raises UnsupportedError if the version of the checkpoint's backend is not 1."""
        if loaded_version != 1:
            raise UnsupportedError(
                f"version {loaded_version!r} of the checkpoint's backend is not supported; "
                "only 1 is"
            )

    @raises_stocks_errors
    def remove_sharded_tensors(self, checkpoint_dir: Path, key_prefix: str) -> None:
        """Removes tensors and objects whose keys begin with a prefix.

        See `tilestone.megatron.remove_sharded_tensors`.

        Raises:
            As `tilestone.megatron.remove_sharded_tensors`.
        """
        remove_keys(checkpoint_dir, key_prefix)


NAMES = ("TilestoneSaveStrategy", "TilestoneLoadStrategy")
_made: dict[str, type] = {}


def find_class(name: str) -> Any:
    """Returns the class of one of NAMES.

    Raises:
        UnsupportedError: Megatron-Core can't be imported, or its version is not supported.
    """
    with lock:
        if name not in _made:
            _made[name] = _make(_SaveStrategy if name == NAMES[0] else _LoadStrategy, name)
        return _made[name]


def _make(ours: type, name: str) -> type:
    base = find_base()
    if ours is _LoadStrategy:
        parent = object if base is None else base.LoadShardedStrategy
    elif base is None:
        parent = find_module("strategies.torch").TorchDistSaveShardedStrategy
    else:
        parent = base.AsyncSaveShardedStrategy
    contents = {"__module__": "tilestone.megatron.stock", "__doc__": ours.__doc__}
    return types.new_class(name, (ours, parent), {}, lambda space: space.update(contents))
