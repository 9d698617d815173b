"""Tilestone's strategies in the place of Megatron-Core's own, for a whole process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from tilestone._errors import InvalidArgumentError
from tilestone.megatron._installed import find_base, find_module
from tilestone.megatron._stock_strategies import BACKENDS, find_class, lock
from tilestone.megatron.strategies.torch import warn_of_hint

_log = logging.getLogger("tilestone")


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
    with lock:
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
    with lock:
        if _switched is not None:
            _switched.undo()
            _switched = None


def _own(option: str, given: Any, name: str) -> Any:
    """The strategy that was given, or one without options."""
    kind = find_class(name)
    if given is None:
        return kind()
    if not isinstance(given, kind):
        raise InvalidArgumentError(f"{option} is a {name} or None, not {given!r}")
    return given


def _switch(switched: _Switched) -> None:
    strategies = find_module("strategies.torch")
    base = find_base()
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
        *((action.LOAD_SHARDED, backend, "load") for backend in BACKENDS),
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
            warn_of_hint(self.separation_hint)
        return getattr(getattr(switched, ours), name)(*args, **keywords)

    diverted.__name__ = name
    diverted.__qualname__ = f"{kind.__qualname__}.{name}"
    switched.patch(kind, name, diverted)

