"""Saves in the background of DTensors and of FSDP2's models, with stage="lazy"."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from test_lazy_save import LARGE, apply_around_the_seal, flat, saved

import tilestone


def dtensor_changes(tensor: Any) -> dict[str, Callable[[], object]]:
    """Operations that change a DTensor, whose alias is saved."""
    import torch.distributed as dist

    # In the call: a collective's result may still be on its way when the call returns.
    received = torch.ones_like(tensor._local_tensor)
    part = tensor.to_local()[1:5]
    return {
        "in place": lambda: tensor.add_(1), "copy": lambda: tensor.copy_(tensor + 1),
        "zero": lambda: tensor.mul_(2).sub_(7), "alias": lambda: tensor.detach().add_(1),
        "foreach": lambda: torch._foreach_add_([tensor], 1.0),
        "to_local": lambda: tensor.to_local().add_(1),
        "_local_tensor": lambda: tensor._local_tensor.mul_(2).sub_(7),
        "data": lambda: tensor.data.add_(1), "numpy": lambda: tensor.to_local().numpy().fill(-5),
        "part of it, counted": lambda: (part.add_(1), tensor.add_(0)),
        "collective": lambda: dist.all_reduce(tensor._local_tensor.add_(received)),
    }  # fmt: skip


STEPS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}


def _dtensor(whole: torch.Tensor) -> torch.nn.Parameter:
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))


def _torch_ranks(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Each change of a DTensor in turn, on rank 1 or on both; then steps of optimizers."""
    import torch.distributed as dist

    whole = torch.arange(160_000.0).view(400, 400)
    told: dict[str, Any] = {}
    names = list(dtensor_changes(_dtensor(whole)))
    for name in [*names, "plain", "none", *STEPS]:
        sharded = _dtensor(whole)
        plain = torch.full(LARGE, float(rank))
        given = {
            "sharded": sharded if name in ("none", "_local_tensor") else sharded.detach(),
            "plain": tilestone.ShardedTensor.from_rank_offsets("plain", plain, (0, rank, world)),
            "step": 3,
        }
        saving = tilestone.async_save(
            given, pathlib.Path(folder) / name, stage="lazy", on_error="warn"
        )
        staged = [saving.staged.done()]
        if name in names:
            with torch.no_grad():
                dtensor_changes(sharded)[name]()
        elif name == "plain" and rank == 1:
            plain.add_(1)
        elif name in STEPS:
            sharded.grad = torch.ones_like(sharded)
            STEPS[name]([sharded]).step()
            staged.append(saving.staged.done())
        dist.barrier()
        saving.staged.exception()
        plain.add_(1)
        with torch.no_grad():
            sharded.to_local().add_(1)
        error: Any = saving.durable.exception(60)
        told[name] = staged, error and (type(error).__name__, error.key, error.rank)
    return told


def test_ranks_of_torch_and_dtensors(worlds: Any, tmp_path: pathlib.Path) -> None:
    """A DTensor has two counters, which miss changes by other names; samples find these."""
    right = {"none": [False], **dict.fromkeys(STEPS, [False, True])}
    for rank, told in enumerate(worlds[2].run(_torch_ranks, str(tmp_path))):
        for name, (staged, error) in told.items():
            assert staged == right.get(name, [False]), name
            if name == "plain":
                assert error == ("InvalidArgumentError", "plain", 1)
            elif name not in right:
                assert error is not None and error[:2] == ("InvalidArgumentError", "sharded"), name
                assert not (tmp_path / name / ".metadata").exists()
            else:
                assert error is None, (name, error)
    for name in right:
        loaded = numpy.asarray(tilestone.load(tmp_path / name)["sharded"])
        assert numpy.array_equal(loaded.ravel(), numpy.arange(160_000.0)), name
    plain = saved(tmp_path / "none", "plain")
    assert not plain[:130].any() and (plain[130:] == 1).all()


def dtensors_at_random(rank: int, world: int, folder: str, rounds: int) -> dict[bool, int]:
    """As the test of a thousand changes above, on ranks, with DTensors and parameters of them."""
    choose = random.Random(5)  # the same on every rank
    moments = random.Random(rank)
    path = pathlib.Path(folder) / "x"
    found = {True: 0, False: 0}
    with tilestone.Session() as session, torch.no_grad():
        for number in range(rounds):
            torch.manual_seed(number)
            tensors = {key: _dtensor(torch.randn(300, 200)) for key in "abc"}
            before = {key: each.full_tensor().clone() for key, each in tensors.items()}
            keys = choose.sample("abc", 3)
            early = keys[: choose.choice((0, 0, 1, 3))]
            which = [choose.randrange(11) for _ in keys]
            operations = [
                list(dtensor_changes(tensors[key]).values())[i]
                for key, i in zip(keys, which, strict=True)
            ]
            given = {key: each if key == "a" else each.detach() for key, each in tensors.items()}
            saving = session.async_save(given, path, stage="lazy", overwrite=True, on_error="warn")
            apply_around_the_seal(saving, operations, len(early), moments)
            found[bool(early)] += 1
            error: Any = saving.durable.exception(60)
            if early:
                assert isinstance(error, tilestone.InvalidArgumentError), (number, error)
                assert error.key in early and "was changed" in str(error)
                continue
            assert error is None, (number, error)
            for key, expected in before.items():
                assert torch.equal(saved(path, key), expected), (number, key, which)
    return found


def test_dtensors_that_are_changed_at_random_moments(worlds: Any, tmp_path: pathlib.Path) -> None:
    for found in worlds[2].run(dtensors_at_random, str(tmp_path), 40):
        assert min(found.values()) > 5


def _fsdp_ranks(rank: int, world: int, folder: str, halves: bool, reshard: bool) -> list[str]:
    """What FSDP2 does to sharded memory in a step, while it is read. Returns what is wrong."""
    from test_fsdp import Block
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from tilestone._torch import live

    torch.manual_seed(7)
    model = torch.nn.Sequential(Block(150), Block(150))
    kind = torch.bfloat16 if halves else None
    policy = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32 if halves else None)
    for module in (*model, model):
        fully_shard(module, mp_policy=policy, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def forward_and_backward() -> None:
        for _ in range(2):  # gradients of two batches
            model(torch.randn(4, 150)).float().square().mean().backward()

    def memory() -> dict[str, tuple[int, int, int, int, bytes]]:
        found = {}
        for name, parameter in model.named_parameters():
            local = parameter.to_local()
            storage = local.untyped_storage()
            found[name] = (local.data_ptr(), storage.nbytes(), parameter._version,
                           parameter._local_tensor._version, local.detach().numpy().tobytes())
        return found

    wrong = []
    forward_and_backward()
    optimizer.step()
    read: set[int] = set()
    watch = live.Watched.watch
    live.Watched.watch = lambda self, arrays: (  # type: ignore[method-assign]
        read.update(address for *_, address in arrays), watch(self, arrays)
    )[1]
    for way in ("state_dict", "get_state_dict"):
        parts = get_state_dict(model, optimizer)
        given: Any = {"model": model.state_dict()} if way == "state_dict" else {
            "model": parts[0], "optimizer": parts[1]
        }  # fmt: skip
        place = pathlib.Path(folder)
        tilestone.save(given, place / "copy", overwrite=True)
        before = memory()
        read.clear()
        saving = tilestone.async_save(given, place / "lazy", stage="lazy", overwrite=True)
        own = {each[0] for each in before.values() if each[4]}
        if not own <= read:
            wrong.append(f"{way}: reads copies")
        forward_and_backward()
        if saving.staged.done():
            wrong.append(f"{way}: staged before the step")
        if memory() != before:
            wrong.append(f"{way}: forward and backward change sharded parameters")
        optimizer.step()
        if not saving.staged.done():
            wrong.append(f"{way}: the step does not seal")
        optimizer.zero_grad()
        if not saving.result(60).published:
            wrong.append(f"{way}: not published")
        copied, lazy = (flat(tilestone.load(place / each)) for each in ("copy", "lazy"))
        wrong += [
            f"{way}: {key} differs" for key, value in copied.items()
            if not numpy.array_equal(numpy.asarray(value), numpy.asarray(lazy[key]))
        ]  # fmt: skip
    live.Watched.watch = watch  # type: ignore[method-assign]
    return wrong


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("halves", [True, False])
def test_fsdp2_trains_while_its_shards_are_read(
    worlds: Any, tmp_path: pathlib.Path, halves: bool, reshard: bool
) -> None:
    for wrong in worlds[2].run(_fsdp_ranks, str(tmp_path), halves, reshard):
        assert wrong == []
