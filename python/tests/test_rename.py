"""Loads under other names, and the errors that say which names would match."""

from __future__ import annotations

import pathlib

import numpy
import pytest
import tilestone


def saved(path: pathlib.Path, prefix: str, count: int = 7) -> pathlib.Path:
    tilestone.save({f"{prefix}layers.{i}.w": numpy.full(3, i) for i in range(count)}, path)
    return path


def wanted(prefix: str = "", count: int = 7) -> dict[str, numpy.ndarray]:
    return {f"{prefix}layers.{i}.w": numpy.zeros(3, dtype=int) for i in range(count)}


def test_a_load_renames_the_keys_of_the_checkpoint(tmp_path: pathlib.Path) -> None:
    path = saved(tmp_path / "ckpt", "_orig_mod.")
    for rename in (
        tilestone.strip_prefix("_orig_mod."),
        lambda key: key.removeprefix("_orig_mod."),
        [(r"^_orig_mod\.(.*)$", r"\1")],
    ):
        state = wanted()
        tilestone.load(state, path, rename=rename)
        assert all((state[f"layers.{i}.w"] == i).all() for i in range(7))
    assert set(tilestone.load(path, rename=tilestone.strip_prefix("_orig_mod."))) == set(wanted())
    hidden = tilestone.load(path, rename=lambda key: key if key.endswith("3.w") else "")
    assert list(hidden) == ["_orig_mod.layers.3.w"]
    with pytest.raises(tilestone.InvalidArgumentError, match="same name"):
        tilestone.load(wanted(), path, rename=lambda key: "w")
    with pytest.raises(tilestone.InvalidArgumentError, match="rename"):
        tilestone.load(wanted(), path, rename=5)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        tilestone.load(wanted(), path, rename=lambda key: str(1 // 0))


def test_a_prefix_may_begin_any_part_of_a_key() -> None:
    strip = tilestone.strip_prefix("_orig_mod.")
    assert strip("_orig_mod.w") == "w"
    assert strip("model._orig_mod.w") == "model.w"
    assert strip("my_orig_mod.w") == "my_orig_mod.w"
    assert tilestone.add_prefix("module.")("w") == "module.w"


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "model."])
def test_a_common_prefix_is_found_and_named(tmp_path: pathlib.Path, prefix: str) -> None:
    path = saved(tmp_path / "ckpt", prefix)
    with pytest.raises(tilestone.NotFoundError) as raised:
        tilestone.load(wanted(), path)
    assert "7 of 7 requested keys are not in the checkpoint: layers.0.w, layers.1.w" in str(raised.value)
    assert "layers.6.w" not in str(raised.value)
    assert f'rename=tilestone.strip_prefix("{prefix}")' in raised.value.hint
    with pytest.raises(tilestone.NotFoundError) as raised:
        tilestone.load(wanted(prefix), saved(tmp_path / "plain", ""))
    assert f'rename=tilestone.add_prefix("{prefix}")' in raised.value.hint
    state = wanted(prefix)
    tilestone.load(state, tmp_path / "plain", rename=tilestone.add_prefix(prefix))
    assert (state[f"{prefix}layers.6.w"] == 6).all()


def test_missing_keys_are_counted_and_the_option_that_helps_is_named(tmp_path: pathlib.Path) -> None:
    path = saved(tmp_path / "ckpt", "")
    with pytest.raises(tilestone.NotFoundError) as raised:
        tilestone.load(wanted() | wanted("new."), path)
    assert "7 of 14 requested keys" in str(raised.value)
    assert 'Differences(not_in_checkpoint="report")' in raised.value.hint


def test_megatrons_hints_name_what_its_load_takes(tmp_path: pathlib.Path) -> None:
    import torch
    from tilestone import megatron

    path, shard = tmp_path / "ckpt", megatron.ShardedTensor.from_rank_offsets
    halves = {str(i): megatron.ShardedObject("rng", i, (2,), (i,)) for i in range(2)}
    megatron.save({"a": shard("module.a", torch.ones(2)), **halves}, path)

    def hint(**wanted: object) -> str:
        with pytest.raises(megatron.CheckpointingException) as raised:
            megatron.load(wanted, path)
        assert str(raised.value).endswith(raised.value.hint)
        return raised.value.hint

    new, newer = (shard(key, torch.ones(2)) for key in ("new", "newer"))
    for found in (hint(new=new), hint(new=new, newer=newer)):
        assert "Differences" not in found and 'strict="log_unexpected"' in found
        assert found.endswith("loads the others")
    loaded = megatron.load(
        {"a": shard("module.a", torch.zeros(2)), "new": new}, path, strict="log_unexpected"
    )
    assert list(loaded) == ["a"]
    assert hint(a=shard("a", torch.ones(2))) == 'the checkpoint\'s keys have the prefix "module."'
    assert hint(a=shard("module.a", torch.ones(3))).endswith("zero-fills the rest")
    assert hint(a=shard("module.a", torch.ones(2, 1))) == ""
    whole = hint(rng=megatron.ShardedObject("rng", None, (1,), (0,)))
    assert "rng/shard_0_2" in whole and "strict" not in whole
    assert whole.endswith("objects can't be resharded: request the places of the save")
    with pytest.raises(tilestone.InvalidArgumentError, match=r"common_differs must be") as raised:
        megatron.save({}, path, common_differs="some")
    assert raised.value.message.startswith("Checks.common_differs must be")


def test_a_scheduler_that_does_not_exist_yet_is_named(tmp_path: pathlib.Path) -> None:
    state = {"group": {"lr": 0.1, "initial_lr": 0.2}}
    tilestone.save(state, tmp_path / "ckpt")
    with pytest.raises(tilestone.MismatchError, match="scheduler before the load") as raised:
        tilestone.load(
            {"group": {"lr": 0.0}}, tmp_path / "ckpt",
            differences=tilestone.Differences(not_requested="error"),
        )  # fmt: skip
    assert raised.value.key == "group.initial_lr"
