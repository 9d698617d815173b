"""Saves in the background with stage="lazy"."""

from __future__ import annotations

import pathlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from children import in_child
from thread_ranks import run_ranks

import tilestone

LARGE = (130, 140)  # more than is copied in the call


def saved(path: pathlib.Path, key: str) -> torch.Tensor:
    return torch.as_tensor(tilestone.load(path, group=tilestone.solo())[key])


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found: dict[str, Any] = {}
    for key, value in items:
        inner = isinstance(value, (dict, list, tuple))
        found.update(flat(value, f"{path}/{key}") if inner else {f"{path}/{key}": value})
    return found


def expect_changed(saving: tilestone.AsyncSave, key: str, rank: int = -1) -> None:
    error = saving.durable.exception(60)
    assert isinstance(error, tilestone.InvalidArgumentError), error
    assert error.key == key and "was changed" in str(error) and error.rank == rank
    assert saving.staged.done()


def apply_around_the_seal(
    saving: tilestone.AsyncSave, operations: list[Callable[[], object]], early: int,
    moments: random.Random,
) -> None:  # fmt: skip
    """Calls the operations at random moments, the first `early` of them before the seal."""
    for at, change in enumerate(operations):
        if at == early:
            saving.staged.exception()
        moment = time.perf_counter() + moments.uniform(0, 0.001)
        while time.perf_counter() < moment:
            pass
        change()


def changes(choose: random.Random, tensor: torch.Tensor) -> Callable[[], object]:
    """An operation that changes the tensor, in one of many ways."""
    view = tensor.view(-1)[choose.randrange(18_000) :]
    part = tensor.t()[10:20]
    other = torch.ones(LARGE)
    parameter = torch.nn.Parameter(tensor)  # the same memory
    parameter.grad = torch.ones(LARGE)
    return choose.choice((
        lambda: tensor.add_(1), lambda: tensor.mul_(2).sub_(7), lambda: view.add_(1),
        lambda: part.copy_(part + 3), lambda: tensor.__setitem__((17, 5), -1.0),
        lambda: torch.add(tensor, 1, out=tensor), lambda: torch._foreach_add_([tensor], 1.0),
        lambda: tensor.copy_(tensor + other), lambda: tensor.zero_().fill_(-2),
        lambda: torch.nn.init.constant_(tensor, -3), lambda: parameter.detach().add_(1),
        lambda: torch.inference_mode()(tensor.add_)(1),
        lambda: torch.optim.SGD([parameter], lr=1.0, foreach=False).step.__wrapped__(
            torch.optim.SGD([parameter], lr=1.0, foreach=False)
        ),
    ))  # fmt: skip


def test_a_thousand_changes_by_torch_at_random_moments(tmp_path: pathlib.Path) -> None:
    """In 250 saves, four each. What comes before the state is sealed is noticed, and a changed key
    is named; what comes after it leaves the bytes of the call."""
    choose = random.Random(0)
    state = {key: torch.randn(LARGE) for key in "abcd"}
    found = {True: 0, False: 0}
    with tilestone.Session() as session, torch.no_grad():
        for number in range(250):
            before = {key: tensor.clone() for key, tensor in state.items()}
            keys = choose.sample("abcd", 4)
            early = keys[: choose.choice((0, 0, 0, 1, 2, 4))]
            operations = [changes(choose, state[key]) for key in keys]
            saving = session.async_save(
                state, tmp_path / "x", stage="lazy", overwrite=True, on_error="warn"
            )
            apply_around_the_seal(saving, operations, len(early), choose)
            found[bool(early)] += 1
            if not early:
                assert saving.result(60).published
                for name, expected in before.items():
                    assert torch.equal(saved(tmp_path / "x", name), expected), (number, name)
                continue
            error = saving.durable.exception(60)
            assert isinstance(error, tilestone.InvalidArgumentError), error
            assert error.key in early and "was changed" in str(error)
            state = {key: torch.randn(LARGE) for key in "abcd"}
    assert min(found.values()) > 100


def test_a_large_operation_that_runs_while_the_tensor_is_read_is_noticed(
    tmp_path: pathlib.Path,
) -> None:
    """The operation raises the counter when it has ended. The reader sees changed bytes before."""
    large = torch.zeros(8 << 20)
    for number in range(20):
        saving = tilestone.async_save(
            {"large": large}, tmp_path / "x", stage="lazy", overwrite=True, on_error="warn"
        )
        time.sleep(0.001 * (number % 10))
        large.add_(1)
        expect_changed(saving, "large")
    saving = tilestone.async_save({"large": large}, tmp_path / "x", stage="lazy", overwrite=True)
    saving.staged.result()
    large.add_(1)
    assert saving.result(60).published
    assert torch.equal(saved(tmp_path / "x", "large"), torch.full_like(large, 20))


@pytest.mark.parametrize("fused", [False, True])
def test_the_step_of_an_optimizer_ends_the_staging(tmp_path: pathlib.Path, fused: bool) -> None:
    """Also of a fused one, which raises no counters. Tied parameters, optimizer state, views,
    running statistics, other arrays, and the file's bytes."""
    model = torch.nn.Sequential(
        torch.nn.Linear(150, 150), torch.nn.BatchNorm1d(150), torch.nn.Linear(150, 150)
    )
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused, foreach=not fused)
    array = numpy.arange(100_000.0)

    def step() -> None:
        model(torch.randn(8, 150)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    for turn in range(4):
        given = {
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), "array": array,
            "part": model[0].weight.detach().t()[:140], "turn": turn,
        }  # fmt: skip
        tilestone.save(given, tmp_path / f"copy{turn}")
        files: dict[str, Any] = {}
        if turn > 1:
            files["by_files"] = tilestone.ByFiles(0, 1, "a run of a test", number=turn)
        saving = tilestone.async_save(given, tmp_path / f"lazy{turn}", stage="lazy", **files)
        assert not saving.staged.done() and not saving.done()
        array += 1
        step()
        assert saving.staged.done()
        step()
        assert saving.result(60).published
        assert tilestone.open(tmp_path / f"lazy{turn}").verify().ok
        copied, lazy = (flat(tilestone.load(tmp_path / f"{way}{turn}")) for way in ("copy", "lazy"))
        assert copied.keys() == lazy.keys()
        for path, value in copied.items():
            assert numpy.array_equal(numpy.asarray(value), numpy.asarray(lazy[path])), path


def test_a_step_in_another_thread_seals_what_its_optimizer_keeps_in_any_container(
    tmp_path: pathlib.Path,
) -> None:
    """Some optimizers keep numbers and lists beside the states of parameters."""
    weight, other, moment = (torch.zeros(LARGE) for _ in range(3))
    saving = tilestone.async_save({"moment": moment}, tmp_path / "x", stage="lazy")
    for kept, seals in ((other, False), (moment, True)):
        optimizer = torch.optim.SGD([weight])
        optimizer.state.update({"step": 3, "buckets": [{"m": (kept,)}], weight: {}})
        weight.grad = torch.ones(LARGE)
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()
        assert saving.staged.done() == seals
    assert saving.result(60).published


def test_what_torch_does_not_count_is_copied_in_the_call(tmp_path: pathlib.Path) -> None:
    with torch.inference_mode():
        inference = torch.zeros(LARGE)
    given = {
        "array": numpy.zeros(LARGE), "inference": inference, "small": torch.zeros(10),
        "conjugated": torch.zeros(LARGE, dtype=torch.complex64).conj(),
    }  # fmt: skip
    saving = tilestone.async_save(given, tmp_path / "x", stage="lazy")
    assert saving.staged.done()
    given["array"] += 1
    given["small"] += 1
    with torch.inference_mode():
        given["inference"] += 1
    assert saving.result(60).published
    assert not any(numpy.asarray(each).any() for each in tilestone.load(tmp_path / "x").values())
    with pytest.raises(tilestone.InvalidArgumentError, match="stage must be"):
        tilestone.async_save(given, tmp_path / "y", stage="later")


def test_new_memory_for_a_parameter_leaves_the_snapshot(tmp_path: pathlib.Path) -> None:
    layer = torch.nn.Linear(1000, 1000)
    before = layer.weight.detach().clone()
    saving = tilestone.async_save({"w": layer.weight}, tmp_path / "x", stage="lazy")
    layer.weight.data = torch.zeros(1000, 1000)
    assert saving.result(60).published
    assert torch.equal(saved(tmp_path / "x", "w"), before)


def uncounted(tensor: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Ways to change all of a tensor that raise no counter of it."""
    norm = torch.nn.BatchNorm1d(tensor.numel())
    norm._buffers["running_mean"] = tensor.view(-1)
    array = tensor.numpy()
    other = torch.from_numpy(array)
    step = torch.tensor(1.0)
    moments = [torch.ones_like(tensor) for _ in range(3)]
    lists = [[each] for each in (tensor, *moments)]
    return {
        "data": lambda: tensor.data.add_(1),
        "numpy": lambda: array.__iadd__(1),
        "other name": lambda: other.add_(1),
        "part": lambda: tensor.data[100:].add_(1),
        "running statistics": lambda: norm(torch.ones(2, tensor.numel())),
        "fused": lambda: torch._fused_adamw_(
            *lists, [], [step], lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.1, eps=1e-8,
            amsgrad=False, maximize=False,
        ),
    }  # fmt: skip


def test_changes_that_torch_does_not_count_are_noticed_by_samples(tmp_path: pathlib.Path) -> None:
    for name in uncounted(torch.zeros(LARGE)):
        tensor = torch.full(LARGE, 0.5)
        change = uncounted(tensor)[name]
        counter = tensor._version
        saving = tilestone.async_save({"w": tensor}, tmp_path / "x", stage="lazy", on_error="warn")
        change()
        assert tensor._version == counter and not (tensor == 0.5).all(), name
        expect_changed(saving, "w")


def test_a_save_that_nobody_seals_is_sealed_by_the_next_or_fails_at_its_timeout(
    tmp_path: pathlib.Path,
) -> None:
    for by_files in (False, True):
        files: dict[str, Any] = {}
        if by_files:
            files["by_files"] = tilestone.ByFiles(0, 1, "a run of a test", number=1)
        path = tmp_path / str(by_files)
        saving = tilestone.async_save(
            {"w": torch.zeros(LARGE)}, path, stage="lazy", timeout=1, **files
        )
        while not saving.done():
            time.sleep(0.01)
        with pytest.raises(tilestone.TimeoutError, match=r"not called staged.result\(\)"):
            saving.result()
        assert not list(path.glob("*.distcp"))
    with tilestone.Session() as session:
        for in_flight in ("wait", "skip"):
            given = torch.zeros(LARGE)
            first = session.async_save(
                {"w": given}, tmp_path / "a", stage="lazy", overwrite=True, on_error="warn"
            )
            second = session.async_save(
                {"w": given + 1}, tmp_path / "b", overwrite=True, in_flight=in_flight
            )
            assert first.staged.done()
            given.add_(1)
            assert first.result(60).published and second.result(60) is not None
            assert not saved(tmp_path / "a", "w").any()
        # A failure before the state is sealed; and the result of a lazy save seals.
        given = torch.zeros(LARGE)
        abandoned = session.async_save({"w": given}, tmp_path / "c", stage="lazy")
        abandoned.abandon()
        while not abandoned.done():
            time.sleep(0.01)
        assert isinstance(abandoned.durable.exception(60), tilestone.InterruptedError)
        assert abandoned.staged.exception() is not None
        both = {"w": given, "v": torch.ones(LARGE)}
        last = session.async_save(both, tmp_path / "c", stage="lazy", max_staged_bytes=100_000)
        assert last.result(60).published
        assert saved(tmp_path / "c", "v").all() and not saved(tmp_path / "c", "w").any()


def test_the_failure_of_one_rank_reaches_all(tmp_path: pathlib.Path) -> None:
    """Ranks are threads. Each has an optimizer; its step seals only the saves of its own thread."""
    world = 3
    gate = threading.Barrier(world, timeout=20)

    def run(comm: tilestone.Communicator) -> None:
        own = torch.zeros(LARGE)
        parameter = torch.nn.Parameter(torch.zeros(3))
        parameter.grad = torch.ones(3)
        optimizer = torch.optim.SGD([parameter], fused=True)
        with tilestone.Session(group=comm) as session:
            for turn in range(4):
                given = {
                    "w": tilestone.ShardedTensor.from_rank_offsets("w", own, (0, comm.rank, world))
                }
                saving = session.async_save(
                    given, tmp_path / str(turn), stage="lazy", on_error="warn", timeout=60
                )
                gate.wait()
                if turn == 0:
                    assert not saving.staged.done()
                    if comm.rank == 0:
                        optimizer.step()
                    gate.wait()
                    assert saving.staged.done() == (comm.rank == 0)
                if comm.rank == turn - 1 < 2:  # on the coordinator, and on another rank
                    own.add_(1)
                optimizer.step()
                if turn in (1, 2):
                    expect_changed(saving, "w", turn - 1)
                else:
                    own.add_(0)
                    assert saving.result(60).published

    run_ranks(world, run)
    for turn in ("1", "2"):
        assert not (tmp_path / turn / ".metadata").exists()
        assert not list((tmp_path / turn).glob("*.distcp"))
    tilestone.load(tmp_path / "3")


def test_a_manager_saves_lazily(tmp_path: pathlib.Path) -> None:
    """The next save, `wait` and the end of the manager seal what no optimizer has sealed."""
    tensor = torch.zeros(LARGE)
    options: Any = {"stage": "lazy", "timeout": 30}
    with tilestone.CheckpointManager(tmp_path / "run", group=tilestone.solo(), **options) as manager:
        for step in range(1, 5):
            assert manager.save(step, {"w": tensor})
            saving = manager._in_flight.saving
            assert not saving.staged.done()
            if step == 2:
                manager.wait()
            elif step == 3:
                saving.staged.result()
                tensor.fill_(3)
    for step, value in ((1, 0), (2, 0), (3, 0), (4, 3)):
        assert (saved(tmp_path / "run" / f"step-{step:08}", "w") == value).all()
    with pytest.raises(tilestone.InvalidArgumentError, match="stage"):
        tilestone.CheckpointManager(tmp_path / "run", async_save=False, stage="lazy")


def interrupt_at_the_end_of_the_call(
    parameter: torch.nn.Parameter, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There must be no save left that steps do not seal. The parameter is 0, its gradient 1."""
    from tilestone import _core
    from tilestone._torch import live

    optimizer = torch.optim.SGD([parameter], lr=1.0, foreach=False)
    start = _core.async_save

    def interrupted(*given: Any) -> None:
        start(*given)
        raise KeyboardInterrupt

    def refuses(*_: Any) -> None:
        raise KeyboardInterrupt

    with tilestone.Session(group=tilestone.solo()) as session:
        # Once the engine has returned: the save goes on, and the step seals it.
        with monkeypatch.context() as patch:
            patch.setattr(_core, "async_save", interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.async_save({"w": parameter}, tmp_path / "a", stage="lazy")
        optimizer.step()
        session.save({}, tmp_path / "b")  # waits, and would raise the save's error
        assert not saved(tmp_path / "a", "w").any()
        # Before it is known to the steps: the save ends.
        with monkeypatch.context() as patch:
            patch.setattr(live, "_seal_before_steps", refuses)
            with pytest.raises(KeyboardInterrupt):
                session.async_save({"w": parameter}, tmp_path / "c", stage="lazy", on_error="warn")
        optimizer.step()
        session.async_save({"w": parameter}, tmp_path / "d", stage="lazy", timeout=30).result(60)
        assert not (tmp_path / "c" / ".metadata").exists()
        assert (saved(tmp_path / "d", "w") == -2).all()
    assert not live._pending


def test_ctrl_c_at_the_end_of_the_call(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(LARGE))
    parameter.grad = torch.ones(LARGE)
    interrupt_at_the_end_of_the_call(parameter, tmp_path, monkeypatch)


def expect_no_part_of_a_forked_child(large: torch.Tensor, tmp_path: pathlib.Path) -> None:
    """In a lazy save of `large`, which is 0."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter])
    saving = tilestone.async_save({"w": large}, tmp_path / "a", stage="lazy")

    def child() -> None:
        optimizer.step()
        with pytest.raises(tilestone.UnsupportedError, match="forked"):
            saving.staged.result()

    assert in_child(child) == 0
    assert not saving.staged.done()
    optimizer.step()
    large.add_(1)
    assert saving.result(60).published and not saved(tmp_path / "a", "w").any()


def test_a_forked_child_has_no_part_in_a_lazy_save(tmp_path: pathlib.Path) -> None:
    expect_no_part_of_a_forked_child(torch.zeros(LARGE), tmp_path)


PROGRAM = """
import sys
import torch, tilestone

tensor = torch.full((130, 140), float(sys.argv[2]))
tilestone.async_save({"w": tensor}, sys.argv[1], stage="lazy", overwrite=True)
assert "torch.distributed.tensor" not in sys.modules  # importing it takes a second
if sys.argv[3] == "changed":
    tensor.add_(1)
if sys.argv[3] == "exception":
    raise RuntimeError("the program fails")
"""


def test_the_end_of_the_program_seals(tmp_path: pathlib.Path) -> None:
    for value, end, expected in ((1, "return", 1), (2, "changed", 1), (3, "exception", 3)):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "a"), str(value), end]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == (1 if end == "exception" else 0), done.stderr
        assert (saved(tmp_path / "a", "w") == expected).all(), done.stderr
