"""Times the distribution of replicated shards by Megatron-Core and by Tilestone. Prints JSON.

    megatron_distribution.py RANKS SHARDS

Every rank holds every shard, as in a data-parallel group. Checks that both choose the same ranks.
"""

from __future__ import annotations

import json
import sys
import time
import warnings


def _timed(distribute, holders: dict, sizes: dict, ranks: int) -> tuple[dict, float]:
    begin = time.process_time()
    found = distribute(holders, sizes, ranks, set())
    return found, time.process_time() - begin


def main() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.dist_checkpointing.exchange_utils import (
            distribute_shards_to_ranks as stock,
        )
    from tilestone.megatron.exchange_utils import distribute_shards_to_ranks as ours

    ranks, shards = map(int, sys.argv[1:])
    ids = [(f"layers.{i}.weight", (0, 0), None) for i in range(shards)]
    sizes = {shard: 1 << 20 | (i * 7919) % (1 << 20) for i, shard in enumerate(ids)}
    holders = {shard: list(range(ranks)) for shard in ids}
    expected, stock_seconds = _timed(stock, holders, sizes, ranks)
    found, seconds = _timed(ours, holders, sizes, ranks)
    if found != expected:
        raise SystemExit("megatron_distribution: the two distributions differ")
    print(json.dumps({"stock_seconds": stock_seconds, "seconds": seconds}))


if __name__ == "__main__":
    main()
