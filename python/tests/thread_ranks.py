"""Ranks as threads of one process. Only the package of the tests has them (tools/steps.sh)."""

from __future__ import annotations

from collections.abc import Callable

from tilestone import _core

#: Runs body(comm) on n threads, one per rank, and returns when all have ended. If a rank raises, the
#: ranks that wait for it get RankFailedError. If several raise, the original error is raised.
run_ranks: Callable[[int, Callable[[_core.Communicator], object]], None]
run_ranks = _core._run_ranks  # type: ignore[attr-defined]
