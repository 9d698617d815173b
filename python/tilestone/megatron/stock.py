"""Tilestone inside stock Megatron-Core: strategies for its own `dist_checkpointing`.

    from tilestone.megatron.stock import TilestoneLoadStrategy, TilestoneSaveStrategy

    dist_checkpointing.save(state, path, sharded_strategy=TilestoneSaveStrategy())
    dist_checkpointing.load(state, path, sharded_strategy=TilestoneLoadStrategy())

or, for a program that offers no place for a strategy, once at its start

    tilestone.megatron.stock.enable()

Megatron-Core is imported when one of these is first used, and nowhere else in the package. Known
are its versions 0.13 to 0.19.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tilestone import _api, _checkpoint, _core, _megatron, _opaque, _options
from tilestone._errors import (
    CheckpointError,
    InvalidArgumentError,
    StorageError,
    UnsafeError,
    UnsupportedError,
)
from tilestone.megatron._stock_errors import raises_stocks_errors

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["TilestoneLoadStrategy", "TilestoneSaveStrategy", "disable", "enable"]

_log = logging.getLogger("tilestone")

_PACKAGE = "megatron.core.dist_checkpointing"
_OLDEST, _NEWEST = (0, 13), (0, 19)
_BACKENDS = ("torch_dist", "zarr")  # that can be loaded
_COMMON_KEY = "common_state"  # of the ShardedObject in which 0.19 hands over the common state
_COMMON_FILE = "common.pt"
# What shows that a directory holds a whole checkpoint, and says of its files what they are.
_SEALS = ("metadata.json", "integrity.json")
_WANTED = "the sharded part"  # the template's one key
_SHARDED = {"ShardedTensor", "ShardedObject"}

Path = str | os.PathLike[str]


def _stock(module: str) -> Any:
    """A module of Megatron-Core's, of a version that is known."""
    try:
        core = importlib.import_module("megatron.core")
        found = importlib.import_module(f"{_PACKAGE}.{module}")
    except ImportError as error:
        raise UnsupportedError(
            f"Megatron-Core can't be imported: {error}",
            hint="install megatron-core, or use tilestone.megatron, which needs none",
        ) from error
    _check_version(str(getattr(core, "__version__", "")))
    return found


def _check_version(version: str) -> None:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and _OLDEST <= (int(numbers[1]), int(numbers[2])) <= _NEWEST:
        return
    oldest, newest = (".".join(map(str, ends)) for ends in (_OLDEST, _NEWEST))
    raise UnsupportedError(
        f"Megatron-Core {version or 'of an unknown version'}: known are {oldest} to {newest}",
        hint="use tilestone.megatron in place of megatron.core.dist_checkpointing",
    )


def _find_base() -> Any:
    """strategies.base, which versions from 0.19 on lack: None."""
    _stock("mapping")
    try:
        return importlib.import_module(f"{_PACKAGE}.strategies.base")
    except ModuleNotFoundError:
        return None


def _leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What stands in nested dicts and lists, each with its path, in order."""
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(tree, list):
        for index, item in enumerate(tree):
            yield from _leaves(item, (*path, index))
    else:
        yield path, tree


def _rebuilt(tree: Any, values: Iterator[Any]) -> Any:
    """New dicts and lists of the tree's structure with other leaves, in the order of _leaves."""
    if isinstance(tree, dict):
        return {key: _rebuilt(item, values) for key, item in tree.items()}
    if isinstance(tree, list):
        return [_rebuilt(item, values) for item in tree]
    return next(values)


def _entities(tree: Any) -> list[Any]:
    """The leaves of a tree; InvalidArgumentError with the place of one that is not sharded."""
    found = []
    for path, leaf in _leaves(tree):
        if _megatron.kind_of(type(leaf)) not in _SHARDED:
            raise InvalidArgumentError(
                f"a {type(leaf).__name__} is no ShardedTensor or ShardedObject, and only these "
                "belong to the sharded part of a checkpoint",
                key=".".join(map(str, path)),
                hint="give the whole state dict to dist_checkpointing.save or load, which hand "
                "the strategy its part",
            )
        found.append(leaf)
    return found


def _is_main(entity: Any) -> bool:
    """Whether an entity is the main replica of its shard."""
    replica = entity.replica_id
    return not (any(replica) if isinstance(replica, (tuple, list)) else replica)


def _has_common_state(tree: Any) -> bool:
    return any(
        _megatron.kind_of(type(leaf)) == "ShardedObject" and leaf.key == _COMMON_KEY
        for _, leaf in _leaves(tree)
    )


def _remove_seals(path: Path, common_is_sharded: bool) -> None:
    """Removes, durably, what would show the directory as a whole checkpoint during the save.

    The common state in common.pt is the new one already, or will be in an object: then nothing goes
    where no other file than .metadata, which is replaced in one step, tells old from new.
    """
    try:
        names = set(os.listdir(path))
        if common_is_sharded and not names & {_COMMON_FILE, "integrity.json"}:
            return
        doomed = [*_SEALS, *([_COMMON_FILE] if common_is_sharded else [])]
        for name in doomed:
            if name in names:
                os.unlink(os.path.join(path, name))
                _sync_directory(path)
    except FileNotFoundError:
        return  # nothing stands there
    except OSError as error:
        raise StorageError(
            f"a file of the checkpoint that is to be replaced can't be removed: {error.strerror}",
            file=str(error.filename or path),
            errno=error.errno,
        ) from error


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _InRound(Mapping[str, Any]):
    """A state that is made when it is first looked at: in the first round of a save or load.

    What `make` raises is then this rank's failure, which every rank hears of.
    """

    def __init__(self, make: Callable[[], dict[str, Any]]) -> None:
        self._make = make
        self._made: dict[str, Any] | None = None

    def _state(self) -> dict[str, Any]:
        if self._made is None:
            self._made = self._make()
        return self._made

    def __getitem__(self, key: str) -> Any:
        return self._state()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state())

    def __len__(self) -> int:
        return len(self._state())


def _safe_classes() -> set[str]:
    """Names of the classes that this process lets torch.load make."""
    names = {"_io.BytesIO"}  # the extra state of Transformer Engine
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
        failure: list[BaseException] = []
        if not dist.is_initialized() or dist.get_rank(self.process_group) == 0:
            try:
                _remove_seals(checkpoint_dir, _has_common_state(sharded_state_dict))
            except CheckpointError as error:
                failure.append(error)

        def state() -> dict[str, Any]:
            if failure:
                raise failure[0]
            return self._state_of(sharded_state_dict)

        _api.save(
            _InRound(state),
            checkpoint_dir,
            group=self.process_group,
            dialect="megatron_shards",
            overwrite=True,
            **self._options,  # type: ignore[arg-type]
        )

    @raises_stocks_errors
    def async_save(self, *_: Any, **__: Any) -> Any:
        """Refused, before anything is written.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "Tilestone's strategy for Megatron-Core saves synchronously only",
            hint="leave async_sharded_save (--async-save) out, or save with a stock strategy",
        )

    def _state_of(self, tree: Any) -> dict[str, Any]:
        """The tree's entities that are to be saved, by numbers: their own keys name them."""
        kept = [
            entity
            for entity in _entities(tree)
            if _is_main(entity) or not (self.keep_only_main_replica or entity.data is None)
        ]
        return {str(number): entity for number, entity in enumerate(kept)}


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
                be made, beside plain types, io.BytesIO, and those that the process has given to
                torch.serialization.add_safe_globals.
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
        allowed = self.allow_classes | _safe_classes()

        def wanted() -> dict[str, Any]:
            entities = _entities(sharded_state_dict)
            return {_WANTED: {str(number): entity for number, entity in enumerate(entities)}}

        loaded = _api.load(
            _InRound(wanted),
            checkpoint_dir,
            group=self.process_group,
            allow_classes=allowed,
            **self._options,  # type: ignore[arg-type]
        )
        values = list(loaded[_WANTED].values())
        self._refuse_opaque(_entities(sharded_state_dict), values)
        detached = (v.detach() if isinstance(v, torch.Tensor) else v for v in values)
        return _rebuilt(sharded_state_dict, detached)

    @raises_stocks_errors
    def load_tensors_metadata(self, checkpoint_dir: Path, *_: Any) -> dict[str, Any]:
        """Megatron-Core's ShardedTensors without data, whole, by key, of all that are stored.

        Reads this rank's part of nothing: only the index. Other ranks need not call.

        Raises:
            As `tilestone.open`.
        """
        with _checkpoint.open(checkpoint_dir) as checkpoint:
            return self._tensors_of(checkpoint)

    @raises_stocks_errors
    def load_sharded_metadata(self, checkpoint_dir: Path) -> dict[str, Any]:
        """The same with the ShardedObjects, by their unique keys; without the common state.

        Raises:
            As `tilestone.open`; UnsupportedError with the key of an object that is no
            ShardedObject's.
        """
        mapping = _stock("mapping")
        found: dict[str, Any] = {}
        with _checkpoint.open(checkpoint_dir) as checkpoint:
            for key in checkpoint.object_keys():
                try:
                    found[key] = mapping.ShardedObject.empty_from_unique_key(key)
                except (AssertionError, ValueError, IndexError) as error:
                    raise UnsupportedError("an object that is no ShardedObject's", key=key) from error
            return {**found, **self._tensors_of(checkpoint)}

    @raises_stocks_errors
    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        """Refuses a checkpoint of a backend that can't be loaded, with UnsupportedError."""
        if loaded_backend not in _BACKENDS:
            raise UnsupportedError(
                f"the checkpoint is of the backend {loaded_backend!r}",
                hint=f"known are: {', '.join(_BACKENDS)}",
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
        """Refused: nothing is ever taken out of a checkpoint.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"tensors under {key_prefix!r} can't be removed from {os.fspath(checkpoint_dir)}: "
            "Tilestone does not change a checkpoint that stands",
            hint="load what should stay, and save it",
        )

    @staticmethod
    def _tensors_of(checkpoint: _checkpoint.Checkpoint) -> dict[str, Any]:
        mapping = _stock("mapping")
        found = {}
        for key in checkpoint.tensor_keys():
            stored = checkpoint[key]
            data = torch.empty(stored.shape, dtype=stored.dtype.torch, device="meta")
            found[key] = mapping.ShardedTensor.from_rank_offsets(key, data).without_data()
        return found

    def _refuse_opaque(self, entities: list[Any], values: list[Any]) -> None:
        """Every rank raises UnsafeError when any has an object of a class that is not allowed."""
        refused: UnsafeError | None = None
        for entity, value in zip(entities, values, strict=True):
            opaque = _opaque.find_in(value)
            if opaque is not None:
                refused = UnsafeError(
                    f"an object of {opaque.full_name} is made only when allow_classes names it",
                    key=entity.unique_key,
                    rank=dist.get_rank(self.process_group) if dist.is_initialized() else -1,
                    hint=f'if you trust it: TilestoneLoadStrategy(allow_classes=["'
                    f'{opaque.full_name}"]), or torch.serialization.add_safe_globals',
                )
                break
        answers = [refused]
        if dist.is_initialized():
            answers *= dist.get_world_size(self.process_group)
            dist.all_gather_object(answers, refused, group=self.process_group)
        for answer in answers:
            if answer is not None:
                raise answer


def _make_save_class() -> type:
    base = _find_base()
    parent = (
        _stock("strategies.torch").TorchDistSaveShardedStrategy
        if base is None
        else base.AsyncSaveShardedStrategy
    )
    return _named("TilestoneSaveStrategy", _SaveStrategy, parent)


def _make_load_class() -> type:
    base = _find_base()
    parent = object if base is None else base.LoadShardedStrategy
    return _named("TilestoneLoadStrategy", _LoadStrategy, parent)


def _named(name: str, ours: type, parent: type) -> type:
    contents = {"__module__": __name__, "__doc__": ours.__doc__}
    return types.new_class(name, (ours, parent), {}, lambda space: space.update(contents))


_CLASSES = {
    "TilestoneSaveStrategy": _make_save_class,
    "TilestoneLoadStrategy": _make_load_class,
}
_lock = threading.RLock()


def __getattr__(name: str) -> Any:
    """The strategies' classes, made with Megatron-Core's base classes when first asked for."""
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _lock:
        if name not in globals():
            globals()[name] = _CLASSES[name]()
        return globals()[name]


# What enable() changes in Megatron-Core, and disable() takes back.


class _Switched:
    """What is in force between enable() and disable()."""

    def __init__(self) -> None:
        self.save: Any = None
        self.load: Any = None
        self._undo: list[Callable[[], None]] = []

    def patch(self, owner: Any, name: str, made: Any) -> None:
        """Sets an attribute of a module or class; notes how to take that back."""
        if name in vars(owner):
            before = vars(owner)[name]
            self._undo.append(lambda: setattr(owner, name, before))
        else:
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, made)

    def note_registry(self, registry: dict[tuple[str, int], Any], key: tuple[str, int]) -> None:
        """Notes what was registered, so that disable() registers it again."""
        if key in registry:
            before = registry[key]
            self._undo.append(lambda: registry.__setitem__(key, before))
        else:
            self._undo.append(lambda: registry.pop(key, None))

    def undo(self) -> None:
        """Takes everything back, the last change first."""
        while self._undo:
            self._undo.pop()()


_switched: _Switched | None = None

_SAVE_METHODS = ("save", "async_save")
_LOAD_METHODS = (
    "load",
    "load_tensors_metadata",
    "load_sharded_metadata",
    "check_backend_compatibility",
    "check_version_compatibility",
    "remove_sharded_tensors",
)


def enable(*, save_strategy: Any = None, load_strategy: Any = None) -> None:
    """Makes Tilestone's strategies those that stock Megatron-Core uses in this process.

    For a program that offers no place for a strategy. Called once, on every rank, before it saves
    or loads. Two things change in Megatron-Core until disable(): the default strategies that it
    registers (up to 0.18), for torch_dist and for loading zarr; and the methods of its classes
    TorchDistSaveShardedStrategy and TorchDistLoadShardedStrategy, for programs that make these by
    name, whose instances then save and load by Tilestone's. Subclasses of the two that others have
    written are left alone, and so are strategies that a program passes itself.

    Called again it changes only which strategies are used. Logs once (INFO) that it is in force.
    Safe to call from several threads.

    Args:
        save_strategy: a TilestoneSaveStrategy with options of its own; default: one without.
        load_strategy: a TilestoneLoadStrategy, likewise.

    Raises:
        UnsupportedError: Megatron-Core can't be imported, or is of an unknown version.
        InvalidArgumentError: a strategy that is none of Tilestone's.
    """
    global _switched
    with _lock:
        save = _own("save_strategy", save_strategy, "TilestoneSaveStrategy")
        load = _own("load_strategy", load_strategy, "TilestoneLoadStrategy")
        if _switched is not None:
            _switched.save, _switched.load = save, load
            return
        switched = _Switched()
        switched.save, switched.load = save, load
        try:
            _switch(switched)
        except BaseException:
            switched.undo()
            raise
        _switched = switched
        _log.info("Megatron-Core's sharded checkpoints are saved and loaded by Tilestone")


def disable() -> None:
    """Takes back all that enable() has changed; without meaning where nothing is changed.

    Safe to call from several threads. What saves and loads at this moment ends as it began.
    """
    global _switched
    with _lock:
        if _switched is not None:
            _switched.undo()
            _switched = None


def _own(option: str, given: Any, name: str) -> Any:
    """The strategy that was given, or one without options."""
    kind = __getattr__(name)
    if given is None:
        return kind()
    if not isinstance(given, kind):
        raise InvalidArgumentError(f"{option} is a {name} or None, not {given!r}")
    return given


def _switch(switched: _Switched) -> None:
    strategies = _stock("strategies.torch")
    base = _find_base()
    if base is not None:
        _switch_defaults(switched, strategies, base)
    for name in _SAVE_METHODS:
        _divert(switched, strategies.TorchDistSaveShardedStrategy, name, "save")
    for name in _LOAD_METHODS:
        _divert(switched, strategies.TorchDistLoadShardedStrategy, name, "load")


def _switch_defaults(switched: _Switched, strategies: Any, base: Any) -> None:
    """Megatron-Core registers its strategies anew whenever one is asked for, by this function."""
    action = base.StrategyAction
    defaults = [
        (action.SAVE_SHARDED, "torch_dist", "save"),
        *((action.LOAD_SHARDED, backend, "load") for backend in _BACKENDS),
    ]

    def register() -> None:
        for kind, backend, ours in defaults:
            base.register_default_strategy(kind, backend, 1, getattr(switched, ours))

    for kind, backend, _ in defaults:
        switched.note_registry(base.default_strategies[kind.value], (backend, 1))
    switched.patch(strategies, "register_default_torch_strategies", register)


def _divert(switched: _Switched, kind: type, name: str, ours: str) -> None:
    """Instances of just this class call our strategy's method in the place of their own."""
    original = getattr(kind, name, None)

    def diverted(self: Any, *args: Any, **keywords: Any) -> Any:
        if type(self) is not kind and original is not None:
            return original(self, *args, **keywords)
        if getattr(self, "separation_hint", None):
            _tell_of_hint(self.separation_hint)
        return getattr(getattr(switched, ours), name)(*args, **keywords)

    diverted.__name__ = name
    diverted.__qualname__ = f"{kind.__qualname__}.{name}"
    switched.patch(kind, name, diverted)


@functools.cache
def _tell_of_hint(hint: str) -> None:
    _log.warning("separation_hint=%r is not followed: keys share data files", hint)
