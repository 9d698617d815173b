"""Saving and loading sharded state dicts: the functions of Megatron-Core's `dist_checkpointing`.

Saves and loads by Tilestone's own strategies are one call of the engine: a failure of one rank is
raised on every rank, a save leaves either the old checkpoint or the whole new one, and what is read
is checked. The caller's state dict is never changed.
"""

from __future__ import annotations

import logging
import os
import pathlib
from collections.abc import Callable
from typing import Any, Dict, Tuple, Union

from tilestone import _calls, _core
from tilestone._errors import (
    InvalidArgumentError,
    RankFailedError,
    TimeoutError,
    UnsupportedError,
)
from tilestone.megatron import _foreign, _parts, _ranks, _stored
from tilestone.megatron.mapping import (
    CommonStateDict,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
)
from tilestone.megatron.strategies._engine import ASYNC_HINT, COPIES
from tilestone.megatron.strategies._together import Deadline
from tilestone.megatron.strategies.async_utils import AsyncRequest
from tilestone.megatron.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    StrategyAction,
    get_default_strategy,
)
from tilestone.megatron.strategies.common import TorchCommonLoadStrategy
from tilestone.megatron.utils import _clean_metadata_for_serialization
from tilestone.megatron.validation import (
    StrictHandling,
    maybe_report_missing_and_unexpected_keys,
    parse_strict_flag,
    verify_checkpoint_and_load_strategy,
)

logger = logging.getLogger(__name__)

# What a checkpoint holds: key of a tensor or unique key of an object -> the entity without data.
CkptShardedMetadata = Dict[str, Union[ShardedTensor, ShardedObject]]
_Directory = Union[str, "os.PathLike[str]"]

_CONTENT_METADATA_KEY = "content_metadata"
_LOGS = (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL)
_RAISES = (StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL)
_MISSING_TOO = (StrictHandling.LOG_ALL, StrictHandling.RAISE_ALL, StrictHandling.RETURN_ALL)


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: _Directory,
    sharded_strategy: Union[LoadShardedStrategy, Tuple[str, int], None] = None,
    common_strategy: Union[LoadCommonStrategy, Tuple[str, int], None] = None,
    validate_access_integrity: bool = True,
    strict: Union[str, StrictHandling] = StrictHandling.ASSUME_OK_UNEXPECTED,
    async_strategy: str = "nvrx",
    verify_integrity: bool = False,
    *,
    process_group: Any = None,
    timeout: float | None = _core.DEFAULT_TIMEOUT,
    allow_classes: Any = (),
    cast: bool = True,
) -> Union[StateDict, Tuple[StateDict, set[str], set[str]]]:
    """Loads a checkpoint, in whatever parts it was saved. Every rank calls.

    Args:
        sharded_state_dict: what is wanted: entities in nested dicts and lists. Tensors of theirs
            are filled in place; those without data are allocated on the CPU. Common values in it
            are ignored; a LocalNonpersistentObject gives the object that it holds.
        checkpoint_dir: the checkpoint's directory.
        sharded_strategy: (backend, version), a LoadShardedStrategy, or None: found from the files.
            One of a user's own is called as Megatron-Core calls it.
        common_strategy: the same for common state.
        validate_access_integrity: refuse a template of which the main replicas of all ranks leave
            out a part of a tensor, or have one twice.
        strict: what keys mean that the checkpoint lacks (*unexpected*) or that no rank asks for
            (*missing*), see StrictHandling. Of an object that is its key, not its unique key.
        async_strategy: without meaning here.
        verify_integrity: compare the files with the hashes of `integrity.json`, where Megatron-Core
            has written one; the ranks share the files. Tilestone's own checksums are always
            compared.
        process_group: the ranks that load; None: torch's default group, or this process alone
            where torch.distributed is not initialised.
        timeout: seconds for the whole load; None for no limit.
        allow_classes: names of further classes of which objects may be made, as for
            `tilestone.load`. Without it they come back as `tilestone.Opaque`; Namespaces, BytesIO,
            signals and Megatron's enums need not be named.
        cast: convert tensors from the stored dtype where it is not the wanted one, as Megatron-Core
            does (weights in bfloat16 into ones in float32). False: a difference is an error.

    Returns:
        The common state of the checkpoint, with what was loaded in the entities' places. Slices of
        flattened tensors that hold nothing are left out, as Megatron-Core does. With the
        modes RETURN_*, (state, missing keys, unexpected keys): missing ones are the same on every
        rank, unexpected ones are this rank's. Unexpected entities are left out of the state.

    Raises:
        CheckpointingException: on every rank.
        ValueError: `strict` names no mode.
    """
    strategies, failure = _load_strategies(checkpoint_dir, sharded_strategy, common_strategy)
    mode = StrictHandling.ASSUME_OK_UNEXPECTED
    try:
        mode = parse_strict_flag(strict)
    except ValueError as error:
        strategies, failure = None, error
    options = _load_options(strategies)
    if options is None:
        assert strategies is not None
        result = _foreign.load(
            sharded_state_dict, checkpoint_dir, *strategies, validate_access_integrity, mode
        )
        return result if StrictHandling.requires_returning_mismatch_keys(mode) else result[0]

    def check() -> None:
        if failure is not None:
            raise failure
        if verify_integrity:
            rank, size = _ranks.rank(process_group), _ranks.size(process_group)
            _stored.check_integrity(checkpoint_dir, rank, size)

    def judge(missing: set[str], unexpected: set[str]) -> None:
        if mode in _LOGS + _RAISES:
            maybe_report_missing_and_unexpected_keys(missing, unexpected, mode in _RAISES)

    asked = _parts.Asked(sharded_state_dict, check, judge)
    state = _parts.engine_load(
        asked,
        checkpoint_dir,
        group=process_group,
        timeout=timeout,
        allow_classes=allow_classes,
        cast=cast,
        not_in_checkpoint="error" if mode == StrictHandling.ASSUME_OK_UNEXPECTED else "ignore",
        not_requested="report" if mode in _MISSING_TOO else "ignore",
        validate_access=validate_access_integrity,
        **options,
    )
    if StrictHandling.requires_returning_mismatch_keys(mode):
        return state, asked.missing, asked.unexpected
    return state


def _load_strategies(
    checkpoint_dir: _Directory, sharded_strategy: Any, common_strategy: Any
) -> Tuple[Tuple[Any, Any] | None, Exception | None]:
    """The strategies, or why there are none: that is raised where all ranks get to know."""
    try:
        found = verify_checkpoint_and_load_strategy(
            checkpoint_dir, sharded_strategy, common_strategy
        )
        return found, None
    except Exception as error:
        return None, error


def _load_options(strategies: Tuple[Any, Any] | None) -> dict[str, Any] | None:
    """What the strategies ask of the engine; None where they do it themselves."""
    if strategies is None:
        return {}
    sharded, common = strategies
    if type(common) is not TorchCommonLoadStrategy:
        return None
    return _engine_options(sharded)


def _engine_options(strategy: Any) -> dict[str, Any] | None:
    options = getattr(strategy, "engine_options", None)
    return None if options is None else options()


def load_common_state_dict(checkpoint_dir: _Directory) -> StateDict:
    """The common state of a checkpoint, tensors on the CPU. Ranks call it each for itself.

    Raises:
        CheckpointingException: there is no checkpoint, or its common state can't be read.
    """
    _, common = verify_checkpoint_and_load_strategy(checkpoint_dir)
    return common.load_common(checkpoint_dir)  # type: ignore[no-any-return]


def load_tensors_metadata(
    checkpoint_dir: _Directory, sharded_strategy: Union[LoadShardedStrategy, None] = None
) -> CkptShardedMetadata:
    """What tensors a checkpoint holds. Ranks call it each for itself.

    Args:
        checkpoint_dir: the checkpoint's directory.
        sharded_strategy: reads them; None: that of the checkpoint.

    Returns:
        key -> ShardedTensor of the whole tensor, without data: global shape and dtype.

    Raises:
        CheckpointingException: there is no checkpoint, or it can't be read.
    """
    strategy, _ = verify_checkpoint_and_load_strategy(checkpoint_dir, sharded_strategy)
    return strategy.load_tensors_metadata(pathlib.Path(checkpoint_dir))  # type: ignore[no-any-return]


def load_sharded_metadata(
    checkpoint_dir: _Directory,
    sharded_strategy: Union[LoadShardedStrategy, None] = None,
    common_strategy: Union[LoadCommonStrategy, None] = None,
) -> CkptShardedMetadata:
    """What tensors and objects a checkpoint holds. Ranks call it each for itself.

    Args:
        checkpoint_dir: the checkpoint's directory.
        sharded_strategy, common_strategy: read them; None: those of the checkpoint.

    Returns:
        As load_tensors_metadata, and for each object unique key -> ShardedObject without data. The
        common state, which later versions of Megatron-Core store as an object, is not among them.

    Raises:
        CheckpointingException: there is no checkpoint, or it can't be read.
    """
    strategies = verify_checkpoint_and_load_strategy(
        checkpoint_dir, sharded_strategy, common_strategy
    )
    return _foreign.sharded_metadata(checkpoint_dir, *strategies)  # type: ignore[no-any-return]


def load_plain_tensors(checkpoint_dir: _Directory) -> StateDict:
    """All tensors of a checkpoint, whole, on every rank; every rank calls.

    Returns:
        key -> tensor, on the CPU; beside them the common state, as in Megatron-Core.

    Raises:
        CheckpointingException: on every rank.
    """
    strategies, failure = _load_strategies(checkpoint_dir, None, None)
    wanted = {}
    if failure is None:
        try:
            wanted = load_tensors_metadata(checkpoint_dir)
        except Exception as error:
            failure = error

    def check() -> None:
        if failure is not None:
            raise failure

    if _load_options(strategies) is None:
        return load(wanted, checkpoint_dir, validate_access_integrity=False)  # type: ignore[return-value]
    asked = _parts.Asked(wanted, check)
    return _parts.engine_load(asked, checkpoint_dir)


def load_content_metadata(
    checkpoint_dir: _Directory | None = None, *, preloaded_state_dict: StateDict | None = None
) -> dict[Any, Any] | None:
    """What the program that saved says of the content: `save(..., content_metadata=...)`.

    Args:
        checkpoint_dir: the checkpoint's directory.
        preloaded_state_dict: its common state, or a loaded state; it is not read again then.

    Returns:
        None: the checkpoint has none.

    Raises:
        ValueError: both arguments are None.
        CheckpointingException: there is no checkpoint, or its common state can't be read.
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise InvalidArgumentError("checkpoint_dir or preloaded_state_dict must be given")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    return preloaded_state_dict.get(_CONTENT_METADATA_KEY)


def remove_sharded_tensors(checkpoint_dir: _Directory, key_prefix: str) -> None:
    """Removes tensors and objects whose keys begin with a prefix from a checkpoint that stands.

    One rank calls, or several: one of them removes, and each returns once the keys are gone. The
    checkpoint is replaced in one step: at any moment, and after a crash at any moment, it is what it
    was or the same without these keys. Then data files go in which nothing is left of it (by stock's
    separation_hint a prefix has files of its own); in the others the bytes stay. A program that has
    the checkpoint open may find files gone. The common state stays.

    Args:
        checkpoint_dir: the checkpoint's directory; of the format torch_dist, whoever wrote it. With
            it goes an `integrity.json`, whose hashes would be wrong.
        key_prefix: of tensors' keys and of objects' unique keys; not empty. Where none begins so,
            that is a warning, and nothing changes. (Megatron-Core looks for files whose names begin
            so first, and removes nothing where there are none.)

    Raises:
        CheckpointingException: there is no checkpoint, a save to it is under way, or it is one whose
            index can't be written anew: of the format zarr, whose tensors are directories of their
            own, or with flattened tensors of Megatron-Core up to 0.15 that would stay.
    """
    strategy, _ = verify_checkpoint_and_load_strategy(checkpoint_dir)
    strategy.remove_sharded_tensors(checkpoint_dir, key_prefix)


def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: _Directory,
    sharded_strategy: Union[SaveShardedStrategy, Tuple[str, int], None] = None,
    common_strategy: Union[SaveCommonStrategy, Tuple[str, int], None] = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: (
        Callable[[CommonStateDict], StateDict] | None
    ) = None,
    content_metadata: dict[Any, Any] | None = None,
    async_strategy: str = "nvrx",
    verify_integrity: bool = False,
    *,
    process_group: Any = None,
    timeout: float | None = _core.DEFAULT_TIMEOUT,
    common_differs: str = "warn",
    agreement: str = "exchange",
    replicate: str = "none",
    replicate_group: Any = None,
    max_copy_bytes: int | None = None,
    tp_replica_names: bool = False,
    coordination: str = "communicator",
    rank: int | None = None,
    world_size: int | None = None,
    token: str | None = None,
    number: int = 0,
    wait: bool = True,
) -> AsyncRequest | None:
    """Saves a state dict in parts. Every rank calls.

    When it returns, the checkpoint is complete and durable; until then a checkpoint that stands in
    the directory stays valid, and it is replaced as a whole. So is what a save of Megatron-Core has
    left that did not end; a warning says what is replaced. The directory is made where it is not
    there. Files of others in it are refused by name.

    Args:
        sharded_state_dict: entities in nested dicts and lists; what is none is common state, of
            which rank 0's is saved. LocalNonpersistentObjects are not saved.
        checkpoint_dir: the checkpoint's directory.
        sharded_strategy: (backend, version): ("torch_dist", 1) or ("zarr", 1); a
            SaveShardedStrategy; or None: ("torch_dist", 1). One of a user's own is called as
            Megatron-Core calls it.
        common_strategy: None: there is one way.
        validate_access_integrity: refuse a state of which the main replicas of all ranks leave out
            a part of a tensor, or have one twice, and compare the ranks' common state.
        async_sharded_save: refused: asynchronous saves come later.
        preprocess_common_before_consistancy_check: of a copy of the common state, makes what is
            compared between ranks; what is saved stays as it is.
        content_metadata: what a program wants to know of the checkpoint before it loads it; it
            becomes the common state's "content_metadata", without its "dp_cp_group", in the
            place of one that is there. A dict without entities.
        async_strategy: without meaning here.
        verify_integrity: without meaning here: every item of a checkpoint has a checksum, which is
            compared when it is read.
        process_group: the ranks that save; None: torch's default group, or this process alone
            where torch.distributed is not initialised.
        timeout: seconds for the whole save; None for no limit.
        common_differs: "warn" or "error", where common state differs between ranks.
        agreement: how ranks agree who writes what, as for `tilestone.save`. By "rule" the holders
            of each ShardedTensor share the writing; where they are not known (those of Megatron's
            own modules aren't), the main replica's rank writes. Not with a fully parallel strategy
            or one of a user's own, which agree in their own way.
        replicate: "local": each rank also writes to its own data file what it holds and another
            rank of its `replicate_group` writes, as for `tilestone.save`. "none": what the strategy
            says, by default no copies. Not with a fully parallel strategy, in which a rank has no
            replicas to copy, nor with one of a user's own, nor in zarr.
        replicate_group: with replicate="local", the ranks whose shards this one copies, itself among
            them: a process group, a `groups.Group`, or ranks in process_group. None: the
            model-parallel group (tensor and pipeline parallel) of Megatron's parallel_state.
        max_copy_bytes: bytes of elements that this rank copies at most; None: no limit.
        tp_replica_names: the index names a tensor KEY that tensor-parallel ranks hold replicas of
            (replica ids of three numbers, the second not 0) KEY.__tp_replica_0, _1, ... too, one
            for each of them, for programs that ask for these. They are names of the same bytes,
            and Tilestone knows KEY alone. torch_dist only, with a strategy of Tilestone's.
        coordination: "files": ranks know of one another by small files in the directory alone, as
            for `tilestone.save`, by `rank`, `world_size` and `token`. torch.distributed need not be
            initialised, and is not used. They agree by rule, see `agreement`; nothing is replaced,
            so no checkpoint stands in the directory and no file of Megatron-Core's names. Parts
            that no main replica holds are refused when the save is published, also with
            validate_access_integrity=False; of parts that several hold, that they are the same;
            with True common state is compared then (its paths are not named). Only torch_dist, by
            None or ("torch_dist", 1) for a strategy; no process_group. `tilestone.unpublished`
            and `tilestone.publish` say what is missing, and complete a save whose ranks have died.
        rank, world_size, token, number, wait: for coordination="files", as for `tilestone.save`.
            With wait=False the last rank to write publishes.

    Returns:
        None.

    Raises:
        CheckpointingException: on every rank; what stood in the directory still stands. With
            coordination="files" on this rank, and on those that wait for it.
        NotImplementedError: a common_strategy was given.
    """
    by_files, stray = _by_files(
        coordination=coordination, rank=rank, world_size=world_size, token=token, number=number,
        wait=wait,
    )  # fmt: skip
    deadline = Deadline(timeout)
    state: Any = sharded_state_dict
    strategy, failure = _save_strategy(sharded_strategy)
    try:
        state = _with_content_metadata(sharded_state_dict, content_metadata)
    except InvalidArgumentError as error:
        strategy, failure = None, error
    if stray is not None:
        strategy, failure = None, stray
    if async_sharded_save:
        strategy = None
        failure = UnsupportedError("asynchronous saves are not there yet", hint=ASYNC_HINT)
    elif common_strategy is not None:
        strategy = None
        failure = NotImplementedError(
            "common state is saved in one way: leave common_strategy None"
        )
    options = {} if strategy is None else _engine_options(strategy)
    copies = _copies(options, replicate, replicate_group, max_copy_bytes)
    settled = options is None or hasattr(strategy, "engine_state")
    wanted = f"agreement={agreement!r}" if agreement != "exchange" else ""
    if copies:
        wanted = f"replicate={copies['replicate']!r}"
    if tp_replica_names and options is None:
        wanted = "tp_replica_names=True"
    if wanted and settled and failure is None:
        failure = InvalidArgumentError(
            f"{wanted} with a {type(strategy).__name__}, which decides who writes"
        )
        strategy, options = None, {}
    if options is None and not by_files:
        _foreign.save(
            state, checkpoint_dir, strategy, get_default_save_common_strategy(),
            validate_access_integrity, preprocess_common_before_consistancy_check,
        )  # fmt: skip
        return None
    if by_files and failure is None:
        failure = _needs_communicator(strategy, process_group)
    unchecked = validate_access_integrity and not by_files
    if failure is None and hasattr(strategy, "engine_state"):
        try:
            if validate_access_integrity:
                strategy.validate_access(state, process_group, deadline.timeout())
            state = strategy.engine_state(state, process_group, deadline.timeout())
            unchecked = False
        except (TimeoutError, RankFailedError):
            raise  # every rank's, and nobody waits in the save
        except Exception as error:
            failure = error

    def check() -> None:
        if failure is not None:
            raise failure

    preprocess = preprocess_common_before_consistancy_check if validate_access_integrity else None
    replaces = not by_files
    given = _parts.Given(state, checkpoint_dir, check, process_group, preprocess, replaces)
    _parts.engine_save(
        given,
        checkpoint_dir,
        group=None if by_files else process_group,
        validate_access=unchecked,
        common_differs=common_differs if validate_access_integrity else "ignore",
        timeout=deadline.timeout(),
        agreement=agreement,
        tp_replica_names=tp_replica_names,
        **(options or {}) | copies | by_files,
    )
    return None


def _by_files(
    coordination: str, **files: Any
) -> tuple[Dict[str, Any], InvalidArgumentError | None]:
    """Options of `tilestone.save` for a save by files, empty for another one; and the error where
    what only a save by files has was given for another one, which all ranks are to hear of."""
    try:
        if _calls.is_by_files(coordination):
            return {"coordination": coordination, "overwrite": False, **files}, None
        _calls.refuse_files(files)
    except InvalidArgumentError as error:
        return {}, error
    return {}, None


def _needs_communicator(strategy: Any, process_group: Any) -> Exception | None:
    """What of a save's options can't be had by files."""
    if process_group is not None:
        return InvalidArgumentError('process_group has no meaning with coordination="files"')
    if hasattr(strategy, "engine_state"):
        return UnsupportedError(
            f"a {type(strategy).__name__} needs a communicator: its ranks agree who writes",
            hint='leave sharded_strategy None: with coordination="files" the holders of a '
            "ShardedTensor (`holders=`) share the writing",
        )
    if strategy is not None and _engine_options(strategy) is None:
        return UnsupportedError(
            f"a {type(strategy).__name__} needs a communicator: it saves in its own way",
            hint='leave sharded_strategy None, or save with coordination="communicator"',
        )
    return None


def _copies(
    options: Dict[str, Any] | None, replicate: str, group: Any, most: int | None
) -> Dict[str, Any]:
    """What is to be copied, as options of the engine: by the caller, else by the strategy."""
    if replicate != "none" or group is not None or most is not None:
        return {"replicate": replicate, "replicate_group": group, "max_copy_bytes": most}
    of_strategy = {} if options is None else options
    return {name: of_strategy[name] for name in COPIES if name in of_strategy}


def _with_content_metadata(state: Any, content_metadata: Any) -> Any:
    """The state with what the program says of it, which holds no process group.

    Raises:
        InvalidArgumentError: that is no dict or holds entities, or takes the place of entities.
    """
    if content_metadata is not None and not isinstance(content_metadata, dict):
        kind = type(content_metadata).__name__
        raise InvalidArgumentError(f"content_metadata is a dict or None, not {kind}")
    if not isinstance(state, dict):
        return state
    if content_metadata is not None:
        if _parts.holds_entities(content_metadata):
            raise InvalidArgumentError(
                "content_metadata holds sharded entities, and is part of the common state",
                key=_CONTENT_METADATA_KEY,
            )
        if _parts.holds_entities(state.get(_CONTENT_METADATA_KEY)):
            raise InvalidArgumentError(
                "content_metadata would take the place of sharded entities, which were lost",
                key=_CONTENT_METADATA_KEY,
                hint="put them under another key of the state dict",
            )
    metadata = state.get(_CONTENT_METADATA_KEY) if content_metadata is None else content_metadata
    if not isinstance(metadata, dict):
        return state
    return {**state, _CONTENT_METADATA_KEY: _clean_metadata_for_serialization(metadata)}


def _save_strategy(given: Any) -> Tuple[Any, Exception | None]:
    """The strategy, or why there is none: that is raised where all ranks get to know."""
    try:
        if given is None:
            return get_default_save_sharded_strategy(), None
        if isinstance(given, tuple):
            return get_default_strategy(StrategyAction.SAVE_SHARDED, *given), None
    except Exception as error:
        return None, error
    if all(hasattr(given, name) for name in ("save", "backend", "version")):
        return given, None
    wanted = "sharded_strategy is a SaveShardedStrategy, (backend, version) or None"
    return None, InvalidArgumentError(f"{wanted}, not {type(given).__name__}")


def get_default_save_sharded_strategy(
    backend: str = "torch_dist", version: int = 1
) -> SaveShardedStrategy:
    """The strategy that saves tensors and objects in a format.

    Raises:
        CheckpointingException: there is none; the message names those that there are.
    """
    return get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)  # type: ignore[no-any-return]


def get_default_save_common_strategy(
    backend: str = "torch", version: int = 1
) -> SaveCommonStrategy:
    """The strategy that saves common state beside a strategy of a user's own.

    Raises:
        CheckpointingException: there is none; the message names those that there are.
    """
    return get_default_strategy(StrategyAction.SAVE_COMMON, backend, version)  # type: ignore[no-any-return]


def get_default_load_sharded_strategy(checkpoint_dir: _Directory) -> LoadShardedStrategy:
    """The strategy that loads a checkpoint's tensors and objects.

    Raises:
        CheckpointingException: there is no checkpoint, or none loads its format.
    """
    return verify_checkpoint_and_load_strategy(checkpoint_dir)[0]  # type: ignore[no-any-return]
