"""Stock DCP's planning steps for a job of many ranks, in this single process.

    dcp_planning.py TP DP PP TENSORS

Half of a rank's tensors are parameters, sharded by TP and replicated over DP. The other half is
optimizer state, sharded by TP and DP. Every rank's plan is made here item by item, and rank 0's is
compared with the result of `create_local_plan`. Then `create_global_plan` over all plans is timed.
Prints JSON.
"""

from __future__ import annotations

import json
import pickle
import resource
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

ROWS, COLUMNS = 8192, 1024


def _names(tp: int, dp: int, pp: int, tensors: int, rank: int):
    """Name, shape, offset and size of a rank's tensors. In the rank order tp varies fastest."""
    t, d, p = rank % tp, rank // tp % dp, rank // tp // dp
    for i in range(tensors // 2):
        name = f"decoder.layers.{p}.{i}"
        rows = ROWS // tp
        yield f"{name}.weight", (t * rows, 0), (rows, COLUMNS)
        part = rows // dp
        yield f"optimizer.exp_avg.{name}", ((d * tp + t) * part, 0), (part, COLUMNS)


def _plan(tp: int, dp: int, pp: int, tensors: int, rank: int) -> SavePlan:
    size = torch.Size((ROWS, COLUMNS))
    items = []
    for name, offset, shape in _names(tp, dp, pp, tensors, rank):
        chunk = ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(shape))
        data = TensorWriteData(chunk=chunk, size=size,
                               properties=TensorProperties(dtype=torch.float32))
        index = MetadataIndex(name, torch.Size(offset))
        items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items)


def _local(tp: int, dp: int, pp: int, tensors: int) -> tuple[SavePlan, float]:
    """Rank 0's plan by create_local_plan over DTensors of a fake process group, and its seconds."""
    dist.init_process_group("fake", rank=0, world_size=tp * dp * pp, store=FakeStore())
    mesh = dist.init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    both = mesh["dp", "tp"]
    state = {}
    for name, _, shape in _names(tp, dp, pp, tensors, 0):
        local = torch.empty(shape, device="meta")
        by_dp = Shard(0) if name.startswith("optimizer") else Replicate()
        placements = [by_dp, Shard(0)]
        state[name] = DTensor.from_local(local, both, placements, run_check=False,
                                         shape=torch.Size((ROWS, COLUMNS)), stride=(COLUMNS, 1))
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    begin = time.process_time()
    plan = planner.create_local_plan()
    seconds = time.process_time() - begin
    dist.destroy_process_group()
    return plan, seconds


def main() -> None:
    tp, dp, pp, tensors = map(int, sys.argv[1:])
    ranks = tp * dp * pp
    own, local_seconds = _local(tp, dp, pp, tensors)
    pickled = [pickle.dumps(_plan(tp, dp, pp, tensors, rank)) for rank in range(ranks)]
    if [item.index for item in own.items] != [
        item.index for item in pickle.loads(pickled[0]).items
    ]:
        raise SystemExit("dcp_planning: the plan made here differs from that of create_local_plan")
    begin = time.process_time()
    plans = [pickle.loads(data) for data in pickled]
    unpickle_seconds = time.process_time() - begin
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({}, is_coordinator=True)
    begin = time.process_time()
    final, _ = planner.create_global_plan(plans)
    global_seconds = time.process_time() - begin
    begin = time.process_time()
    scattered = sum(len(pickle.dumps(plan)) for plan in final)
    scatter_seconds = time.process_time() - begin
    print(json.dumps({"ranks": ranks, "local_seconds": local_seconds,
                      "unpickle_seconds": unpickle_seconds, "global_seconds": global_seconds,
                      "scatter_seconds": scatter_seconds,
                      "gathered_bytes": sum(map(len, pickled)), "scattered_bytes": scattered,
                      "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}))


if __name__ == "__main__":
    main()
