"""Passes Megatron-Core's state dicts through the engine's calls, which run all checks and report
every failure on every rank."""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch

from tilestone import _core
from tilestone._calls import save_load
from tilestone._calls.collective import Prepared
from tilestone._errors import CheckpointError, InvalidArgumentError
from tilestone._objects import entities
from tilestone._options import valid
from tilestone._options.load_report import LoadReport
from tilestone._torch.parts import states_position
from tilestone.megatron import _integrity, _ranks
from tilestone.megatron._ranks import within_call
from tilestone.megatron._shards import held
from tilestone.megatron._stored import DIALECT, HARMLESS, literal
from tilestone.megatron.core import CONFIG_FNAME
from tilestone.megatron.dict_utils import (
    dict_list_map_outplace,
    extract_matching_values,
    nested_values,
)
from tilestone.megatron.groups import model_parallel_group
from tilestone.megatron.mapping import (
    CommonStateDict,
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensorFactory,
    StateDict,
)
from tilestone.megatron.utils import (
    OwnReplicas,
    force_all_tensors_to_non_fp8,
    is_empty_slice,
)

logger = logging.getLogger("tilestone.megatron")

# Tilestone's own entities have the same meaning here as in `tilestone.save`.
_OURS = (
    entities.ShardedTensor,
    entities.ShardedObject,
    entities.ShardedTensorFactory,
    entities.LocalNonpersistent,
)
_LEFT_OUT: Any = object()  # marks what is not in the result
_NOT_SAVED = LocalNonpersistentObject(None)


def _is_dtensor(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and hasattr(item, "device_mesh")


def _is_entity(item: Any) -> bool:
    """Whether each rank has its own part of a value. DTensors are saved as sharded tensors, and so
    is what says itself where it stands (`parts`)."""
    kinds = (ShardedBase, LocalNonpersistentObject, *_OURS)
    return isinstance(item, kinds) or _is_dtensor(item) or states_position(item)


def _leaves(tree: Any) -> Iterator[Any]:
    """The leaves of a tree, in order; a leaf itself is a tree of one."""
    return nested_values([tree])


def _holds(tree: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether a leaf of a tree satisfies `wanted`."""
    return any(wanted(leaf) for leaf in _leaves(tree))


def holds_entities(tree: Any) -> bool:
    """Whether a tree contains anything other than common state."""
    return _holds(tree, _is_entity)


def holds_tensors(tree: Any) -> bool:
    """Whether a tree contains a tensor that is not an entity."""
    return _holds(tree, lambda item: isinstance(item, torch.Tensor) and not _is_entity(item))


def _is_common(item: Any) -> bool:
    return not _is_entity(item)


def _expect_dict(state: Any) -> Mapping[Any, Any]:
    if isinstance(state, Mapping):
        return state
    raise InvalidArgumentError(f"a state must be a dict, not {type(state).__name__}")


def _refuse_hidden(value: Any) -> None:
    """Refuses a tuple that holds an entity, because a load does not search tuples."""
    for item in value if isinstance(value, tuple) else ():
        if _is_entity(item):
            raise InvalidArgumentError(
                f"a {type(item).__name__} is inside a tuple; entities may only be in dicts and "
                "lists",
                key=getattr(item, "key", ""),
            )
        _refuse_hidden(item)


def _not_quantized(item: Any) -> Any:
    """The entity, with its data dequantised if it is one of Transformer Engine's 8-bit tensors."""
    if type(getattr(item, "data", None)).__module__.split(".")[0] != "transformer_engine":
        return item
    copied = copy.copy(item)
    force_all_tensors_to_non_fp8({"": copied})
    return copied


def asked_of(tree: Any, keep_common: bool = False, keep_empty: bool = False) -> Any:
    """Extracts the request of a load: the entities, in the dicts and lists that hold some.

    Common values of the template are not requested, whatever the checkpoint has. In a list that
    holds both kinds they are kept, so that each element keeps its index.

    Args:
        tree: the caller's state dict, which is not changed.
        keep_common: the tree is inside such a list.
        keep_empty: also request empty slices of flattened tensors.
    """
    if isinstance(tree, Mapping):
        parts = ((key, asked_of(value, keep_common, keep_empty)) for key, value in tree.items())
        made: Any = {key: value for key, value in parts if value is not _LEFT_OUT}
    elif isinstance(tree, list):
        keep_common = keep_common or (_holds(tree, _is_entity) and _holds(tree, _is_common))
        elements = (asked_of(value, keep_common, keep_empty) for value in tree)
        made = [value for value in elements if value is not _LEFT_OUT]
    elif not _is_entity(tree):
        _refuse_hidden(tree)
        return tree if keep_common else _LEFT_OUT
    else:
        left_out = is_empty_slice(tree) and not keep_empty
        return _LEFT_OUT if left_out else _not_quantized(tree)
    return made if made or (keep_common and not tree) else _LEFT_OUT


def asked_built(asked: Any) -> Any:
    """Copies the result of asked_of(), with each factory replaced by the request for its subtree.

    Common values that a factory builds are not requested either. Empty slices are, because the
    factory's merge_fn may rely on them.
    """

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, ShardedTensorFactory):
            return leaf
        parts = asked_of(leaf.build(), keep_empty=True)
        return {} if parts is _LEFT_OUT else parts

    return dict_list_map_outplace(of, asked)


def raiser(failure: Exception | None) -> Callable[[], None]:
    """A `check` that raises a rank's failure, if there is one; all ranks then raise it."""

    def check() -> None:
        if failure is not None:
            raise failure

    return check


# Descriptions of an optimizer's buckets, which only conversions read.
_LAYOUT_KEY = re.compile(
    r"(chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.layout(/shard_.*)?"
)


def _not_requested(report: LoadReport) -> set[str]:
    return {key for key in report.not_requested if not _LAYOUT_KEY.fullmatch(key)}


@dataclasses.dataclass(eq=False)
class Asked(Prepared):
    """A template of a load.

    Attributes:
        given: the caller's state dict; it is not changed.
        check: called first; if it raises, this rank has failed.
        judge: called with the missing and the unexpected keys; may raise.
        gives_no_place: whether the load leaves no place in a list for what is not stored.
        unexpected: set by the load: keys that this rank requests and that are not stored.
        missing: set by the load: stored keys that no rank requests, if these are reported.
    """

    harmless = HARMLESS
    # The strict modes log the keys. An empty dict is common state, which is not requested.
    engine = {"objects_by_grid": True, "log_report": False, "fill_empty": False}

    given: ShardedStateDict
    check: Callable[[], None] = lambda: None
    gives_no_place: bool = False
    judge: Callable[[set[str], set[str]], None] = lambda missing, unexpected: None
    missing: set[str] = dataclasses.field(default_factory=set)
    unexpected: set[str] = dataclasses.field(default_factory=set)

    def make(self) -> Mapping[Any, Any]:
        """Returns the entities, with factories built."""
        self.check()
        asked = asked_of(_expect_dict(self.given))
        self._asked = {} if asked is _LEFT_OUT else asked
        self._made = asked_built(self._asked)
        return self._made  # type: ignore[no-any-return]

    def finish(self, loaded: dict[Any, Any], report: LoadReport, kept: set[str]) -> dict[Any, Any]:
        """Returns the result, after missing and unexpected keys have been judged."""
        result = self.merge(loaded, kept)
        self.missing = _not_requested(report)
        self.judge(self.missing, self.unexpected)
        return result

    def merge(self, loaded: dict[Any, Any], kept: set[str]) -> dict[Any, Any]:
        """Merges the parts of factories, and leaves out what was not loaded (`kept`)."""
        self._kept, self.unexpected = kept, set()
        return self._merged(self._asked, self._made, loaded)  # type: ignore[no-any-return]

    def _merged(self, asked: Any, made: Any, loaded: Any, path: tuple[Any, ...] = ()) -> Any:
        """Makes the value for a place of the result.

        Args:
            asked: the value of asked_of() at this place.
            made: the value of asked_built() at this place.
            loaded: the engine's result for it.
            path: path of the place.
        """
        if isinstance(asked, ShardedTensorFactory):
            before = len(self.unexpected)
            for item in _leaves(made):
                self._is_left_out(item, path)
            return _LEFT_OUT if len(self.unexpected) > before else asked.merge_fn(loaded)
        if isinstance(asked, dict) and isinstance(loaded, dict):
            return self._dict(asked, made, loaded, path)
        if isinstance(asked, list) and isinstance(loaded, list):
            return self._list(asked, made, loaded, path)
        return _LEFT_OUT if self._is_left_out(asked, path) else loaded

    def _is_left_out(self, item: Any, path: tuple[Any, ...]) -> bool:
        if isinstance(item, ShardedBase):
            kept_as = item.unique_key if isinstance(item, ShardedObject) else item.key
            return self._is_unexpected(kept_as, item.key)
        where = ".".join(map(str, path))
        if isinstance(item, entities.ShardedObject):
            return self._is_unexpected(item.unique_key, item.key)
        if isinstance(item, entities.ShardedTensor):
            return self._is_unexpected(item.key or where, item.key or where)
        if _is_dtensor(item):
            return self._is_unexpected(where, where)
        return _is_common(item) and where in self._kept

    def _is_unexpected(self, kept_as: str, key: str) -> bool:
        if kept_as in self._kept:
            self.unexpected.add(key)
        return kept_as in self._kept

    def _dict(self, asked: Any, made: Any, loaded: Any, path: tuple[Any, ...]) -> Any:
        result = {}
        for key, value in loaded.items():
            if key in asked:
                value = self._merged(asked[key], made[key], value, (*path, key))
            if value is not _LEFT_OUT:
                result[key] = value
        return result if result or not loaded or not path else _LEFT_OUT

    def _is_gone(self, made: Any, path: tuple[Any, ...]) -> bool:
        leaves = list(_leaves(made))
        return bool(leaves) and all(self._is_left_out(leaf, path) for leaf in leaves)

    def _list(self, asked: Any, made: Any, loaded: Any, path: tuple[Any, ...]) -> Any:
        places = list(range(len(asked)))
        if self.gives_no_place:
            places = [place for place in places if not self._is_gone(made[place], (*path, place))]
        if len(places) != len(loaded):  # common elements are only in one: pair the other elements
            places = [place for place in places if _holds(asked[place], _is_entity)]
        result = [
            self._merged(asked[place], made[place], value, (*path, place))
            for place, value in zip(places, loaded, strict=True)
        ]
        return [value for value in result if value is not _LEFT_OUT] or (
            _LEFT_OUT if loaded else []
        )


def engine_load(asked: Asked, checkpoint_dir: Any, **options: Any) -> StateDict:
    """Loads a template with the engine, with keyword arguments of `tilestone.load`."""
    return save_load.load(cast("Any", asked), literal(checkpoint_dir), **options)


def load_sharded(sharded_state_dict: ShardedStateDict, checkpoint_dir: Any) -> StateDict:
    """Loads only entities; dtypes are converted. Common state is neither read nor returned."""
    asked = Asked(sharded_state_dict)
    asked.engine = {**asked.engine, "unmarked": DIALECT, "sharded_only": True}
    return engine_load(
        asked, checkpoint_dir, cast=True, group=_ranks.group_of_call(), timeout=within_call()
    )


def without_own_replicas(tree: Any) -> Any:
    """The tree without second replicas of a shard on this rank; the same tree if there are none."""
    try:
        leaves = list(_leaves(tree))
    except RecursionError:
        return tree  # the engine refuses a container that holds itself, with its key
    replicas = OwnReplicas(leaves)
    if not any([replicas.repeats(leaf) for leaf in leaves]):
        return tree
    return _without(tree, OwnReplicas(leaves).repeats)


def _without(tree: Any, left_out: Callable[[Any], bool]) -> Any:
    """The tree without some leaves, and without the containers that held nothing else.

    An empty container would be common state. In lists the other elements keep their places.
    """
    if isinstance(tree, dict) and tree:
        rests = {key: _without(value, left_out) for key, value in tree.items()}
        return {key: rest for key, rest in rests.items() if rest is not _NOT_SAVED} or _NOT_SAVED
    if isinstance(tree, list) and tree:
        rest = [_without(value, left_out) for value in tree]
        return _NOT_SAVED if all(each is _NOT_SAVED for each in rest) else rest
    return _NOT_SAVED if left_out(tree) else tree


@dataclasses.dataclass(eq=False)
class Given(Prepared):
    """The state of a save.

    Attributes:
        given: the caller's state dict; it is not changed.
        directory: the checkpoint's directory.
        check: called first; if it raises, this rank has failed.
        group: the ranks that save; None: all.
        preprocess: takes a copy of the common state and returns what the ranks compare.
        replaces: whether an existing checkpoint may be replaced.
    """

    harmless = HARMLESS

    given: ShardedStateDict
    directory: Any
    check: Callable[[], None] = lambda: None
    group: Any = None
    preprocess: Callable[[CommonStateDict], StateDict] | None = None
    replaces: bool = True
    _compared: Any = None
    _replaced: str = ""

    def make(self) -> Mapping[Any, Any]:
        """Returns the state. First rank 0 determines what the save replaces."""
        self.check()
        _expect_dict(self.given)
        if self.replaces and _ranks.rank(self.group) == 0:
            self._replaced = replaced_by(self.directory)
        return without_own_replicas(self.given)  # type: ignore[no-any-return]

    def copied_group(self, given: Any) -> Any:
        """The group that was given, or the model-parallel one of Megatron's parallel_state."""
        return model_parallel_group(given)

    def compared_common(self) -> Mapping[Any, Any] | None:
        """The result of preprocess for a copy of the common state; None without preprocess."""
        if self.preprocess is None:
            return None
        self._compared = self.preprocess(self._common())
        return cast("Mapping[Any, Any]", self._compared)

    def end(self, result: _core.SaveResult) -> None:
        """Logs what the save has replaced, and how common states differ. Every rank calls.

        Not earlier, because the save might be refused. An `integrity.json` of what was replaced
        is removed.
        """
        if self._replaced:
            logger.warning(self._replaced)
            _integrity.remove_old(self.directory)
        if result.common_differs:
            compared = self._common() if self.preprocess is None else self._compared
            held.log_differences(compared, self.group)

    def take_options(self, options: dict[str, Any], hashes: _integrity.Hashes | None) -> None:
        """Takes what is no keyword of `tilestone.save` out of the options."""
        own = [name for name in ("tp_replica_names", "separation_hint") if name in options]
        engine: dict[str, Any] = {name: options.pop(name) for name in own}
        self.engine = {**engine, "verify_integrity": hashes is not None}

    def forget(self) -> None:
        """Keeps only the common state of what was given. The save has its own copies."""
        self.given = self._common()

    def _common(self) -> Any:
        return extract_matching_values(self.given, _is_common)[0]


def replaced_by(checkpoint_dir: Any) -> str:
    """A warning about what a save to a directory replaces; empty if that is nothing."""
    try:
        names = _core.names_at(valid.directory(literal(checkpoint_dir)))
    except CheckpointError:
        return ""  # there is nothing, or the save will report what is wrong
    if not names:
        return ""
    if CONFIG_FNAME in names:
        return f"Overwriting the existing checkpoint at {checkpoint_dir}"
    return (
        f"Overwriting old incomplete / corrupted checkpoint at {checkpoint_dir}: it holds "
        f"{', '.join(names[:5])} and no {CONFIG_FNAME}"
    )


def engine_save(
    given: Given,
    checkpoint_dir: Any,
    *,
    hashes: _integrity.Hashes | None = None,
    **options: Any,
) -> _core.SaveResult:
    """Saves a state with the engine, with keyword arguments of `tilestone.save`.

    `hashes` are written at the end. tp_replica_names and separation_hint are as for
    `strategies.torch.TorchDistSaveShardedStrategy`.
    """
    path = literal(checkpoint_dir)
    given.take_options(options, hashes)
    options = {"overwrite": True, **options}
    result = save_load.save(cast("Any", given), path, dialect="megatron", **options)
    given.end(result)
    if hashes is not None:
        hashes.save_id = result.save_id
        hashes.write()
    return result
