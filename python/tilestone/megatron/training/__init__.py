"""Checkpoints of training runs, like those of Megatron's `training/checkpointing.py`.

The directories, the tracker file and the state are the same as Megatron's, so either side can
resume the other's runs. The program's arguments and all process groups are passed as arguments;
there is no global state.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from tilestone.megatron.training import _arguments
from tilestone.megatron.training._choice import Found, Places, find_iteration
from tilestone.megatron.training.async_utils import (
    is_empty_async_queue,
    maybe_finalize_async_save,
)
from tilestone.megatron.training.checkpointing import (
    build_sharded_state_dict_metadata,
    generate_state_dict,
    get_checkpoint_name,
    get_checkpoint_tracker_filename,
    get_rng_state,
    load_checkpoint,
    read_metadata,
    restore_rng_state,
    save_checkpoint,
    unwrap_model,
)

#: Every attribute of `args` that is read, with its default if `args` does not have it.
ARGUMENTS: Mapping[str, Any] = types.MappingProxyType(_arguments.DEFAULTS)

__all__ = [
    "ARGUMENTS",
    "Found",
    "Places",
    "build_sharded_state_dict_metadata",
    "find_iteration",
    "generate_state_dict",
    "get_checkpoint_name",
    "get_checkpoint_tracker_filename",
    "get_rng_state",
    "is_empty_async_queue",
    "load_checkpoint",
    "maybe_finalize_async_save",
    "read_metadata",
    "restore_rng_state",
    "save_checkpoint",
    "unwrap_model",
]
