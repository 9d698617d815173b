"""The queue of stock Megatron-Core's writers, in a fork of the process that saves.

Stock starts a new process for it, which imports torch and Megatron-Core again, once in each rank.
That takes longer than most tests.
"""

from __future__ import annotations

import functools
import multiprocessing
from multiprocessing.managers import SyncManager
from typing import Any


@functools.cache
def results_queue() -> Any:
    manager = SyncManager(ctx=multiprocessing.get_context("fork"))
    manager.start()
    return manager.Queue()
