"""How the groups of Megatron's parallelism are found, tested in one process.

test_megatron_model_helpers.py tests real groups and Megatron's own parallel_state.
"""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

import pytest

import tilestone
from tilestone.megatron import groups

FUNCTIONS = {
    "tp": ("get_tensor_model_parallel_group", {}),
    "pp": ("get_pipeline_model_parallel_group", {}),
    "cp": ("get_context_parallel_group", {}),
    "dp": ("get_data_parallel_group", {}),
    "dp_cp": ("get_data_parallel_group", {"with_context_parallel": True}),
    "ep": ("get_expert_model_parallel_group", {}),
    "expt_tp": ("get_expert_tensor_parallel_group", {}),
    "expt_dp": ("get_expert_data_parallel_group", {}),
}


class _Fake:
    """A process group."""

    def __init__(self, *ranks: int, here: int = 0) -> None:
        self.ranks, self.here = ranks, here

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(self.here) if self.here in self.ranks else -1


@pytest.fixture
def no_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "megatron.core.parallel_state", raising=False)
    monkeypatch.setattr(groups, "_logged", set())


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, no_megatron: None) -> dict[str, int]:
    """A fake torch.distributed of 8 ranks that accepts groups of class _Fake. This is rank 0."""
    told = {"rank": 0, "size": 8}

    def ranks_of(group: Any) -> list[int]:
        if not isinstance(group, _Fake):
            raise KeyError(group)
        return list(group.ranks)

    monkeypatch.setattr(
        groups, "dist", types.SimpleNamespace(
            is_initialized=lambda: True,
            get_rank=lambda: told["rank"],
            get_world_size=lambda: told["size"],
            get_process_group_ranks=ranks_of,
            GroupMember=types.SimpleNamespace(NON_GROUP_MEMBER=-100),
        ),
    )  # fmt: skip
    return told


@pytest.fixture
def parallel_state(monkeypatch: pytest.MonkeyPatch, world: dict[str, int]) -> Any:
    """A parallel_state in which groups[name] are initialized."""
    module: Any = types.ModuleType("megatron.core.parallel_state")
    module.groups = {}

    def function_of(function: str) -> Any:
        def get(check_initialized: bool = True, with_context_parallel: bool = False) -> Any:
            for name, (known, options) in FUNCTIONS.items():
                if known == function and ("with_context_parallel" in options) == (
                    with_context_parallel
                ):
                    found = module.groups.get(name)
                    if check_initialized:
                        assert found is not None, "not initialized"
                    return found
            raise NotImplementedError

        return get

    for function, _ in FUNCTIONS.values():
        setattr(module, function, function_of(function))
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", module)
    return module


def test_every_name_has_an_argument_and_is_one_of_megatrons_collection() -> None:
    assert groups.NAMES == tuple(FUNCTIONS)
    assert [groups.argument_of(name) for name in ("tp", "dp_cp", "expt_dp", "etp")] == [
        "tp_group", "dp_cp_group", "expt_dp_group", "expt_tp_group"
    ]  # fmt: skip
    from test_megatron_names import fields_of

    collection = fields_of("process_groups_config.py", "ProcessGroupCollection")
    assert set(groups.NAMES) <= set(collection)


@pytest.mark.parametrize("name", groups.NAMES)
def test_without_torch_distributed_a_group_is_this_rank_alone(name: str, no_megatron: None) -> None:
    found = groups.find_group(name)
    assert (found.size(), found.rank(), found.ranks, found.process_group) == (1, 0, None, None)
    assert found == groups.alone()


@pytest.mark.parametrize("name", groups.NAMES)
def test_a_group_is_the_argument_then_the_modules_then_parallel_states(
    name: str, parallel_state: Any
) -> None:
    given, own, collected, megatrons = (_Fake(0, n) for n in (1, 2, 3, 4))
    argument = groups.argument_of(name)
    collection = types.SimpleNamespace(**{name: collected})
    parallel_state.groups[name] = megatrons

    def found(given: Any, module: Any) -> Any:
        return groups.find_group(name, given, module).process_group

    assert found(given, types.SimpleNamespace(**{argument: own})) is given
    assert found(None, types.SimpleNamespace(**{argument: own})) is own
    assert found(None, types.SimpleNamespace(pg_collection=collection)) is collected
    wrapper = types.SimpleNamespace(module=types.SimpleNamespace(**{argument: own}))
    assert found(None, types.SimpleNamespace(module=wrapper)) is own
    assert found(None, types.SimpleNamespace(pg_collection=types.SimpleNamespace())) is megatrons
    assert found(None, None) is megatrons
    assert groups.find_group(name).ranks == (0, 4)


def test_dp_cp_may_be_in_the_metadata_before_the_module(parallel_state: Any) -> None:
    given, said, own = _Fake(0, 1), _Fake(0, 2), _Fake(0, 3)
    metadata = {"dp_cp_group": said}
    module = types.SimpleNamespace(dp_cp_group=own)
    assert groups.find_group("dp_cp", None, module, metadata).process_group is said
    assert groups.find_group("dp_cp", given, module, metadata).process_group is given
    assert groups.find_group("dp_cp", None, module, {"dp_cp_group": None}).process_group is own


def test_tp_and_dp_of_megatrons_expert_modules_are_the_expert_groups(
    parallel_state: Any,
) -> None:
    of_experts, dense = _Fake(0, 1), _Fake(0, 2)
    module = types.SimpleNamespace(
        ep_group=_Fake(0, 3), tp_group=of_experts, dp_group=of_experts, num_local_experts=2
    )
    parallel_state.groups |= {"tp": dense, "dp": dense}
    for name, expected in {"expt_tp": of_experts, "expt_dp": of_experts, "tp": dense, "dp": dense}.items():
        assert groups.find_group(name, None, module).process_group is expected


@pytest.mark.parametrize("name", groups.NAMES)
def test_with_several_ranks_a_missing_group_is_an_error_with_its_argument(
    name: str, parallel_state: Any
) -> None:
    others = {other: _Fake(0, 1) for other in groups.NAMES if other != name}
    parallel_state.groups |= others
    with pytest.raises(tilestone.InvalidArgumentError, match=f"{name}_group was not given") as caught:
        groups.find_group(name, None, types.SimpleNamespace())
    assert "SimpleNamespace has no" in str(caught.value)
    assert f"pass {name}_group" in caught.value.hint
    assert groups.find_group(name, groups.alone()).ranks == (0,)


def test_a_world_of_one_rank_needs_no_groups(world: dict[str, int]) -> None:
    world["size"] = 1
    assert groups.find_group("tp") == groups.Group(1, 0, (0,), None)


def test_an_invalid_group_is_refused_by_its_argument(world: dict[str, int]) -> None:
    for given in (-100, _Fake(1, 2)):
        with pytest.raises(tilestone.InvalidArgumentError, match="this rank is not in .* pp_group"):
            groups.find_group("pp", given)
    for given in (2, "tp", _Fake, object()):
        with pytest.raises(tilestone.InvalidArgumentError, match="tp_group is not a process group"):
            groups.find_group("tp", given)
    with pytest.raises(tilestone.InvalidArgumentError, match="'tensor' is not a group.* tp, pp"):
        groups.find_group("tensor")


def test_groups_of_parallel_state_are_logged_once_for_each_name(
    parallel_state: Any, caplog: pytest.LogCaptureFixture
) -> None:
    parallel_state.groups |= {"tp": _Fake(0, 1), "pp": _Fake(0, 2)}
    with caplog.at_level(logging.INFO, "tilestone.megatron"):
        for name in ("tp", "tp", "pp"):
            groups.find_group(name)
        groups.find_group("dp", _Fake(0, 1))
    assert [record.args[1] for record in caplog.records] == ["tp_group", "pp_group"]


def test_sizes_and_ranks_are_megatrons(world: dict[str, int], monkeypatch: Any) -> None:
    group = _Fake(3, 0)
    assert (groups.get_pg_size(group), groups.get_pg_rank(group)) == (2, 1)
    assert (groups.get_pg_size(), groups.get_pg_rank()) == (1, 0)
    assert groups.get_pg_size(groups.find_group("tp", group)) == 2
    monkeypatch.setattr(groups.dist, "is_initialized", lambda: False)
    assert (groups.get_pg_size(group), groups.get_pg_rank(group)) == (1, 0)


def _holders(rank: int, *given: tuple[int, ...]) -> Any:
    found = [groups.find_group("tp", _Fake(*ranks, here=rank)) for ranks in given]
    return groups.holders_of(*found)


def test_holders_are_the_product_of_groups(world: dict[str, int]) -> None:
    # TP 2 x DP 2 x PP 2, ranks in Megatron's order; rank 5 is TP 1, DP 0, PP 1.
    world["rank"] = 5
    assert _holders(5, (4, 5), (5, 7)) == (4, 5, 6, 7)
    assert _holders(5, (5, 7)) == (5, 7)
    assert _holders(5) == (5,)
    world |= {"rank": 3, "size": 16}  # TP 2, DP-CP 2 x 2 around PP 2
    assert _holders(3, (2, 3), (1, 3, 9, 11)) == (0, 1, 2, 3, 8, 9, 10, 11)


@pytest.mark.parametrize(
    "given",
    [
        [(0, 1), (0, 1)],  # not a product
        [(0, 1, 3)],  # not strided
        [(0, 1, 4, 5, 6, 7)],
        [(0, 7), (0, 4)],  # beyond the world
    ],
)
def test_unknown_holders_are_none(
    given: list[tuple[int, ...]], world: dict[str, int]
) -> None:
    assert _holders(0, *given) is None


def test_holders_of_groups_whose_ranks_are_not_known_are_none(world: dict[str, int]) -> None:
    class Other:
        def size(self) -> int:
            return 2

        def rank(self) -> int:
            return 1

    found = groups.find_group("tp", Other())
    assert (found.size(), found.rank(), found.ranks) == (2, 1, None)
    assert groups.holders_of(found) is None
