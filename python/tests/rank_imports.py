"""What ranks.py imports once, in the process that ranks are forked from."""

from __future__ import annotations

import gc
import os
import warnings

import stock_queue

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel
    import torch
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.tensor  # noqa: F401
    from megatron.core.dist_checkpointing.strategies import filesystem_async

import tilestone  # noqa: F401

del os.environ["PYTHONPATH"]  # set by ranks.py, and not for processes that the ranks start
filesystem_async._get_write_results_queue = stock_queue.results_queue

# Collections in the ranks skip the objects of these modules. Stock collects before each save.
gc.collect()
gc.freeze()
