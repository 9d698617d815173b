"""Conversions of buckets whose contents are known, and layouts that do not fit them."""

from __future__ import annotations

import copy
import json
import pathlib
import subprocess
import sys
from dataclasses import replace
from typing import Any

import optimizer_model as om
import pytest
import tilestone
import torch
from optimizer_model import Ranks, filled, layout_of
from test_megatron_optimizer import WHOLE, _mains, _models, _save
from tilestone import megatron
from tilestone.megatron.distributed_optimizer import (
    Layout,
    OptimizerShard,
    layout_object,
    optimizer_state,
    pack,
    write_layouts,
)

FULLY = "fully_reshardable"


def _layouts(job: Ranks, bucket_numel: int | None = 60) -> list[Layout]:
    return [layout_of(model, group, job.dp, bucket_numel) for group, model in _models(job)]


def _save_with_model(job: Ranks, path: pathlib.Path) -> None:
    """Saves a model and its optimizer's buckets, without their layout, in one process."""
    states, models = [], []
    for group, model in _models(job):
        for name, entity in model.entities.items():
            entity.data.data.copy_(model.local_state(name, "param", WHOLE))
        models.append(model.entities)
        shards = [
            filled(model, layout_of(model, group, job.dp), rank, job.dp, WHOLE)
            for rank in range(job.dp)
        ]
        states += [optimizer_state([each], "dp_reshardable", with_layout=False) for each in shards]
    kept = [{name: entity for name, entity in models[0].items()}]
    for entities in models[1:]:  # one process may have only one copy of a tensor
        kept.append({n: e for n, e in entities.items() if not any(e.replica_id)})
    others = [_mains(each) for each in states[1:]]
    megatron.save({"optimizer": states[0], "others": others, "models": kept}, str(path))


def _check_whole(path: pathlib.Path, job: Ranks) -> None:
    checkpoint = tilestone.open(path)
    wanted = {f"optimizer.state.{state}.{key}": tensor for (state, key), tensor in WHOLE.items()}
    assert {k for k in checkpoint.tensor_keys() if k.startswith("optimizer")} == wanted.keys()
    assert not [key for key in checkpoint.object_keys() if "dp_group_idx" in key]
    for key, tensor in wanted.items():
        found = checkpoint[key].torch()
        if key.endswith(".embed"):  # its padding is zeros
            assert len(found) == om.padded_vocab(job.tp) and not found[om.VOCAB :].any()
            found = found[: om.VOCAB]
        assert found.dtype == torch.float32
        assert torch.equal(found, tensor), key
    common = megatron.load_common_state_dict(path)
    assert common["optimizer"] == {**om.common(), "param_state_sharding_type": FULLY}
    assert common["content_metadata"]["distrib_optim_sharding_type"] == FULLY


@pytest.mark.parametrize("job", [Ranks(2, 1, 3), Ranks(1, 2, 1), Ranks(4, 1, 2)], ids=str)
def test_each_element_of_buckets_gets_its_place_in_the_model(
    tmp_path: pathlib.Path, job: Ranks
) -> None:
    """Two dtypes, several buckets, gaps, tensors that factories divide and transpose."""
    _save(job, "dp_reshardable", str(tmp_path / "a"))
    tilestone.convert(tmp_path / "a", tmp_path / "b", format="torch_dist", optimizer=FULLY)
    _check_whole(tmp_path / "b", job)
    _save_with_model(job, tmp_path / "c")
    write_layouts(tmp_path / "layout.json", _layouts(job))
    tilestone.convert(tmp_path / "c", tmp_path / "d", format="zarr", layout=tmp_path / "layout.json")
    _check_whole(tmp_path / "d", job)


def test_the_command_converts_with_a_layout_and_refuses_without_one(
    tmp_path: pathlib.Path,
) -> None:
    job = Ranks(2, 1, 3)
    _save(job, "dp_reshardable", str(tmp_path / "a"), with_layout=False)
    write_layouts(tmp_path / "layout.json", _layouts(job))

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tilestone", "convert", "a", "b", "--to", "torch_dist"]
        return subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True)

    refused = run("--optimizer", FULLY)
    assert refused.returncode != 0
    assert "does not hold their layout" in refused.stderr
    assert "write_layouts" in refused.stderr
    assert "--layout" in refused.stderr
    assert not (tmp_path / "b").exists()
    assert run("--layout", "layout.json", "--dry-run").returncode == 0
    assert not (tmp_path / "b").exists()
    assert run("--layout", "layout.json").returncode == 0
    _check_whole(tmp_path / "b", job)
    assert "fully_reshardable" in run("--optimizer", "dp_reshardable").stderr


def _refused(source: pathlib.Path, layouts: list[Layout]) -> tilestone.MismatchError:
    file = source.parent / "layout.json"
    write_layouts(file, layouts)
    with pytest.raises(tilestone.MismatchError) as raised:
        tilestone.convert(source, source.parent / "never", format="torch_dist", layout=file)
    assert not (source.parent / "never").exists()
    return raised.value


def test_the_layout_of_another_model_is_refused_by_its_first_parameter_that_does_not_fit(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Ranks(2, 1, 2)
    _save(job, "dp_reshardable", str(tmp_path / "buckets"), with_layout=False)
    _save_with_model(job, tmp_path / "model")
    right = _layouts(job)
    monkeypatch.setattr(om, "FFN", 28)
    wider = _layouts(job)
    monkeypatch.undo()
    # The last parameters come first in a buffer.
    error = _refused(tmp_path / "model", wider)
    assert error.key == "layers.halves"
    assert "has the shape [2, 12, 24] in the checkpoint, and [2, 12, 28]" in str(error)
    error = _refused(tmp_path / "buckets", wider)
    assert error.key == "layers.halves"
    assert "elements, but has" in str(error)
    assert "the bucket size of the job" in error.hint
    # Other ranks, and other buckets.
    error = _refused(tmp_path / "buckets", right[:1])
    assert error.key == right[1].prefix
    error = _refused(tmp_path / "buckets", [*right, Layout(right[0].buffers, 5)])
    assert "nothing below" in str(error) and error.key == "layers.halves"
    error = _refused(tmp_path / "buckets", _layouts(job, None))
    assert error.key.startswith("layers.")
    error = _refused(tmp_path / "buckets", _layouts(Ranks(4, 1, 2)))
    assert error.key.startswith("layers.")


def _swapped(layout: Layout, key: str) -> Layout:
    """The layout with the two layers of a parameter exchanged, which have the same size."""
    found = [
        each for _, bucket in layout.buckets() for each in bucket.parameters if each.key == key
    ]
    first, second = found
    pieces = {id(first): second.pieces, id(second): first.pieces}
    return replace(
        layout,
        buffers=tuple(
            replace(
                buffer,
                buckets=tuple(
                    replace(
                        bucket,
                        parameters=tuple(
                            replace(each, pieces=pieces.get(id(each), each.pieces))
                            for each in bucket.parameters
                        ),
                    )
                    for bucket in buffer.buckets
                ),
            )
            for buffer in layout.buffers
        ),
    )


@pytest.mark.parametrize("key", ["layers.column", "layers.norm", "layers.experts"])
def test_a_layout_with_the_right_sizes_and_another_order_is_refused_by_the_models_values(
    tmp_path: pathlib.Path, key: str
) -> None:
    job = Ranks(2, 1, 2)
    _save_with_model(job, tmp_path / "model")
    right = _layouts(job)
    error = _refused(tmp_path / "model", [_swapped(right[0], key), right[1]])
    assert error.key == key
    assert "are not the model's" in str(error)


def test_a_layout_in_which_parameters_share_or_lack_elements_is_refused(
    tmp_path: pathlib.Path,
) -> None:
    job = Ranks(2, 1, 2)
    _save(job, "dp_reshardable", str(tmp_path / "a"), with_layout=False)
    first, second = _layouts(job)
    both = [first, replace(first, group=1)]  # of the first half
    write_layouts(tmp_path / "layout.json", both)
    with pytest.raises(tilestone.CoverageError, match="does not hold box") as raised:
        tilestone.convert(
            tmp_path / "a", tmp_path / "b", format="torch_dist", layout=tmp_path / "layout.json"
        )
    assert raised.value.key.startswith("optimizer.state.")
    assert not (tmp_path / "b").exists()
    assert second.group == 1


def test_what_is_no_layout_is_refused_with_the_file(tmp_path: pathlib.Path) -> None:
    job = Ranks(1, 1, 1)
    _save(job, "dp_reshardable", str(tmp_path / "a"), with_layout=False)
    (layout,) = (each.to_plain() for each in _layouts(job))
    parameter = layout["buffers"][0]["buckets"][0]["parameters"][0]

    def without(dict_: dict[str, Any], name: str) -> dict[str, Any]:
        return {key: value for key, value in dict_.items() if key != name}

    bad: list[Any] = [[], {}, {"optimizer_layouts": 3}, {"optimizer_layouts": [{}]}]
    bad += [{"optimizer_layouts": [{**layout, "version": 2}]}]
    bad += [{"optimizer_layouts": [without(layout, name)]} for name in layout]
    for name, value in (
        ("start", -1), ("numel", 1 << 62), ("numel", "4"), ("pieces", [[1]]), ("key", None),
        ("pieces", [[*parameter["pieces"][0][:4], [1 << 62] * 3, 0, False]]),
        ("pieces", [["x", [4], [2], [4], [1], 0, False]]),
    ):  # fmt: skip
        changed = copy.deepcopy(layout)
        changed["buffers"][0]["buckets"][0]["parameters"][0][name] = value
        bad.append({"optimizer_layouts": [changed]})
    texts = [json.dumps(each) for each in bad] + ["", "{", "[" * 100_000]
    for text in texts:
        (tmp_path / "layout.json").write_text(text)
        with pytest.raises(tilestone.CheckpointError) as raised:
            tilestone.convert(
                tmp_path / "a", tmp_path / "b", format="torch_dist", layout=tmp_path / "layout.json"
            )
        assert raised.value.file == str(tmp_path / "layout.json"), text[:300]
    with pytest.raises(tilestone.NotFoundError):
        tilestone.convert(tmp_path / "a", tmp_path / "b", layout=tmp_path / "none.json")


def test_states_that_need_or_have_no_conversion_are_named(tmp_path: pathlib.Path) -> None:
    def refused(error: type[Exception], text: str, name: str) -> None:
        with pytest.raises(error, match=text):
            tilestone.convert(tmp_path / name, tmp_path / "b", format="torch_dist", optimizer=FULLY)

    _save(Ranks(1, 1, 2), FULLY, str(tmp_path / "whole"))
    refused(tilestone.InvalidArgumentError, "already stored by parameter", "whole")
    tilestone.save({"model": {"w": torch.ones(2)}}, tmp_path / "model")
    refused(tilestone.NotFoundError, "does not hold the state of a distributed", "model")
    fsdp = {"state": {"w": {"exp_avg": torch.ones(2)}}, "param_to_group_meta": {"w": {"lr": 0.5}}}
    tilestone.save({"model": {"w": torch.ones(2)}, "optimizer": fsdp}, tmp_path / "fsdp")
    refused(tilestone.UnsupportedError, "stored as fsdp_dtensor", "fsdp")
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    refused(tilestone.InvalidArgumentError, "torch.save", "a.pt")
    # Without the option, buckets are copied as they are.
    _save(Ranks(1, 1, 2), "dp_reshardable", str(tmp_path / "buckets"))
    tilestone.convert(tmp_path / "buckets", tmp_path / "copy", format="torch_dist")
    keys = [tilestone.open(tmp_path / name).tensor_keys() for name in ("buckets", "copy")]
    assert keys[0] == keys[1]


def test_memory_is_bounded_by_windows_not_by_the_buckets(tmp_path: pathlib.Path) -> None:
    rows = 1 << 14
    entity = megatron.ShardedTensor.from_rank_offsets("w", torch.empty(rows, 2048, device="meta"))
    layout = Layout((pack([entity], 1),))
    shard = OptimizerShard.allocated(layout, 0, 1, {"param": torch.float32}, common=om.common())
    (states,) = shard.states.values()
    states["param"].copy_(torch.arange(rows * 2048, dtype=torch.float32))
    state = optimizer_state([shard], "dp_reshardable", with_layout=False)
    megatron.save({"optimizer": {**state, "layout": layout_object(shard)}}, str(tmp_path / "a"))
    del state, shard, states
    program = (
        "import resource, tilestone; before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "tilestone.convert('a', 'b', format='torch_dist', optimizer='fully_reshardable',"
        " resources=tilestone.Resources(buffer_bytes=16 << 20));"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < (16 + 64 + 16) << 10  # KiB; the tensor has 128 MiB
    found = tilestone.open(tmp_path / "b")["optimizer.state.param.w"].torch()
    assert torch.equal(found.flatten(), torch.arange(rows * 2048, dtype=torch.float32))
