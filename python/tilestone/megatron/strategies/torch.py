"""The backend "torch_dist": PyTorch's distributed checkpoints, saved and loaded by the engine."""

from __future__ import annotations

import functools
import logging
from typing import Any

from tilestone._option_values import LocalCopies
from tilestone.megatron.strategies._engine import EngineLoadStrategy, EngineSaveStrategy

_log = logging.getLogger("tilestone")


class TorchDistSaveShardedStrategy(EngineSaveStrategy):
    """Saves in PyTorch's format.

    Args:
        backend: name of the format: "torch_dist".
        version: version of the format: 1.
        keep_only_main_replica: ignored: one copy of each part is written, by a rank that the plan
            chooses.
        thread_count: ignored: each rank writes one file, with as many threads as are useful.
        cached_metadata: ignored: each save is planned anew, which takes milliseconds. So a changed
            structure is never saved by an old plan.
        separation_hint: ignored with a warning: tensors whose keys begin with it share data files
            with others. `remove_sharded_tensors` finds them by their keys.
        cpu_shm_mode: ignored: the copies of a save in the background stay in this process.
        copies: local copies, as for `tilestone.megatron.save`, whose own argument takes precedence.
        tp_replica_names: also list, for each tensor KEY that tensor-parallel ranks hold replicas of
            (replica ids of three numbers, the second not 0), the names KEY.__tp_replica_0, _1, ...
            in the index, one for each replica, for programs that ask for these names. They refer to
            the same bytes, and Tilestone itself knows only KEY. Must be the same on every rank.
    """

    def __init__(
        self,
        backend: str = "torch_dist",
        version: int = 1,
        keep_only_main_replica: bool = True,
        thread_count: int = 2,
        cached_metadata: bool = False,
        separation_hint: str | None = None,
        cpu_shm_mode: bool = False,
        *,
        copies: LocalCopies | None = None,
        tp_replica_names: bool = False,
    ) -> None:
        super().__init__(backend, version)
        self.copies = copies
        self.tp_replica_names = tp_replica_names
        self.keep_only_main_replica = keep_only_main_replica
        self.thread_count = thread_count
        self.use_cached_ckpt_structure = cached_metadata
        self.separation_hint = separation_hint
        if separation_hint is not None:
            warn_of_hint(separation_hint)
        self.cached_global_metadata: Any = None  # Megatron's programs set it; nothing reads it


class TorchDistLoadShardedStrategy(EngineLoadStrategy):
    """Loads PyTorch's format, as every version of Megatron-Core since 0.9 has written it."""

    backend = "torch_dist"

    def __init__(self) -> None:
        self.cached_global_metadata: Any = None  # Megatron's programs read it; nothing sets it


@functools.cache
def warn_of_hint(hint: str) -> None:
    """Logs that a separation_hint is ignored, once per process for each hint."""
    _log.warning(
        "separation_hint=%r is ignored: tensors whose keys begin with it share data files with "
        "others (remove_sharded_tensors finds them by their keys)",
        hint,
    )
