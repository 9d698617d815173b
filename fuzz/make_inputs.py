"""make_inputs.py: writes fuzz/corpus/checkpoint and the hostile files of fuzz/regressions again.

Run it with the environment's Python after installing the package. Inputs found by fuzzing are in
fuzz/regressions too, under other names (crash-*, timeout-*, oom-*). They are kept.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import struct
import sys
import tempfile

import numpy
from hostile_archives import RUN, Files, pickles, tensors, zips

FUZZ = pathlib.Path(__file__).resolve().parent
sys.path.append(str(FUZZ.parent / "python" / "tests"))
GOLDEN = FUZZ.parent / "tests" / "golden"


def files_of(folder: pathlib.Path) -> Files:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def packed(files: Files) -> bytes:
    """The files as one input in the format of checkpoint_fuzz.cc."""
    out = b""
    for name, content in files.items():
        encoded = name.encode()
        out += struct.pack("<B", len(encoded)) + encoded
        out += struct.pack("<I", len(content)) + content
    return out


def put(kind: str, target: str, name: str, content: bytes) -> None:
    path = FUZZ / kind / target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


# ---- Small real checkpoints ----


def ours() -> dict[str, Files]:
    """Checkpoints written by Tilestone: by one rank, by two ranks, and one with leftovers."""
    import thread_ranks
    import tilestone

    def save_two(path: str) -> None:
        def rank(comm: tilestone.Communicator) -> None:
            mine = numpy.arange(4, dtype="float32") + comm.rank
            w = tilestone.ShardedTensor.from_rank_offsets("w", mine, (0, comm.rank, comm.size))
            state = {"w": w, "plain": numpy.arange(3), "scalar": numpy.float64(3), "step": 7}
            tilestone.save(state, path, group=comm)

        thread_ranks.run_ranks(2, rank)

    found: dict[str, Files] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tilestone.save({"w": numpy.arange(6.0)}, folder / "one", group=tilestone.solo())
        nested = {"a": {"b": [1, "two", None, 2**70]}, "empty": numpy.zeros((0, 3))}
        tilestone.save(nested, folder / "nested", group=tilestone.solo())
        save_two(str(folder / "two"))
        for kind in ("one", "nested", "two"):
            found[f"tilestone_{kind}"] = files_of(folder / kind)
    dead = "01234567-89ab-4cde-8f01-23456789abcd"
    left = {f"{dead}__0_0.distcp": b"half", f".tilestone/{dead}.metadata.tmp": b"\x80"}
    found["tilestone_leftovers"] = found["tilestone_one"] | left
    found["tilestone_no_manifest"] = {
        path: content
        for path, content in found["tilestone_one"].items()
        if not path.endswith(".manifest")
    }
    return found


def stock() -> dict[str, Files]:
    """Small checkpoints written by the installed PyTorch."""
    import torch
    import torch.distributed.checkpoint as dcp

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        state = {"w": torch.arange(4, dtype=torch.bfloat16), "n": {"t": torch.tensor(1.5)}, "s": 3}
        dcp.save(state, checkpoint_id=folder / "stock", no_dist=True)
        return {f"torch-{torch.__version__.split('+')[0]}": files_of(folder / "stock")}


def torch_checkpointing() -> Files:
    """A small folder written by the installed package torch_checkpointing, with a DTensor."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    with tempfile.TemporaryDirectory() as name:
        store = f"file://{name}/store"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        config = CheckpointManager.Config.with_sync_save()
        config.default = ItemSpec(resharder=DefaultResharder())
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
        w = distribute_tensor(torch.arange(6.0).view(3, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
        state = {"model": {"w": w, "b": torch.ones(2)}, "step": 3}
        config.build().save(f"{name}/made", state)
        dist.destroy_process_group()
        return files_of(pathlib.Path(name) / "made")


def torch_checkpointing_files() -> Files:
    """Indexes of such a folder with numbers and types that no writer leaves."""
    import pickle

    def index(**changes: object) -> bytes:
        mesh = {"mesh_shape": (1,), "mesh_data": (0,)}
        data = {"global_shape": [4], "mesh_spec": mesh, "placements": [{"type": "Replicate"}]}
        data |= changes
        described = {"type": "DTensorShardingMetadata", "data": data}
        tensors = {'["w"]': [{"sharding_metadata": described, "ranks": (0,)}]}
        item = {"nested_path_to_metadata": tensors, "rank_to_layout_info": {0: None}}
        return pickle.dumps({"metadata": {"model": item}, "version": "2.0"}, protocol=2)

    mesh = {"mesh_shape": (2**20, 2**20, 2**30), "mesh_data": (0,)}
    return {
        "index_of_a_huge_mesh": index(mesh_spec=mesh),
        "index_of_a_huge_tensor": index(global_shape=[2**62, 2**62]),
        "index_of_minus_elements": index(global_shape=[-4]),
        "index_of_a_shard_of_dim_9": index(placements=[{"type": "Shard", "dim": 9}]),
        "index_of_another_placement": index(placements=[{"type": "Partial"}]),
        "index_that_runs_a_program": RUN,
    }


GOLDENS = (
    "torch-1.13.1/dcp-w1-single",
    "torch-2.6.0/dcp-w1",
    "torch-2.14.1/dcp-w1-ranklocal",
    "megatron-core-0.9.0/mc-w1",
    "megatron-core-0.19.2/hint-w1",
    "megatron-core-0.13.1/zarr-w2",
)


def make_corpus() -> None:
    checkpoints = ours() | stock()
    for name in GOLDENS:
        checkpoints[name.replace("/", "_")] = files_of(GOLDEN / name)
    made = torch_checkpointing()
    checkpoints["torch_checkpointing"] = made
    checkpoints["torch_checkpointing_plain"] = {
        name: content for name, content in made.items() if name != "metadata.pkl"
    }
    for name in ("metadata.pkl", "model_0.pt"):
        put("corpus", "torch_checkpointing", name, made[name])
    for name, files in checkpoints.items():
        put("corpus", "checkpoint", name, packed(files))
    for name, content in zarr_corpus().items():
        put("corpus", "zarr_array", name, content)
    for name, content in safetensors_corpus().items():
        put("corpus", "safetensors", name, content)
    for name, content in delta_corpus().items():
        put("corpus", "delta", name, content)
    for name, content in manifest_corpus().items():
        put("corpus", "manifest", name, content)
    for name, content in left_files().items():
        put("corpus", "left_files", name, content)


# ---- Hostile metadata, and checkpoints that contain it ----


def replaced(content: bytes, changes: list[tuple[bytes, bytes]]) -> bytes:
    for old, new in changes:
        assert old in content and len(old) == len(new), old
        content = content.replace(old, new)
    return content


def metadatas(good: Files) -> tuple[Files, Files]:
    """Hostile `.metadata` made from a valid one of stock PyTorch: alone, and in a checkpoint."""
    metadata = good[".metadata"]
    data = next(name for name in good if name.endswith(".distcp")).encode()
    assert data == b"__0_0.distcp"
    hostile = {
        "runs_a_program": RUN,
        "name_that_climbs": replaced(metadata, [(data, b"../../passwd")]),
        "absolute_name": replaced(metadata, [(data, b"/etc/passwd1")]),
        "nul_in_a_name": replaced(metadata, [(data, b"__0_0\x00distcp")]),
        "class_of_a_stranger": replaced(metadata, [(b"_StorageInfo", b"_StorageFoo!")]),
        "other_module": replaced(metadata, [(b"checkpoint.metadata", b"checkpoint.metadatb")]),
        "key_of_another": replaced(metadata, [(b"n.t", b"w.t")]),
        "cut": metadata[:-1],
        "empty": b"",
    }
    lengths = {f"byte_{i}_set": metadata[:i] + b"\xff" + metadata[i + 1 :]
               for i in range(20, len(metadata), 97)}  # fmt: skip
    checkpoints = {name: packed(good | {".metadata": bad}) for name, bad in hostile.items()}
    checkpoints |= {
        "data_file_missing": packed({".metadata": metadata}),
        "data_file_empty": packed(good | {data.decode(): b""}),
        "data_file_of_zeros": packed(good | {data.decode(): bytes(len(good[data.decode()]))}),
        "metadata_alone_in_a_folder": packed({"sub/.metadata": metadata}),
        "two_modes": packed(good | {"__0.metadata": metadata}),
        "note_that_lies": packed(good | {".tilestone/replaced": b"\x00\xff\xff\xff\xff\x0f"}),
        "second_name_of_a_second_name": packed(second_names()),
        "archive_that_lies": b"\x09.metadata\xff\xff\xff\xff",
    }
    return hostile | lengths, checkpoints


def second_names() -> Files:
    """In Megatron-Core's dialect: a second name of a replica that has a second name itself."""
    import tilestone.megatron

    keys = ("x", "x.__tp_replica_1", "x.__tp_replica_1.__tp_replica_2")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name, "checkpoint")
        mine = numpy.arange(4, dtype="float32")
        state = {key: tilestone.ShardedTensor.from_rank_offsets(key, mine) for key in keys}
        tilestone.megatron.save(state, folder)
        return files_of(folder)


def manifest_corpus() -> Files:
    """A manifest of two ranks with a table of attributes of a tensor, and one of its receipts.

    And the receipt of a tensor whose blocks have checksums.
    """
    import thread_ranks
    import tilestone

    with tempfile.TemporaryDirectory() as name:
        tilestone.save({"w": numpy.arange(50_000, dtype="float32")}, name, group=tilestone.solo())
        (path,) = pathlib.Path(name, ".tilestone").glob("*.manifest")
        manifest = path.read_bytes()
        (head,) = struct.unpack_from("<Q", manifest, 12)
        with_blocks = manifest[head:]
    with tempfile.TemporaryDirectory() as name:

        def rank(comm: tilestone.Communicator) -> None:
            mine = numpy.arange(4, dtype="float32") + comm.rank
            w = tilestone.ShardedTensor.from_rank_offsets("w", mine, (0, comm.rank, comm.size))
            told = {"w": {"kind": "glu", "order": [0, (None, True)], "by": {"a": 1.5, 3: b"x"}}}
            tilestone.save(
                {"w": w}, name, group=comm, attributes={"a": "b"}, tensor_attributes=told
            )

        thread_ranks.run_ranks(2, rank)
        (path,) = pathlib.Path(name, ".tilestone").glob("*.manifest")
        manifest = path.read_bytes()
    (head,) = struct.unpack_from("<Q", manifest, 12)
    middle = head + (len(manifest) - head) // 2  # the receipts have the same size
    return {
        "table_of_two_ranks": manifest,
        "report": manifest[head:middle],
        "report_with_blocks": with_blocks,
    }


def left_files() -> Files:
    """Files that two of five ranks leave in a save without a communicator.

    These are a group's file, receipts of both dialects, heads and a failure.
    """
    import tilestone
    import tilestone.megatron

    found: Files = {}
    with tempfile.TemporaryDirectory() as name:
        for dialect in ("pytorch", "megatron"):
            folder = pathlib.Path(name, dialect)
            folder.mkdir()
            module = tilestone if dialect == "pytorch" else tilestone.megatron
            for rank in (0, 1, 3):
                mine = numpy.arange(4, dtype="float32") + rank
                w = module.ShardedTensor.from_rank_offsets("w", mine, (0, rank, 5))
                module.save(
                    {"w": w, "step": 7}, folder,
                    by_files=tilestone.ByFiles(rank, 5, "inputs for fuzzing", wait=False),
                )  # fmt: skip
            (head,) = folder.glob(".tilestone/*.attempt")
            try:  # an object that can't be saved
                module.save(
                    {"w": (number for number in ())}, folder,
                    by_files=tilestone.ByFiles(4, 5, "inputs for fuzzing", wait=False),
                )  # fmt: skip
            except tilestone.CheckpointError:
                pass
            for file in [head, *head.with_suffix("").rglob("*")]:
                if file.suffix in (".attempt", ".report") or file.name in ("merged", "failed"):
                    found[f"{dialect}_{file.stem if file != head else 'head'}"] = file.read_bytes()
    return found | {f"{key}_unsealed": content[:-8] for key, content in found.items()}


def manifests() -> Files:
    good = (FUZZ / "corpus" / "manifest" / "two_ranks").read_bytes()
    table = (FUZZ / "corpus" / "manifest" / "table_of_two_ranks").read_bytes()
    most = b"\xff" * 9 + b"\x01"
    return {
        "head_of_2_64_bytes": table[:12] + b"\xff" * 8 + table[20:],
        "head_of_no_bytes": table[:12] + bytes(8) + table[20:],
        "head_of_all_bytes": table[:12] + struct.pack("<Q", len(table)) + table[20:],
        "save_id_of_2_64_bytes": good[:12] + most,
        "world_of_2_64_ranks": good[:15] + most + good[16:],
        "reports_of_2_64_bytes": good[:0x33] + most,
        "version_2": good[:8] + b"\x02" + good[9:],
        "nothing": b"",
    }


# ---- Descriptions of zarr arrays ----

ARRAY = {
    "chunks": "[2, 3]",
    "compressor": "null",
    "dtype": '"<f4"',
    "fill_value": "null",
    "filters": "null",
    "order": '"C"',
    "shape": "[4, 7]",
    "zarr_format": "2",
}


def array(**changed: str) -> bytes:
    """A valid `.zarray` in which some fields are replaced or added."""
    fields = ", ".join(f'"{name}": {value}' for name, value in (ARRAY | changed).items())
    return f"{{{fields}}}".encode()


def zarr_corpus() -> Files:
    stock = GOLDEN / "megatron-core-0.13.1" / "zarr-w2"
    sound = {f"stock_{key}": (stock / key / ".zarray").read_bytes() for key in ("row", "experts.fc2")}
    return sound | {
        "no_dims": array(shape="[]", chunks="[]"),
        "no_elements": array(shape="[0, 5]", chunks="[0, 5]", filters="[]"),
        "fortran": array(order='"F"', dtype='"<c16"'),
        "slashes": array(dimension_separator='"/"', fill_value='"NaN"', dtype='"|b1"'),
        "float8": array(dtype='"float8_e4m3fn"', later='{"a": [1, {}]}'),
    }


def zarr_arrays() -> Files:
    return {
        "nothing": b"",
        "order_twice": array(order='"C", "order": "F"'),
        "deep": array(later="[" * 20_000 + "]" * 20_000),
        "open_lists": b"[" * 100_000,
        "open_objects": b'{"a":' * 50_000,
        "shape_of_2_64_elements": array(shape="[4294967296, 4294967296]"),
        "shape_beyond_an_int64": array(shape="[4, 9223372036854775808]"),
        "shape_of_minus_one": array(shape="[4, -1]"),
        "shape_of_many_digits": array(shape=f"[4, {'9' * 5000}]"),
        "shape_of_nan": array(shape="[4, NaN]"),
        "shape_of_1e400": array(shape="[4, 1e400]"),
        "huge_beside_a_dim_without_elements": array(shape="[0, 9223372036854775807]"),
        "chunks_of_nothing": array(chunks="[0, 3]"),
        "chunks_of_2_64_elements": array(chunks="[4294967296, 4294967296]"),
        "a_thousand_dims": array(shape=f"[{', '.join(['1'] * 1000)}]"),
        "many_numbers": array(later=f"[{'0,' * 20_000}0]"),
        "many_lists": array(later=f"[{'[],' * 10_000}[]]"),
        "many_names": array(later="{" + ", ".join(f'"{i}": {{}}' for i in range(5000)) + "}"),
        "structured_dtype": array(dtype='[["a", "<f4"], ["b", [["c", "<i4", [2, 3]]]]]'),
        "deep_dtype": array(dtype="[" * 5000 + "]" * 5000),
        "big_endian": array(dtype='">f8"'),
        "objects": array(dtype='"|O"', filters='[{"id": "pickle"}]'),
        "compressed": array(compressor='{"id": "blosc", "cname": "lz4"}'),
        "compressor_of_a_number": array(compressor='{"id": 7}'),
        "nul_in_a_name": array(**{"a\\u0000": "1"}),
        "not_utf_8": array().replace(b"order", b"ord\xffr"),
        "bytes_behind": array() + b"{}",
    }


# ---- safetensors ----


def headed(text: bytes, data: int = 0, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


def entry(key: str = "a", dtype: str = "U8", shape: str = "[1]", offsets: str = "[0,1]") -> bytes:
    return f'"{key}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'.encode()


def safetensors_corpus() -> Files:
    return {
        "one": headed(b"{" + entry() + b"}", 1),
        "two": headed(
            b'{"__metadata__":{"format":"pt"},'
            + entry("b", "BF16", "[2,3]", "[4,16]")
            + b","
            + entry("a", "F32", "[]", "[0,4]")
            + b"}  ",
            16,
        ),
        "pairs": headed(b"{" + entry(dtype="F4", shape="[2,4]", offsets="[0,4]") + b"}", 4),
        "nothing": headed(b"{}"),
        "index": b'{"metadata": {"total_size": 4}, "weight_map": {"a": "x.safetensors"}}',
    }


def safetensors_files() -> Files:
    return {
        "empty": b"",
        "length_of_2_64": headed(b"{}", length=2**64 - 1),
        "length_beyond_the_file": headed(b"{}", length=3),
        "no_header": headed(b""),
        "deep": headed(b'{"a":' + b"[" * 50_000),
        "deep_metadata": headed(b'{"__metadata__":' + b'{"a":' * 20_000),
        "key_twice": headed(b"{" + entry() + b"," + entry(shape="[0]", offsets="[1,1]") + b"}", 1),
        "field_twice": headed(b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1),
        "overlap": headed(b"{" + entry() + b"," + entry("b") + b"}", 1),
        "gap": headed(b"{" + entry(offsets="[1,2]") + b"}", 2),
        "bytes_behind": headed(b"{" + entry() + b"}", 2),
        "backwards": headed(b"{" + entry(offsets="[1,0]") + b"}", 1),
        "shape_of_2_64_elements": headed(
            b"{" + entry(shape="[4294967296,4294967296]", offsets="[0,0]") + b"}"
        ),
        "huge_beside_a_dim_without_elements": headed(
            b"{" + entry(shape="[0,4294967296,4294967296]", offsets="[0,0]") + b"}"
        ),
        "extent_of_2_64": headed(b"{" + entry(shape="[18446744073709551616]") + b"}", 1),
        "a_thousand_dims": headed(b"{" + entry(shape="[" + "1," * 999 + "1]") + b"}", 1),
        "odd_pairs": headed(b"{" + entry(dtype="F4", shape="[3]", offsets="[0,2]") + b"}", 2),
        "pairs_without_dims": headed(b"{" + entry(dtype="F4", shape="[]", offsets="[0,1]") + b"}", 1),
        "unknown_dtype": headed(b"{" + entry(dtype="F6_E2M3", shape="[4]", offsets="[0,3]") + b"}", 3),
        "not_utf_8": headed(b"{" + entry().replace(b"a", b"\xff", 1) + b"}", 1),
        "lone_surrogate": headed(b"{" + entry("\\ud800") + b"}", 1),
        "nul_in_a_key": headed(b"{" + entry("a\\u0000") + b"}", 1),
        "many_keys": headed(
            b"{" + b",".join(entry(str(i), shape="[0]", offsets="[0,0]") for i in range(2000)) + b"}"
        ),
        "index_outside": b'{"weight_map": {"a": "../x.safetensors"}}',
        "index_key_twice": b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
        "index_deep": b'{"weight_map": {}, "x": ' + b"[" * 50_000,
    }


# ---- Deltas ----


def delta(tensors: list[dict[str, object]], text: str | None = None, **metadata: str) -> bytes:
    """A delta without entries. `text`: in the place of the tensors."""

    def name(side: str) -> str:
        lines = [
            f"{t[side]} {t['dtype']} {json.dumps(t['shape'], separators=(',', ':'))} {t['key']}\n"
            for t in tensors
            if side in t
        ]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    given = {
        "format": "tilestone_delta",
        "version": "1",
        "base": name("before"),
        "result": name("after"),
        "tensors": json.dumps(tensors) if text is None else text,
    }
    return headed(json.dumps({"__metadata__": given | metadata}).encode())


def changed(**fields: object) -> dict[str, object]:
    piece = {"offset": [0], "shape": [2], "kind": "sparse", "gap_bytes": 1, "crc32": "00000000"}
    tensor = {"key": "w", "dtype": "int8", "shape": [4], "before": "00000001", "after": "00000002"}
    return tensor | {"pieces": [piece | fields]}


def delta_corpus() -> Files:
    same = {"key": "same", "dtype": "bool", "shape": [], "before": "0000000a", "after": "0000000a"}
    return {
        "changed": delta([same, changed(file="x.safetensors")]),
        "removed": delta([{"key": "w", "dtype": "float32", "shape": [0], "before": "00000000"}]),
        "nothing": delta([]),
    }


def delta_files() -> Files:
    added = {"key": "w", "dtype": "int8", "shape": [4], "after": "00000002"}
    return {
        "other_id": delta([changed()], base="0" * 64),
        "later_version": delta([changed()], version="2"),
        "outside_the_tensor": delta([changed(offset=[3])]),
        "other_dims": delta([changed(offset=[], shape=[])]),
        "outside_the_folder": delta([changed(file="../x.safetensors")]),
        "unknown_kind": delta([changed(kind="other")]),
        "gaps_of_3_bytes": delta([changed(gap_bytes=3)]),
        "not_covered": delta([added]),
        "key_twice": delta([changed(), changed()]),
        "shape_of_2_64_elements": delta([changed() | {"shape": [2**32, 2**32]}]),
        "no_list": delta([], text='{"a": 1}'),
        "no_json": delta([], text="["),
        "deep": delta([], text="[" * 50_000),
    }


def make_regressions() -> None:
    (sound,) = stock().values()
    metadata, checkpoints = metadatas(sound)
    targets = {
        "pickle": pickles(),
        "zip": zips(),
        "torch_archive": zips() | tensors(),
        "tensor_item": tensors(),
        "torch_metadata": metadata,
        "manifest": manifests(),
        "checkpoint": checkpoints,
        "zarr_array": zarr_arrays(),
        "safetensors": safetensors_files(),
        "torch_checkpointing": torch_checkpointing_files(),
        "delta": delta_files(),
    }
    for target, files in targets.items():
        for name, content in files.items():
            put("regressions", target, name, content)


if __name__ == "__main__":
    make_corpus()
    make_regressions()
