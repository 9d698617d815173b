"""The backend "torch_dist": PyTorch's distributed checkpoints, saved and loaded by the engine."""

from __future__ import annotations

from typing import Any

from tilestone._options.values import LocalCopies
from tilestone.megatron.strategies._engine import EngineLoadStrategy, EngineSaveStrategy


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
        separation_hint: tensors and objects whose keys begin with it get data files of their own,
            whose names begin with it too, so that they can be copied or left out apart from the
            rest. At most 128 bytes that can begin a file's name; None: no such files.
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
        self.cached_global_metadata: Any = None  # Megatron's programs set it; nothing reads it


class TorchDistLoadShardedStrategy(EngineLoadStrategy):
    """Loads PyTorch's format, as every version of Megatron-Core since 0.9 has written it."""

    backend = "torch_dist"

    def __init__(self) -> None:
        self.cached_global_metadata: Any = None  # Megatron's programs read it; nothing sets it

