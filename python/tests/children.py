"""Forked children of tests."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any


def in_child(work: Callable[[], Any], seconds: float = 60) -> int:
    """Runs `work` in a forked child. Returns the exit status: 0 if it returned, 99 if it hung.

    A child that hangs prints where.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            # Garbage of earlier tests may be torch's process groups, whose destructors crash or hang
            # in a child, which does not have their threads.
            gc.freeze()
            faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
            work()
            status = 0
        except BaseException as error:
            print("child:", repr(error), file=sys.stderr)
        finally:
            os._exit(status)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGUSR2)
    time.sleep(1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 99
