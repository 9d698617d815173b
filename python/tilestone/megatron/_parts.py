"""State dicts of Megatron-Core's on their way through the engine's calls, which run all checks and
report every failure on every rank."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from tilestone import _api, _entities
from tilestone._calls import LoadReport, Prepared
from tilestone._errors import InvalidArgumentError
from tilestone.megatron import _ranks
from tilestone.megatron._stored import HARMLESS, literal
from tilestone.megatron.core import CONFIG_FNAME
from tilestone.megatron.dict_utils import extract_matching_values
from tilestone.megatron.groups import model_parallel_group
from tilestone.megatron.mapping import (
    CommonStateDict,
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)
from tilestone.megatron.strategies._shares import LocalCopies, without_copies
from tilestone.megatron.utils import force_all_tensors_to_non_fp8
from tilestone.megatron.validation import _validate_common_state_dict

logger = logging.getLogger("tilestone.megatron")

# Tilestone's own entities mean the same here as in `tilestone.save`.
_OURS = (
    _entities.ShardedTensor,
    _entities.ShardedObject,
    _entities.ShardedTensorFactory,
    _entities.LocalNonpersistent,
)
_LEFT_OUT: Any = object()  # in the place of what is not in the result


def _is_dtensor(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and hasattr(item, "device_mesh")


def _is_entity(item: Any) -> bool:
    """Whether each rank has its own of it. DTensors are saved as sharded tensors."""
    kinds = (ShardedBase, LocalNonpersistentObject, *_OURS)
    return isinstance(item, kinds) or _is_dtensor(item)


def _holds(tree: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether a leaf of a tree is as wanted."""
    if isinstance(tree, (dict, list)):
        values = tree.values() if isinstance(tree, dict) else tree
        return any(_holds(value, wanted) for value in values)
    return wanted(tree)


def holds_entities(tree: Any) -> bool:
    """Whether something in a tree is not common state."""
    return _holds(tree, _is_entity)


def holds_tensors(tree: Any) -> bool:
    """Whether something in a tree is a tensor and no entity."""
    return _holds(tree, lambda item: isinstance(item, torch.Tensor) and not _is_entity(item))


def _is_common(item: Any) -> bool:
    return not _is_entity(item)


def _expect_dict(state: Any) -> Mapping[Any, Any]:
    if isinstance(state, Mapping):
        return state
    raise InvalidArgumentError(f"a state is a dict, not {type(state).__name__}")


def _refuse_hidden(value: Any) -> None:
    """Refuses a tuple that holds an entity, which no load would find there."""
    for item in value if isinstance(value, tuple) else ():
        if _is_entity(item):
            raise InvalidArgumentError(
                f"a {type(item).__name__} stands inside a tuple; entities are found in dicts and "
                "lists only",
                key=getattr(item, "key", ""),
            )
        _refuse_hidden(item)


def _is_empty_slice(item: Any) -> bool:
    flat = getattr(item, "flattened_range", None) if isinstance(item, ShardedTensor) else None
    return flat is not None and flat.start == flat.stop


def _not_quantized(item: Any) -> Any:
    """The entity, with a tensor in its quantised type where its data is one of 8 bits."""
    if type(getattr(item, "data", None)).__module__.split(".")[0] != "transformer_engine":
        return item
    copied = copy.copy(item)
    force_all_tensors_to_non_fp8({"": copied})
    return copied


def asked_of(tree: Any, keep_common: bool = False, keep_empty: bool = False) -> Any:
    """What a load asks for: the entities, in dicts and lists that hold some.

    Common values of the template are not asked for, whatever the checkpoint has. In a list that
    holds both kinds they stay, to say which element is which.

    Args:
        tree: the caller's state dict, which stays as it is.
        keep_common: it lies in such a list.
        keep_empty: slices of flattened tensors that hold nothing are asked for too.
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
        left_out = _is_empty_slice(tree) and not keep_empty
        return _LEFT_OUT if left_out else _not_quantized(tree)
    return made if made or (keep_common and not tree) else _LEFT_OUT


def built(tree: Any) -> Any:
    """The same tree with what each factory builds in its place."""
    if isinstance(tree, dict):
        return {key: built(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [built(value) for value in tree]
    return tree.build() if isinstance(tree, ShardedTensorFactory) else tree


def asked_built(asked: Any) -> Any:
    """What asked_of() gives, with what a load asks for of each factory's in its place.

    Common values that a factory builds are not asked for either. Slices that hold nothing are: its
    merge_fn may count on them.
    """
    if isinstance(asked, dict):
        return {key: asked_built(value) for key, value in asked.items()}
    if isinstance(asked, list):
        return [asked_built(value) for value in asked]
    if not isinstance(asked, ShardedTensorFactory):
        return asked
    parts = asked_of(asked.build(), keep_empty=True)
    return {} if parts is _LEFT_OUT else parts


class _Taking:
    """The result of a load: factories merged, and unexpected keys left out as in Megatron-Core.

    Attributes:
        unexpected: keys of this rank's entities that the checkpoint doesn't hold.
    """

    def __init__(self, kept: set[str]) -> None:
        self._kept = kept
        self.unexpected: set[str] = set()

    def take(self, asked: Any, made: Any, loaded: Any, path: tuple[Any, ...] = ()) -> Any:
        """What stands in a place of the result.

        Args:
            asked: what asked_of() has there; `made`: what built() has there.
            loaded: what the engine gave for it.
            path: of the place.
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
        if isinstance(item, _entities.ShardedObject):
            return self._is_unexpected(item.unique_key, item.key)
        if isinstance(item, _entities.ShardedTensor):
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
                value = self.take(asked[key], made[key], value, (*path, key))
            if value is not _LEFT_OUT:
                result[key] = value
        return result if result or not loaded or not path else _LEFT_OUT

    def _list(self, asked: Any, made: Any, loaded: Any, path: tuple[Any, ...]) -> Any:
        places = list(range(len(asked)))
        if len(asked) != len(loaded):  # the common elements are the checkpoint's, in the others
            places = [place for place in places if _holds(asked[place], _is_entity)]
        result = [
            self.take(asked[place], made[place], value, (*path, place))
            for place, value in zip(places, loaded, strict=True)
        ]
        return [value for value in result if value is not _LEFT_OUT] or (
            _LEFT_OUT if loaded else []
        )


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, (dict, list)):
        values = tree.values() if isinstance(tree, dict) else tree
        return [leaf for value in values for leaf in _leaves(value)]
    return [tree]


class Asked(Prepared):
    """A template of a load.

    Args:
        sharded_state_dict: the caller's; it stays as it is.
        check: called first; what it raises is this rank's failure.
        judge: gets missing and unexpected keys, and may raise.

    Attributes:
        unexpected: set by the load: keys that this rank asked for, and the checkpoint lacks.
        missing: set by the load: stored keys that no rank asked for, where that was to be reported.
    """

    harmless = HARMLESS
    objects_by_grid = True
    log_report = False  # what is to be said of keys, the strict modes say

    def __init__(
        self,
        sharded_state_dict: ShardedStateDict,
        check: Callable[[], None] = lambda: None,
        judge: Callable[[set[str], set[str]], None] = lambda missing, unexpected: None,
    ) -> None:
        self._given = sharded_state_dict
        self._check = check
        self._judge = judge
        self._asked: Any = {}
        self._made: Any = {}
        self.missing: set[str] = set()
        self.unexpected: set[str] = set()

    def make(self) -> Mapping[Any, Any]:
        """The entities, with factories built."""
        self._check()
        asked = asked_of(_expect_dict(self._given))
        self._asked = {} if asked is _LEFT_OUT else asked
        self._made = asked_built(self._asked)
        return self._made  # type: ignore[no-any-return]

    def take(self, loaded: dict[Any, Any], report: LoadReport, kept: set[str]) -> dict[Any, Any]:
        """The result, once what was found of keys has been judged."""
        taking = _Taking(kept)
        result = taking.take(self._asked, self._made, loaded)
        self.missing, self.unexpected = set(report.not_requested), taking.unexpected
        self._judge(self.missing, self.unexpected)
        return result  # type: ignore[no-any-return]


def engine_load(asked: Asked, checkpoint_dir: Any, **options: Any) -> StateDict:
    """Loads a template by the engine, with keywords of `tilestone.load`."""
    return _api.load(cast("Any", asked), literal(checkpoint_dir), **options)


def load_sharded(sharded_state_dict: ShardedStateDict, checkpoint_dir: Any) -> StateDict:
    """Loads entities and nothing else; dtypes are converted."""
    asked = Asked(sharded_state_dict)
    return engine_load(asked, checkpoint_dir, sharded_only=True, cast=True)


def without_local_copies(tree: Any) -> Any:
    """The tree without a second replica of a shard on this rank; the same tree if there is none."""
    leaves = _leaves(tree)
    copies = LocalCopies(leaves)
    if not any([copies.take(leaf) for leaf in leaves]):
        return tree
    return without_copies(tree, LocalCopies(leaves).take)


class Given(Prepared):
    """The state of a save.

    Args:
        sharded_state_dict: the caller's; it stays as it is.
        checkpoint_dir: where it goes.
        check: called first; what it raises is this rank's failure.
        group: the ranks that save; None: all.
        preprocess: of a copy of the common state, makes what is compared between ranks.
        replaces: whether a checkpoint that stands there may be replaced.
    """

    harmless = HARMLESS

    def __init__(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: Any,
        check: Callable[[], None] = lambda: None,
        group: Any = None,
        preprocess: Callable[[CommonStateDict], StateDict] | None = None,
        replaces: bool = True,
    ) -> None:
        self._given = sharded_state_dict
        self._replaces = replaces
        self._directory = checkpoint_dir
        self._check = check
        self._group = group
        self._preprocess = preprocess
        self._compared: Any = None
        self._replaced = ""

    def make(self) -> Mapping[Any, Any]:
        """The state, once rank 0 has looked what it replaces."""
        self._check()
        _expect_dict(self._given)
        if self._replaces and _ranks.rank(self._group) == 0:
            self._replaced = replaced_by(self._directory)
        return without_local_copies(self._given)  # type: ignore[no-any-return]

    def replicate_group(self, given: Any) -> Any:
        """The group that was given, or the model-parallel one of Megatron's parallel_state."""
        return model_parallel_group(given)

    def compared_common(self) -> Mapping[Any, Any] | None:
        """What preprocess makes of the common state, in dicts and lists of its own."""
        if self._preprocess is None:
            return None
        self._compared = self._preprocess(self._common())
        return cast("Mapping[Any, Any]", self._compared)

    def log_replaced(self) -> None:
        """Logs, on rank 0, what the save has replaced: not before, since it may still be refused."""
        if self._replaced:
            logger.warning(self._replaced)

    def log_differences(self) -> None:
        """Logs on each rank what of its common state is not rank 0's. Every rank calls."""
        compared = self._common() if self._preprocess is None else self._compared
        _validate_common_state_dict(compared, self._group)

    def _common(self) -> Any:
        return extract_matching_values(self._given, _is_common)[0]


def replaced_by(checkpoint_dir: Any) -> str:
    """What a save to a directory replaces, as a warning; empty where that is nothing."""
    try:
        names = sorted(os.listdir(os.fspath(checkpoint_dir)))
    except (OSError, TypeError):
        return ""  # there is nothing, or the save says what is wrong
    if not names:
        return ""
    if CONFIG_FNAME in names:
        return f"Overwriting the checkpoint that stands at {checkpoint_dir}"
    return (
        f"Overwriting old incomplete / corrupted checkpoint at {checkpoint_dir}: it holds "
        f"{', '.join(names[:5])} and no {CONFIG_FNAME}"
    )


def engine_save(given: Given, checkpoint_dir: Any, **options: Any) -> None:
    """Saves a state by the engine, with keywords of `tilestone.save`."""
    path = literal(checkpoint_dir)
    options = {"overwrite": True, **options}
    result = _api.save(cast("Any", given), path, dialect="megatron", **options)
    given.log_replaced()
    if result.common_differs:
        given.log_differences()
