"""What ranks.py imports once, in the process that ranks are forked from."""

from __future__ import annotations

import gc
import os
import warnings

import megatron_models  # also finds the module on_cpu

# What is missing here, each rank imports again: pytest takes 0.15 seconds.
megatron_models.on_cpu.import_megatron()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt.gpt_layer_specs
    import pytest  # noqa: F401
    import stock_queue
    import torch.distributed.checkpoint._fsspec_filesystem
    import torch.distributed.tensor  # noqa: F401
    from megatron.core.dist_checkpointing.strategies import filesystem_async

import tilestone.megatron.training  # noqa: F401

del os.environ["PYTHONPATH"]  # set by ranks.py, and not for processes that the ranks start
filesystem_async._get_write_results_queue = stock_queue.results_queue

# Collections in the ranks skip the objects of these modules. Stock collects before each save.
gc.collect()
gc.freeze()
