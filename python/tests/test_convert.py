"""Conversions between formats keep every bit; what is written, the safetensors package reads."""

from __future__ import annotations

import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import types
from typing import Any

import pytest
from thread_ranks import run_ranks
import tilestone
import torch
from ranks import Worlds
from safetensors import safe_open
from safetensors.torch import load_file
from test_safetensors import DTYPES, bits, every_dtype


def run(*words: str | pathlib.Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tilestone", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_what_is_converted_the_package_reads_bit_for_bit(tmp_path: pathlib.Path) -> None:
    model = every_dtype()
    tilestone.save({"model": model, "epoch": 3}, tmp_path / "ckpt")
    result = tilestone.convert(tmp_path / "ckpt", tmp_path / "hf", only="model")
    assert {key.key for key in result.keys} == model.keys()
    assert result.left_out == 1
    file = tmp_path / "hf" / "model.safetensors"
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(sorted(model), "model.safetensors")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in model.values())
    begin = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8:begin])
    for key, tensor in model.items():
        assert (begin + header[key]["data_offsets"][0]) % tensor.element_size() == 0
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert set(opened.keys()) == model.keys()
    # The package has no torch dtype for these two names, and reads them as bytes of the file only.
    unknown = {"float8_e8m0fnu", "float4_e2m1fn_x2"}
    tilestone.convert(
        tmp_path / "ckpt", tmp_path / "known", only="model",
        rename=lambda key: "" if key in unknown else key,
    )  # fmt: skip
    read = load_file(tmp_path / "known" / "model.safetensors")
    assert read.keys() == model.keys() - unknown
    for key, tensor in read.items():
        assert tensor.dtype == model[key].dtype
        assert tensor.shape == model[key].shape
        assert bits(tensor) == bits(model[key])
    back = tilestone.load(tmp_path / "hf")
    assert all(bits(back[key]) == bits(tensor) for key, tensor in model.items())
    assert tilestone.open(tmp_path / "hf").verify().items_without_checksum == 0
    assert tilestone.gc(tmp_path / "hf", force=True) == []


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex128])
def test_dtypes_that_safetensors_lacks_are_refused_by_key(
    tmp_path: pathlib.Path, dtype: torch.dtype
) -> None:
    assert dtype not in DTYPES
    tilestone.save({"a": torch.ones(2), "z": torch.zeros(3, dtype=dtype)}, tmp_path / "ckpt")
    with pytest.raises(tilestone.InvalidArgumentError) as raised:
        tilestone.convert(tmp_path / "ckpt", tmp_path / "hf")
    assert raised.value.key == "z"
    assert os.listdir(tmp_path) == ["ckpt"]


def test_keys_of_every_kind_stay_and_wrong_options_are_refused(tmp_path: pathlib.Path) -> None:
    keys = {(1, 2): torch.ones(1), True: torch.ones(2), 1.5: torch.ones(3), None: 4, 7: 5}
    torch.save({"": torch.zeros(2), "d": keys}, tmp_path / "a.pt")
    tilestone.convert(tmp_path / "a.pt", tmp_path / "ckpt")
    tilestone.convert(tmp_path / "ckpt", tmp_path / "b.pt")
    back = torch.load(tmp_path / "b.pt")
    assert set(back["d"]) == set(keys)
    assert torch.equal(back["d"][1.5], keys[1.5])
    assert torch.equal(back[""], torch.zeros(2))
    tilestone.save({"d": torch.zeros(1)}, tmp_path / "other")
    tilestone.save({"": torch.zeros(2), "d": torch.zeros(1)}, tmp_path / "empty key")
    command = [sys.executable, "-m", "tilestone", "diff", "--json", "empty key", "other"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert [found["key"] for found in json.loads(ran.stdout)["differences"]] == [""]
    torch.save({}, tmp_path / "none.pt")
    torch.save({"a\ud800": torch.zeros(1)}, tmp_path / "surrogate.pt")
    for source, target, options, problem in (
        ("a.pt", "c", {"cast": torch.int8}, "can't cast to int8"),
        ("ckpt", "c.pt", {"dialect": "megatron"}, "torch.save have no dialect"),
        ("ckpt", "c", {"format": "foo"}, "torch_checkpointing, torch_save"),
        ("none.pt", "c", {"keys": ["*"]}, "no key matches"),
        ("surrogate.pt", "c", {}, "lone surrogate"),
        ("ckpt", "other", {"format": "torch_dist"}, "convert to another name"),
    ):
        with pytest.raises(tilestone.CheckpointError, match=problem):
            tilestone.convert(tmp_path / source, tmp_path / target, **options)
        assert not any(path.name.startswith("c.") or path.name == "c" for path in tmp_path.iterdir())


def _number_keys_of_one_rank(rank: int, world: int, ckpt: str) -> None:
    states: dict[object, object] = {0: torch.ones(2)} if rank == 0 else {}
    tilestone.save({"opt": states}, ckpt)


def test_keys_of_a_dict_that_is_empty_on_another_rank_stay_numbers(
    worlds: Worlds, tmp_path: pathlib.Path
) -> None:
    worlds[2].run(_number_keys_of_one_rank, str(tmp_path / "a"))
    tilestone.convert(tmp_path / "a", tmp_path / "b", format="torch_dist")
    for path in ("a", "b"):
        assert list(tilestone.load(tmp_path / path)["opt"]) == [0]


def test_empty_dicts_with_an_empty_name_and_alone_in_a_part_are_converted(
    tmp_path: pathlib.Path,
) -> None:
    tilestone.save({"": {}, "w": torch.ones(1), "opt": {"state": {}}}, tmp_path / "a")
    tilestone.convert(tmp_path / "a", tmp_path / "b", format="torch_dist")
    assert tilestone.load(tmp_path / "b") == {"": {}, "w": 1, "opt": {"state": {}}}
    tilestone.convert(tmp_path / "a", tmp_path / "c", format="torch_dist", only="opt")
    assert tilestone.load(tmp_path / "c") == {"state": {}}


def test_an_empty_dict_gets_no_name_that_is_taken(tmp_path: pathlib.Path) -> None:
    tilestone.save({"w": torch.ones(1), "none": {}}, tmp_path / "a")
    with pytest.raises(tilestone.InvalidArgumentError, match='"w" and "none" get the same new key'):
        tilestone.convert(
            tmp_path / "a", tmp_path / "b", format="torch_dist", rename=[("^none$", "w")]
        )


def test_a_state_without_keys_is_converted(tmp_path: pathlib.Path) -> None:
    tilestone.save({}, tmp_path / "none")
    for name in ("torch_dist", "zarr", "safetensors", "torch_save", "megatron"):
        given = {"dialect": name, "format": "zarr"} if name == "megatron" else {"format": name}
        there = tmp_path / (name + ".pt" if name == "torch_save" else name)
        result = tilestone.convert(tmp_path / "none", there, **given)
        assert result.keys == [] and result.bytes == 0
        assert tilestone.open(there).keys() == []
        assert tilestone.load(there) == {}
        assert tilestone.open(there).verify().ok
        back = tmp_path / f"{name} back"
        tilestone.convert(there, back, format="torch_dist", dialect="pytorch")
        assert tilestone.load(back) == {}
        assert run("diff", there, back).returncode == 0


def test_what_megatrons_dialect_would_put_in_one_place_is_refused_by_key(
    tmp_path: pathlib.Path,
) -> None:
    for dict_, key in (({}, "a.b"), ({"c": 1}, "a.b")):
        path = tmp_path / f"{len(dict_)} keys"
        tilestone.save({"a.b": dict_, "a": {"b": torch.ones(1)}}, path)
        with pytest.raises(tilestone.InvalidArgumentError, match="without a template") as raised:
            tilestone.convert(path, tmp_path / "m", dialect="megatron", format="torch_dist")
        assert raised.value.key == key
        tilestone.convert(path, tmp_path / "t", format="torch_dist")
        assert tilestone.load(tmp_path / "t")["a.b"] == dict_
        shutil.rmtree(tmp_path / "t")
    assert sorted(os.listdir(tmp_path)) == ["0 keys", "1 keys"]


def test_empty_dicts_and_the_order_of_keys_stay(tmp_path: pathlib.Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    adam = torch.optim.AdamW(model.parameters())
    state = {"z": model.state_dict(), "optimizer": adam.state_dict(), "a": {"b": {}}}
    torch.save(state, tmp_path / "a.pt")
    assert list(state["z"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    source = tmp_path / "a.pt"
    for number, to in enumerate(["torch_dist", "zarr", "torch_dist"]):
        target = tmp_path / str(number)
        tilestone.convert(source, target, format=to, dialect="megatron" if number == 2 else "pytorch")
        source = target
    tilestone.convert(tmp_path / "1", tmp_path / "b.pt")
    tilestone.convert(tmp_path / "a.pt", tmp_path / "c.pt")
    for name in ("b.pt", "c.pt"):
        back = torch.load(tmp_path / name, weights_only=True)
        assert list(back) == ["z", "optimizer", "a"]
        assert list(back["z"]) == list(state["z"])
        assert back["a"] == {"b": {}}
        adam.load_state_dict(back["optimizer"])
    assert tilestone.load(tmp_path / "2")["a"] == {"b": {}}
    assert tilestone.load(tmp_path / "2")["optimizer"] == adam.state_dict()
    tilestone.convert(tmp_path / "0", tmp_path / "d", only="optimizer", format="torch_dist")
    assert tilestone.load(tmp_path / "d")["state"] == {}
    tilestone.convert(
        tmp_path / "0", tmp_path / "e", format="torch_dist", keys=["a.*"], rename=[("b$", "moved")]
    )
    assert tilestone.load(tmp_path / "e") == {"a": {"moved": {}}}
    with pytest.raises(tilestone.InvalidArgumentError, match="empty dict") as raised:
        tilestone.convert(tmp_path / "0", tmp_path / "hf", keys=["z.*", "a.*"], format="safetensors")
    assert raised.value.key == "a.b"


def test_a_target_inside_the_source_is_refused(tmp_path: pathlib.Path) -> None:
    tilestone.save({"w": torch.ones(2)}, tmp_path / "run" / "ckpt")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for target in ("run/ckpt/hf", "run/ckpt/.tilestone/x.pt", "link/ckpt/../ckpt/a"):
        with pytest.raises(tilestone.InvalidArgumentError, match="inside the one"):
            tilestone.convert(tmp_path / "run" / "ckpt", tmp_path / target)
    with pytest.raises(tilestone.InvalidArgumentError, match="inside the target"):
        tilestone.convert(tmp_path / "run" / "ckpt", tmp_path / "run")
    (tmp_path / "link").unlink()
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    tilestone.convert(tmp_path / "run" / "ckpt", tmp_path / "run" / "ckpt-hf")


def test_a_conversion_that_fails_leaves_no_directory(tmp_path: pathlib.Path) -> None:
    tilestone.save({"w": torch.ones(1 << 20)}, tmp_path / "ckpt")
    data = next((tmp_path / "ckpt").glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    for to in ("torch_dist", "zarr", "safetensors"):
        with pytest.raises(tilestone.CorruptError):
            tilestone.convert(tmp_path / "ckpt", tmp_path / "new" / to, format=to)
    for name in ("file.pt", "file.safetensors"):
        with pytest.raises(tilestone.CorruptError):
            tilestone.convert(tmp_path / "ckpt", tmp_path / "new" / "deep" / name)
    assert os.listdir(tmp_path) == ["ckpt"]
    (tmp_path / "mine").mkdir()  # was there before
    (tmp_path / "mine" / "note.txt").write_text("of the user")
    with pytest.raises(tilestone.CorruptError):
        tilestone.convert(tmp_path / "ckpt", tmp_path / "mine", format="torch_dist")
    assert os.listdir(tmp_path / "mine") == ["note.txt"]
    assert sorted(os.listdir(tmp_path)) == ["ckpt", "mine"]


def test_characters_that_turn_text_around_are_escaped_wherever_keys_are_printed(
    tmp_path: pathlib.Path,
) -> None:
    key = "a\u202eb\u2028c"
    tilestone.save({key: torch.ones(2), key + "o": 1}, tmp_path / "ckpt")
    tilestone.save({key: torch.zeros(2)}, tmp_path / "other")
    for words in (
        ("ls", "ckpt"), ("ls", "--tree", "ckpt"), ("du", "ckpt"), ("du", "--by-name", "ckpt"),
        ("diff", "ckpt", "other"), ("cat", "ckpt", "missing"), ("inspect", "ckpt", key),
        ("convert", "ckpt", "hf", "--to", "safetensors"), ("convert", "ckpt", "x", "--dry-run"),
    ):  # fmt: skip
        ended = run(*words, cwd=tmp_path)
        printed = ended.stdout + ended.stderr
        assert "\u202e" not in printed and "\u2028" not in printed, words
        assert words[0] == "cat" or "a\\u202eb\\u2028c" in printed, words


def test_a_report_lists_truncated_files(tmp_path: pathlib.Path) -> None:
    tilestone.save({"a": torch.ones(100), "b": torch.ones(1 << 18)}, tmp_path / "ckpt")
    (data,) = (tmp_path / "ckpt").glob("*.distcp")
    whole = data.stat().st_size
    os.truncate(data, whole // 2)
    (short,) = tilestone.open(tmp_path / "ckpt").verify().short_files
    assert (short.file, short.size, short.expected) == (data.name, whole // 2, whole)
    assert (short.keys, short.first_key) == (1, "b")
    assert "expected=" in repr(short)


def test_a_page_that_cannot_be_written_whole_is_removed(tmp_path: pathlib.Path) -> None:
    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    tilestone.save({"w": torch.ones(2)}, tmp_path / "ckpt")
    page = tmp_path / "page.html"
    ended = run("layout", tmp_path / "ckpt", "-o", page, preexec_fn=small_files)
    assert ended.returncode == 3
    assert "cannot write the file" in ended.stderr
    assert not page.exists()


def diff(a: pathlib.Path, b: pathlib.Path) -> dict[str, Any]:
    ended = run("diff", "--json", a, b)
    report = json.loads(ended.stdout)
    assert ended.returncode == (0 if report["same"] else 1), ended.stderr
    return report


def test_diff_compares_the_common_state_with_the_other_dialects_leaves(
    tmp_path: pathlib.Path,
) -> None:
    state: dict[str, Any] = {
        "model": {"w": torch.arange(6.0).reshape(2, 3).t()},
        "common": {"big": 2**80, "t": torch.arange(6).reshape(2, 3).t(), "list": [1, {"x": (2,)}]},
        "iteration": 5,
        "empty": {},
    }
    tilestone.save(state, tmp_path / "a")
    tilestone.convert(tmp_path / "a", tmp_path / "b", format="torch_dist", dialect="megatron")
    tilestone.save(state, tmp_path / "m", dialect="megatron")  # its tensors are common state too
    for other in ("b", "m"):
        for pair in (("a", other), (other, "a")):
            report = diff(*(tmp_path / name for name in pair))
            assert report["differences"] == [], pair
            assert report["equal_tensors"] == 2
    state["common"]["t"] = torch.arange(6).reshape(2, 3).t() + 1
    state["iteration"] = 6
    del state["empty"]
    tilestone.save(state, tmp_path / "c", dialect="megatron")
    found = diff(tmp_path / "a", tmp_path / "c")["differences"]
    assert {one["key"]: one["difference"] for one in found} == {
        "common.t": "values",
        "iteration": "objects",
        "empty": "only in a",
    }


def test_names_casts_and_files(tmp_path: pathlib.Path) -> None:
    state = {f"module.layers.{i}.w": torch.randn(10, 10) for i in range(3)}
    state["module.steps"] = torch.arange(4)
    tilestone.save(state, tmp_path / "ckpt")
    result = tilestone.convert(
        tmp_path / "ckpt", tmp_path / "hf", rename=lambda key: key.removeprefix("module."),
        cast=torch.bfloat16, shard_size=300,
    )  # fmt: skip
    assert [key.file for key in result.keys] == [
        "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors", "model-00003-of-00003.safetensors",
    ]  # fmt: skip
    loaded = tilestone.load(tmp_path / "hf")
    assert torch.equal(loaded["layers.1.w"], state["module.layers.1.w"].to(torch.bfloat16))
    assert loaded["steps"].dtype == torch.int64
    pairs = [(r"^module\.layers\.(\d)\.w$", r"h.\1")]
    plan = tilestone.convert(tmp_path / "ckpt", tmp_path / "no", rename=pairs, dry_run=True)
    assert [key.key for key in plan.keys] == ["h.0", "h.1", "h.2", "module.steps"]
    assert not (tmp_path / "no").exists()


def test_a_target_named_safetensors_is_one_file(tmp_path: pathlib.Path) -> None:
    model = every_dtype()
    tilestone.save({"model": model, "epoch": 3}, tmp_path / "ckpt")
    names = {"float8_e8m0fnu", "float4_e2m1fn_x2"}  # which the package can't read
    for source in ("ckpt", "ckpt.pt"):
        if source == "ckpt.pt":  # by default a file of torch.save becomes torch_dist
            tilestone.convert(tmp_path / "ckpt", tmp_path / source)
        target = tmp_path / f"{source}.safetensors"
        result = tilestone.convert(
            tmp_path / source, target, only="model",
            rename=lambda key: "" if key in names else key,
        )  # fmt: skip
        assert (result.format, {key.file for key in result.keys}) == ("safetensors", {""})
        assert repr(result).startswith("ConvertResult(format='safetensors', dialect='pytorch', keys=")
        read = load_file(target)
        assert read.keys() == model.keys() - names
        assert all(bits(tensor) == bits(model[key]) for key, tensor in read.items())
        loaded = tilestone.load(target)
        assert all(bits(tensor) == bits(model[key]) for key, tensor in loaded.items())
    with pytest.raises(tilestone.AlreadyExistsError):
        tilestone.convert(tmp_path / "ckpt", target, only="model")
    with pytest.raises(tilestone.InvalidArgumentError, match="that of one file"):
        tilestone.convert(tmp_path / "ckpt", tmp_path / "a.safetensors", only="model", shard_size=9)
    with pytest.raises(tilestone.InvalidArgumentError, match="objects") as refused:
        tilestone.convert(tmp_path / "ckpt", tmp_path / "a.safetensors")
    assert refused.value.key == "epoch"
    tilestone.save({}, tmp_path / "empty")
    with pytest.raises(tilestone.InvalidArgumentError, match="the file would be empty"):
        tilestone.convert(tmp_path / "empty", tmp_path / "a.safetensors")
    assert sorted(os.listdir(tmp_path)) == [
        "ckpt", "ckpt.pt", "ckpt.pt.safetensors", "ckpt.safetensors", "empty"
    ]  # fmt: skip


def test_an_error_of_the_naming_function_is_raised(tmp_path: pathlib.Path) -> None:
    tilestone.save({"a": torch.ones(2)}, tmp_path / "ckpt")
    with pytest.raises(ZeroDivisionError):
        tilestone.convert(tmp_path / "ckpt", tmp_path / "hf", rename=lambda key: str(1 // 0))
    nothing: Any = lambda key: None  # noqa: E731
    with pytest.raises(tilestone.InvalidArgumentError, match="must return .* not None") as refused:
        tilestone.convert(tmp_path / "ckpt", tmp_path / "hf", rename=nothing)
    assert refused.value.key == "a"
    assert os.listdir(tmp_path) == ["ckpt"]


def test_a_large_conversion_streams_and_a_killed_one_leaves_nothing(tmp_path: pathlib.Path) -> None:
    size = 256 << 20
    big = torch.arange(size // 4, dtype=torch.int32)
    tilestone.save({"a": big, "b": big.flip(0)}, tmp_path / "ckpt")
    del big
    program = (
        "import resource, sys, tilestone; before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "tilestone.convert(sys.argv[1], sys.argv[2],"
        " resources=tilestone.Resources(buffer_bytes=32 << 20));"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "ckpt"), str(tmp_path / "hf")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < (32 + 64 + 16) << 10  # KiB; 16 MiB for code and threads
    assert tilestone.open(tmp_path / "hf").verify().ok
    program = (
        "import os, signal, sys, tilestone;"
        "tilestone.convert(sys.argv[1], sys.argv[2],"
        " progress=lambda _: os.kill(os.getpid(), signal.SIGKILL))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "ckpt"), ""]
    for name in ("killed", "killed.pt"):
        for cleans in (True, False):
            command[-1] = str(tmp_path / name)
            assert subprocess.run(command).returncode == -signal.SIGKILL
            assert any(f".{name}.tilestone-" in left for left in os.listdir(tmp_path))
            assert not (tmp_path / name).exists()
            if cleans:
                tilestone.gc(tmp_path / name, delete=True)
                assert sorted(os.listdir(tmp_path)) == ["ckpt", "hf"]
        tilestone.convert(tmp_path / "ckpt", tmp_path / name)  # removes what was left
        assert sorted(os.listdir(tmp_path)) == sorted(["ckpt", "hf", name])
        assert tilestone.open(tmp_path / name).keys() == ["a", "b"]
        (shutil.rmtree if (tmp_path / name).is_dir() else os.remove)(tmp_path / name)


def test_a_file_of_torch_save_becomes_a_checkpoint(tmp_path: pathlib.Path) -> None:
    weight = torch.randn(6, 4)
    state = {"model": {"w": weight, "t": weight.t(), "n": torch.arange(3)}, "epoch": 3, "lr": [0.5]}
    torch.save(state, tmp_path / "run.pt")
    tilestone.convert(tmp_path / "run.pt", tmp_path / "ckpt")
    loaded = tilestone.load(tmp_path / "ckpt")
    assert torch.equal(loaded["model"]["t"], weight.t())
    assert loaded["epoch"] == 3
    assert loaded["lr"] == [0.5]
    tilestone.convert(
        tmp_path / "run.pt", tmp_path / "hf", format="safetensors", only="model", cast="bfloat16"
    )
    read = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(read["t"], weight.t().to(torch.bfloat16))
    assert torch.equal(read["n"], torch.arange(3))
    damaged = bytearray((tmp_path / "run.pt").read_bytes())
    damaged[damaged.find(bytes(weight[2].numpy().tobytes()))] ^= 1
    (tmp_path / "damaged.pt").write_bytes(damaged)
    with pytest.raises(tilestone.CorruptError, match="checksum"):
        tilestone.convert(tmp_path / "damaged.pt", tmp_path / "no")
    torch.save({"f": print}, tmp_path / "unsafe.pt")
    tilestone.convert(tmp_path / "unsafe.pt", tmp_path / "opaque")  # kept, never run
    assert not (tmp_path / "no").exists()


def test_a_file_of_torch_save_is_opened_and_loaded_where_it_stands(tmp_path: pathlib.Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state: dict[Any, Any] = {
        "w": base,
        "tied": base,  # the same bytes under two keys
        "row": base[1],
        "turned": base.t(),
        "pair": (base, {"n": 3}),
        "half": torch.arange(5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "groups": [{"lr": 0.5, "params": [0, 1]}],
        7: "seven",
    }
    path = tmp_path / "run.pt"
    torch.save(state, path)
    with tilestone.open(path) as ckpt:
        assert (ckpt.format, ckpt.writer) == ("torch_save", "torch.save")
        assert torch.equal(torch.as_tensor(ckpt["turned"][2:4]), base.t()[2:4])
        assert ckpt.verify().ok
    loaded = tilestone.load(path)
    for key in ("w", "tied", "row", "turned", "half", "empty"):
        assert torch.equal(torch.as_tensor(loaded[key]), state[key]), key
    assert loaded["groups"] == state["groups"] and loaded[7] == "seven"
    assert torch.equal(torch.as_tensor(loaded["pair"][0]), base) and loaded["pair"][1] == {"n": 3}
    target = {"w": torch.zeros(4, 6), "half": torch.zeros(5, dtype=torch.bfloat16)}
    tilestone.load(target, path)
    assert torch.equal(target["w"], base) and torch.equal(target["half"], state["half"])

    def run(comm: tilestone.Communicator) -> None:  # each rank its rows
        own = torch.zeros(2, 6)
        wanted = {"w": tilestone.ShardedTensor.from_rank_offsets("w", own, (0, comm.rank, 2))}
        tilestone.load(wanted, path, group=comm)
        assert torch.equal(own, base[2 * comm.rank :][:2])

    run_ranks(2, run)
    with pytest.raises(tilestone.AlreadyExistsError, match="the location is a file"):
        tilestone.save({"w": base}, path, overwrite=True)
    assert torch.equal(torch.load(path, weights_only=True)["w"], base)


def test_what_holds_or_computes_tensors_in_a_file_of_torch_save_is_refused_by_key(
    tmp_path: pathlib.Path,
) -> None:
    base = torch.arange(4.0)
    lazy = torch.view_as_complex(torch.ones(2, 2)).conj()  # only marked as conjugated
    torch.save({"w": base, "c": lazy, "o": types.SimpleNamespace(w=base)}, tmp_path / "a.pt")
    with tilestone.open(tmp_path / "a.pt") as ckpt:
        assert ckpt["w"][...].tolist() == [0, 1, 2, 3]
        for key, why in (("c", "lazily conjugated"), ("o", "an object that holds tensors")):
            with pytest.raises(tilestone.UnsupportedError, match=why):
                ckpt[key]
        assert ckpt.verify().ok


def test_a_checkpoint_becomes_a_file_of_torch_save(tmp_path: pathlib.Path) -> None:
    model = every_dtype() | {"scalar": torch.tensor(2.5)}
    state = {"model": model, "groups": [{"lr": 0.5, "betas": (0.9, 0.99)}], "epoch": 3}
    tilestone.save(state, tmp_path / "ckpt")
    result = tilestone.convert(tmp_path / "ckpt", tmp_path / "run.pt")
    assert result.format == "torch_save"
    loaded = torch.load(tmp_path / "run.pt", weights_only=True)
    assert loaded["epoch"] == 3
    assert loaded["groups"] == state["groups"]
    assert loaded["model"].keys() == model.keys()
    assert loaded["model"]["scalar"] == 2.5
    for key, tensor in loaded["model"].items():
        assert tensor.dtype == model[key].dtype
        assert tensor.shape == model[key].shape
        assert bits(tensor) == bits(model[key])
    tilestone.convert(tmp_path / "run.pt", tmp_path / "back")
    back = tilestone.load(tmp_path / "back")
    assert back["groups"] == state["groups"]
    assert all(bits(back["model"][key]) == bits(tensor) for key, tensor in model.items())
    with pytest.raises(tilestone.AlreadyExistsError):
        tilestone.convert(tmp_path / "ckpt", tmp_path / "run.pt")
    assert sorted(os.listdir(tmp_path)) == ["back", "ckpt", "run.pt"]


def test_a_quantized_tensor_in_a_file_of_torch_save_is_refused_by_key_alone(
    tmp_path: pathlib.Path,
) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    nested = {"t": torch.ones(2), "q": quantized, "list": [torch.zeros(1), quantized]}
    torch.save({"w": torch.arange(3.0), "n": nested, "step": 5}, tmp_path / "a.pt")
    checkpoint = tilestone.open(tmp_path / "a.pt")
    assert sorted(checkpoint.keys()) == ["n.list.0", "n.list.1", "n.q", "n.t", "step", "w"]
    assert checkpoint.verify().ok
    assert checkpoint["step"] == 5
    assert checkpoint["w"][...].tolist() == [0, 1, 2]
    for call in (lambda: checkpoint["n.q"], lambda: tilestone.convert(tmp_path / "a.pt", tmp_path / "c")):
        with pytest.raises(tilestone.UnsupportedError, match="quantized") as caught:
            call()
        assert caught.value.key in ("n.q", "n.list.1")
    tilestone.convert(tmp_path / "a.pt", tmp_path / "c", keys=["w", "n.t", "step"])
    assert tilestone.load(tmp_path / "c")["n"]["t"].tolist() == [1, 1]


def test_diff_selects_keys_as_they_are_in_either_checkpoint_as_convert_does(
    tmp_path: pathlib.Path,
) -> None:
    tilestone.save({"old.a": torch.ones(1), "old.b": torch.ones(2)}, tmp_path / "a")
    tilestone.save({"new.a": torch.ones(1), "new.b": torch.zeros(2)}, tmp_path / "b")
    rename = (tmp_path / "a", tmp_path / "b", "--rename", "^old=new")
    for pattern, differing in (("old.a", 0), ("new.a", 0), ("old.*", 1), ("new.b", 1)):
        ended = run("diff", "--json", *rename, "--keys", pattern)
        assert len(json.loads(ended.stdout)["differences"]) == differing, pattern
    ended = run("diff", *rename, "--keys", "old.aa")
    assert ended.returncode == 2
    assert "similar keys: old.a" in ended.stderr
