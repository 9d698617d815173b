"""Loads of templates that differ from the checkpoint, and loads without a template."""

from __future__ import annotations

import re
from typing import Any

import numpy
import pytest
import ranks
import tilestone
from tilestone import Differences
import torch


def saved(path: str) -> None:
    tilestone.save(
        {"a": torch.arange(4), "b": {"c": [torch.ones(2), {"n": 3}]}, "step": 7}, path,
        group=tilestone.solo(),
    )  # fmt: skip


class Unlike:
    """A leaf that is not a plain value."""


def test_leaves_that_are_not_in_the_checkpoint_are_the_templates_own(ckpt: str) -> None:
    saved(ckpt)
    swapped = numpy.arange(3, dtype=">i8")  # filled through other memory
    read_only = numpy.arange(5)
    read_only.flags.writeable = False
    leaf = Unlike()
    wanted: dict[str, Any] = {
        "a": torch.zeros(4, dtype=torch.int64),
        "new": {
            "filled": torch.full((3,), 5.0),
            "meta": torch.empty(3, device="meta"),
            "swapped": swapped,
            "read_only": read_only,
            "conj": torch.tensor([1 + 2j]).conj(),
            "leaf": leaf,
            "list": [1, 2],
            "sharded": tilestone.ShardedTensor.from_rank_offsets(
                "rows", torch.full((2,), 9.0), (0, 0, 1)
            ),
        },
    }
    for policy in ("report", "ignore"):
        report = tilestone.LoadReport()
        loaded = tilestone.load(
            wanted, ckpt,
            differences=Differences(not_in_checkpoint=policy, report=report),
        )
        new, template = loaded["new"], wanted["new"]
        assert loaded["a"] is wanted["a"] and loaded["a"].tolist() == [0, 1, 2, 3]
        for name in ("filled", "meta", "swapped", "read_only", "leaf", "list", "conj"):
            assert new[name] is template[name]
        assert new["filled"].tolist() == [5.0] * 3
        assert swapped.tolist() == [0, 1, 2]
        assert new["conj"].tolist() == [1 - 2j]
        assert new["sharded"] is template["sharded"].data and new["sharded"].tolist() == [9.0] * 2
        keys = sorted([*(f"new.{name}" for name in new if name != "sharded"), "rows"])
        assert report.not_in_checkpoint == (keys if policy == "report" else [])
        assert report.not_requested == report.other_shape == []
    with pytest.raises(tilestone.NotFoundError):
        tilestone.load(wanted, ckpt)


def build_rows(key: str, data: Any, replica_id: Any, flattened_range: Any) -> dict[str, Any]:
    make = tilestone.ShardedTensor.from_rank_offsets
    return {"x": make(f"{key}.x", data[:1]), "y": make(f"{key}.y", data[1:])}


def merge_rows(parts: dict[str, Any]) -> torch.Tensor:
    return torch.cat([torch.as_tensor(parts["x"]), torch.as_tensor(parts["y"])])


def test_a_missing_part_of_a_factory_is_the_templates_or_refused(ckpt: str) -> None:
    tilestone.save({"f.x": torch.ones(1)}, ckpt, group=tilestone.solo())

    def load(data: Any) -> Any:
        wanted = {"f": tilestone.ShardedTensorFactory("f", data, build_rows, merge_rows)}
        return tilestone.load(
            wanted, ckpt,
            differences=Differences(not_in_checkpoint="ignore"),
        )["f"].tolist()

    assert load(torch.full((2,), 7.0)) == [1, 7]
    assert load(numpy.full(2, 7.0, "f4")) == [1, 7]
    read_only = numpy.full(2, 7.0, "f4")
    read_only.flags.writeable = False
    for data in (torch.empty(2, device="meta"), read_only):  # filled through other memory
        with pytest.raises(tilestone.NotFoundError, match="the factory f can't be loaded"):
            load(data)


def test_a_module_keeps_what_is_not_there_and_reports_what_it_does_not_take(ckpt: str) -> None:
    saved_module = torch.nn.Linear(2, 2, bias=False)
    tilestone.save({"m": saved_module, "rest": 1}, ckpt, group=tilestone.solo())
    larger = torch.nn.Linear(2, 2)
    bias = larger.bias.detach().clone()
    report = tilestone.LoadReport()
    tilestone.load(
        {"m": larger}, ckpt,
        differences=Differences(not_in_checkpoint="report", report=report),
    )
    assert report == tilestone.LoadReport(["m.bias"], [], [])
    assert torch.equal(larger.weight, saved_module.weight) and torch.equal(larger.bias, bias)
    tilestone.save({"m": larger}, ckpt, overwrite=True, group=tilestone.solo())
    smaller = torch.nn.Linear(2, 2, bias=False)
    for policy in (None, "error"):
        with pytest.raises(tilestone.MismatchError, match="m.bias"):
            tilestone.load({"m": smaller}, ckpt, differences=Differences(not_requested=policy))
    tilestone.load(
        {"m": smaller}, ckpt,
        differences=Differences(not_requested="report", report=report),
    )
    assert report == tilestone.LoadReport([], ["m.bias"], [])
    other = torch.nn.Linear(3, 2, bias=False)
    weight = other.weight.detach().clone()
    tilestone.load(
        {"m": other}, ckpt,
        differences=Differences(other_shape="report", not_requested="ignore", report=report),
    )
    assert report == tilestone.LoadReport([], ["m.bias"], ["m.weight"])
    assert torch.equal(other.weight, weight)


def test_a_report_is_a_load_report() -> None:
    with pytest.raises(tilestone.InvalidArgumentError, match="report must be a LoadReport"):
        Differences(report=[])  # type: ignore[arg-type]


def test_a_report_is_filled_before_load_state_dict_is_called_and_emptied_before_a_load(
    ckpt: str,
) -> None:
    saved(ckpt)

    class Refusing:
        def state_dict(self) -> dict[str, Any]:
            return {"weight": torch.zeros(2, 3), "bias": torch.zeros(2), "more": torch.zeros(1)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ValueError("no")

    report = tilestone.LoadReport()
    with pytest.raises(ValueError, match="no"):
        tilestone.load(
            {"m": Refusing()}, ckpt,
            differences=Differences(
                not_in_checkpoint="report", other_shape="ignore", report=report
            ),
        )
    assert report == tilestone.LoadReport(["m.bias", "m.more", "m.weight"], [], [])
    with pytest.raises(tilestone.NotFoundError):
        tilestone.load({"absent": None}, ckpt, differences=Differences(report=report))
    assert report == tilestone.LoadReport()


def load_parts(rank: int, world: int, path: str) -> tuple[Any, str]:
    report = tilestone.LoadReport()
    wanted: dict[str, Any] = {"a": torch.zeros(4 + rank, dtype=torch.int64), f"extra{rank}": None}
    loaded = tilestone.load(
        wanted, path,
        differences=Differences(
            not_in_checkpoint="report", not_requested="report", other_shape="report", report=report
        ),
    )
    assert loaded["a"].tolist() == ([0, 1, 2, 3] if rank == 0 else [0] * 5)
    try:
        tilestone.load({"a": None if rank else torch.zeros(4, dtype=torch.int64)}, path,
                       differences=Differences(not_in_checkpoint="ignore", not_requested="error"))  # fmt: skip
    except tilestone.CheckpointError as error:
        return report, str(error)
    return report, ""


def test_a_report_is_the_union_over_all_ranks(worlds: ranks.Worlds, ckpt: str) -> None:
    saved(ckpt)
    for report, _ in worlds[2].run(load_parts, ckpt):
        assert report == tilestone.LoadReport(
            ["extra0", "extra1"], ["b.c.0", "b.c.1.n", "step"], ["a"]
        )


def test_a_policy_has_three_names() -> None:
    for name in ("not_in_checkpoint", "not_requested", "other_shape"):
        with pytest.raises(tilestone.InvalidArgumentError, match=f'{name} must be "error", "report"'):
            Differences(**{name: "perhaps"})


def test_a_refusal_names_a_policy_that_the_call_takes(ckpt: str) -> None:
    tilestone.save({"w": numpy.zeros(3), "x": numpy.ones(2)}, ckpt)
    for wanted in ({"w": numpy.zeros(4)}, {"w": numpy.zeros((3, 1))}, {"v": numpy.zeros(3)}):
        template = {**wanted, "x": numpy.zeros(2)}
        with pytest.raises(tilestone.CheckpointError) as refused:
            tilestone.load(template, ckpt)
        (named,) = re.findall(r"differences=(Differences\(\w+=\"\w+\"\))", str(refused.value))
        loaded = tilestone.load(template, ckpt, differences=eval(named))
        assert (loaded["x"] == 1).all()


def test_a_wrong_kind_of_state_or_path_is_named_by_its_type(ckpt: str) -> None:
    model: Any = torch.nn.Linear(2, 2)
    hint = r"a state must be a dict, not Linear; .*\{\"model\": model\}"
    with pytest.raises(tilestone.InvalidArgumentError, match=hint):
        tilestone.save(model, ckpt)
    path: Any = model.state_dict()
    with pytest.raises(tilestone.InvalidArgumentError, match="os.PathLike, not OrderedDict\n"):
        tilestone.save({"w": numpy.zeros(3)}, path)


def test_keys_that_no_rank_requests_can_be_an_error(ckpt: str) -> None:
    saved(ckpt)
    with pytest.raises(tilestone.MismatchError, match="not requested: a, b.c.0, b.c.1.n"):
        tilestone.load({"step": None}, ckpt, differences=Differences(not_requested="error"))


def test_a_load_of_a_path_gives_the_tree_as_it_was_saved(ckpt: str) -> None:
    saved(ckpt)
    loaded = tilestone.load(ckpt)
    assert list(loaded) == ["a", "b", "step"]
    assert loaded["a"].tolist() == [0, 1, 2, 3] and loaded["step"] == 7
    assert loaded["b"]["c"][0].tolist() == [1.0, 1.0]
    assert loaded["b"]["c"][1] == {"n": 3}
    with pytest.raises(tilestone.InvalidArgumentError, match="needs the checkpoint.s path"):
        tilestone.load({"a": None})


@pytest.mark.parametrize("format", ["torch_dist", "zarr"])
@pytest.mark.parametrize("dialect", ["pytorch", "megatron"])
def test_a_load_of_a_path_gives_all_of_every_format_and_dialect(
    ckpt: str, format: str, dialect: str
) -> None:
    entity = tilestone.ShardedTensor.from_rank_offsets("layer.w", torch.arange(3))
    state = {
        "entity": entity,
        "group": {"t": torch.tensor(2.5), "list": [1, 2], "tuple": (1, "x"), "leaf": Unlike()},
    }
    tilestone.save(state, ckpt, format=format, dialect=dialect, group=tilestone.solo())
    loaded = tilestone.load(ckpt)
    assert loaded["layer.w"].tolist() == [0, 1, 2]
    group = loaded["group"]
    assert sorted(group) == ["leaf", "list", "t", "tuple"]
    assert group["t"].item() == 2.5 and group["t"].shape == ()
    assert group["list"] == [1, 2] and group["tuple"] == (1, "x")
    assert isinstance(group["leaf"], tilestone.Opaque)


def load_all(rank: int, world: int, path: str) -> Any:
    return tilestone.load(path)["b"]["c"][0].tolist()


def test_every_rank_of_a_load_of_a_path_gets_everything(worlds: ranks.Worlds, ckpt: str) -> None:
    saved(ckpt)
    assert worlds[4].run(load_all, ckpt) == [[1.0, 1.0]] * 4


def load_differing(rank: int, world: int, path: str) -> str:
    policy: Any = None if rank else "ignore"
    with pytest.raises(tilestone.MismatchError) as raised:
        tilestone.load({"a": None}, path, differences=Differences(not_requested=policy))
    return str(raised.value)


def test_ranks_that_differ_in_a_policy_are_named(worlds: ranks.Worlds, ckpt: str) -> None:
    saved(ckpt)
    for text in worlds[2].run(load_differing, ckpt):
        assert 'differences.not_requested (rank 0: "ignore"; rank 1: not set)' in text
