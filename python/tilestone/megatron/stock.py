"""Tilestone inside stock Megatron-Core: strategies for its own `dist_checkpointing`.

    from tilestone.megatron.stock import TilestoneLoadStrategy, TilestoneSaveStrategy

    dist_checkpointing.save(state, path, sharded_strategy=TilestoneSaveStrategy())
    dist_checkpointing.load(state, path, sharded_strategy=TilestoneLoadStrategy())

or, for a program that has no option for a strategy, once at its start

    tilestone.megatron.stock.enable()

Megatron-Core is imported when one of these is first used; nothing else in the package imports it.
Versions 0.13 to 0.19 are supported.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

from tilestone._errors import InvalidArgumentError
from tilestone.megatron._stock_strategies import (
    BACKENDS,
    NAMES,
    find_base,
    find_class,
    find_module,
    lock,
)

_log = logging.getLogger("tilestone")

__all__ = ["TilestoneLoadStrategy", "TilestoneSaveStrategy", "disable", "enable"]


def __getattr__(name: str) -> Any:
    """Returns a strategy's class, which is made on demand from Megatron-Core's base class."""
    if name in NAMES:
        return find_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Switched:
    """The changes that are in effect between enable() and disable()."""

    def __init__(self) -> None:
        self.save: Any = None
        self.load: Any = None
        self._undo: list[Callable[[], None]] = []

    def patch(self, owner: Any, name: str, made: Any) -> None:
        """Sets an attribute of a module or class, and records how to undo that."""
        if name in vars(owner):
            before = vars(owner)[name]
            self._undo.append(lambda: setattr(owner, name, before))
        else:
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, made)

    def note_registry(self, registry: dict[tuple[str, int], Any], key: tuple[str, int]) -> None:
        """Records what was registered, so that disable() registers it again."""
        if key in registry:
            before = registry[key]
            self._undo.append(lambda: registry.__setitem__(key, before))
        else:
            self._undo.append(lambda: registry.pop(key, None))

    def undo(self) -> None:
        """Undoes all changes, the last one first."""
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
    """Makes stock Megatron-Core use Tilestone's strategies in this process.

    This is for programs that have no option for a strategy. Call it once on every rank, before the
    program saves or loads. Until disable() it changes two things in Megatron-Core: the default
    strategies that it registers (up to 0.18), for torch_dist and for loading zarr; and the methods
    of its classes TorchDistSaveShardedStrategy and TorchDistLoadShardedStrategy, for programs that
    create these by name: their instances then save and load with Tilestone's strategies. Other
    programs' subclasses of the two are not changed, and neither are strategies that a program
    passes itself.

    A further call only changes which strategies are used. The first call is logged (INFO). Safe to
    call from several threads.

    Args:
        save_strategy: a TilestoneSaveStrategy with options; None: one without options.
        load_strategy: a TilestoneLoadStrategy, likewise.

    Raises:
        UnsupportedError: Megatron-Core can't be imported, or its version is not supported.
        InvalidArgumentError: a strategy is not one of Tilestone's.
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
    """Undoes all changes of enable(); does nothing if there are none.

    Safe to call from several threads. Saves and loads that are running end as they began.
    """
    global _switched
    with lock:
        if _switched is not None:
            _switched.undo()
            _switched = None


def _own(option: str, given: Any, name: str) -> Any:
    """Returns the given strategy, or one without options."""
    kind = find_class(name)
    if given is None:
        return kind()
    if not isinstance(given, kind):
        raise InvalidArgumentError(f"{option} must be a {name} or None, not {given!r}")
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
    """Replaces the function by which Megatron-Core registers its strategies before each use."""
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
    """Makes instances of exactly this class call our strategy's method instead of their own."""
    original = getattr(kind, name, None)

    def diverted(self: Any, *args: Any, **keywords: Any) -> Any:
        if type(self) is not kind and original is not None:
            return original(self, *args, **keywords)
        strategy = getattr(switched, ours)
        if getattr(self, "separation_hint", None):
            strategy = copy.copy(strategy)
            strategy.separation_hint = self.separation_hint
        return getattr(strategy, name)(*args, **keywords)

    diverted.__name__ = name
    diverted.__qualname__ = f"{kind.__qualname__}.{name}"
    switched.patch(kind, name, diverted)
