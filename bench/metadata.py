"""`.metadata` of a large job: reading it, writing it, and opening it on the command line.

The file is pickled from torch's own classes in this process. Its data files are sparse: they have
the right sizes and no content.
"""

from __future__ import annotations

import gc
import pickle
import time
from pathlib import Path
from statistics import median

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import programs
from measure import Case, Plan, Table

ROWS, COLUMNS = 4, 1024  # per shard
ROUNDS = 3


def make(ranks: int, tensors: int) -> tuple[Metadata, int]:
    """The metadata of row-sharded tensors, with one file per rank like DCP's, and a file's size."""
    item = ROWS * COLUMNS * 4 + 1024  # bytes, with the archive around the tensor
    state: dict = {}
    storage: dict = {}
    properties = TensorProperties(dtype=torch.float32)
    for t in range(tensors):
        fqn = f"model.decoder.layers.{t // 10}.mlp.linear_{t % 10}.weight"
        # A separate object for each offset, as after a gather: pickle writes a shared object once.
        offsets = [[torch.Size((rank * ROWS, 0)) for rank in range(ranks)] for _ in range(2)]
        state[fqn] = TensorStorageMetadata(
            properties=properties, size=torch.Size((ranks * ROWS, COLUMNS)),
            chunks=[ChunkStorageMetadata(offsets=offset, sizes=torch.Size((ROWS, COLUMNS)))
                    for offset in offsets[0]])
        for rank, offset in enumerate(offsets[1]):
            storage[MetadataIndex(fqn, offset, rank)] = _StorageInfo(
                f"__{rank}_0.distcp", t * item, item)
    state["step"] = BytesStorageMetadata()
    storage[MetadataIndex("step")] = _StorageInfo("__0_0.distcp", tensors * item, 512)
    planner = {fqn: (fqn,) for fqn in state}
    return Metadata(state, planner, storage), (tensors + 1) * item


def _timed(work) -> tuple[float, object]:
    gc.collect()
    begin = time.process_time()
    result = work()
    return time.process_time() - begin, result


def _row(what: str, ours: float, theirs: float) -> list[str]:
    return [what, f"{ours:.3f}", f"{theirs:.2f}", f"{theirs / ours:.1f}"]


def metadata(case: Case, plan: Plan) -> Case:
    ranks = max(16, int(1024 * min(1.0, plan.scale)))
    folder = plan.root / "metadata"
    folder.mkdir(parents=True)
    made, file_bytes = make(ranks, 500)
    for rank in range(ranks):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(file_bytes)
    file = folder / ".metadata"
    dump, data = _timed(lambda: pickle.dumps(made))
    file.write_bytes(data)
    del made
    written = plan.root / "metadata-written"
    loads, runs = [], []
    for _ in range(ROUNDS):
        loaded = None
        seconds, loaded = _timed(lambda: pickle.loads(data))
        loads.append(seconds)
        runs += programs.json_lines(programs.BIN / "metadata_scale", file, written)
    ours = runs[-1]
    parse, write = (median(run[what] for run in runs)
                    for what in ("parse_seconds", "write_seconds"))
    again = pickle.loads(written.read_bytes())
    if again.state_dict_metadata != loaded.state_dict_metadata:
        raise RuntimeError("the metadata that Tilestone wrote differs from the one that it read")
    del again, loaded
    case.figures["parse, pickle ÷ tilestone"] = median(loads) / parse
    case.tables.append(Table(
        f"`.metadata` of {len(data) / 1e6:.0f} MB: {ours['tensors']} tensors in "
        f"{ours['shards']:,} shards",
        f"CPU time, in memory; medians of {ROUNDS} alternating runs (writing by pickle: one run). "
        "torch unpickles the file that Tilestone writes to the same metadata.",
        ["what", "tilestone s", "pickle s", "pickle ÷ tilestone"],
        [_row("read", parse, median(loads)), _row("written", write, dump)]))
    case.tables.append(_command_line(folder, len(data)))
    return case


def _command_line(folder: Path, size: int) -> Table:
    table = Table("the command line on it", "Wall time and peak memory of the whole process.",
                  ["command", "s", "peak MiB", "peak ÷ file", "lines printed"])
    key = "model.decoder.layers.7.mlp.linear_3.weight"
    for words in (["ls"], ["ls", "--json"], ["inspect"], ["inspect", "--json"], ["inspect", key],
                  ["inspect", key, "--json"]):
        command = [words[0], folder, *words[1:]]
        found = programs.run(programs.BIN / "tilestone", *command)
        table.rows.append([
            f"tilestone {' '.join([words[0], 'DIR', *words[1:]])}", f"{found.seconds:.2f}",
            f"{found.peak_bytes / 2**20:.0f}", f"{found.peak_bytes / size:.1f}",
            f"{found.output.count(chr(10)):,}"])
    return table
