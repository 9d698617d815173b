"""Deltas of states that ranks hold, and their application to arrays in memory."""

import json
import pathlib
import shutil

import forced_device
import numpy
import pytest
import torch
from forced_device import put
from test_deltas import assert_same, changed, version
from thread_ranks import run_ranks

import tilestone


def part(tensor, rank, world, dim):
    """The bounds of a rank's part of a dim, which need not be equal."""
    size = tensor.shape[dim]
    return size * rank // world, size * (rank + 1) // world


def sharded(state, rank, world, dim):
    """The state as rank `rank` holds it: large tensors cut along a dim, the others replicated."""
    held = {}
    for key, tensor in state.items():
        if tensor.dim() < 2 or tensor.numel() == 0:
            held[key] = tensor.clone()
            continue
        begin, end = part(tensor, rank, world, dim)
        local = tensor.narrow(dim, begin, end - begin).clone()
        box = [(begin, end) if d == dim else (0, n) for d, n in enumerate(tensor.shape)]
        held[key] = tilestone.ShardedTensor.from_box(key, local, tuple(tensor.shape), box)
    return held


def whole(states, shapes, dim=1):
    """The tensors of all ranks, put together again."""
    made = {key: torch.empty_like(tensor) for key, tensor in shapes.items()}
    for rank, state in enumerate(states):
        for key, held in state.items():
            if isinstance(held, tilestone.ShardedTensor):
                begin, end = part(shapes[key], rank, len(states), dim)
                made[key].narrow(dim, begin, end - begin).copy_(held.data)
            else:
                made[key].copy_(held)
    return made


def save_versions(folder, versions, world, dim, **options):
    """Saves the versions from `world` ranks; returns what rank 0 got."""
    got = []

    def body(comm):
        last = None
        for state in versions:
            held = sharded(state, comm.rank, comm.size, dim)
            last = tilestone.save_delta(held, folder, base=last, group=comm, **options)
            if comm.rank == 0:
                got.append(last)

    run_ranks(world, body)
    return got


@pytest.fixture
def versions():
    torch.manual_seed(5)
    made = [version()]
    for share in (0.01, 0.5, 0.0, 0.02):
        made.append(version(share, made[-1]))
    return made


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 3), (3, 2), (4, 1)])
def test_any_sharding_on_both_sides_bit_for_bit(tmp_path, versions, writers, readers):
    got = save_versions(tmp_path / "v", versions, writers, 0, anchor_every=3)
    assert [each.whole for each in got] == [True, False, False, True, False]
    assert [each.number for each in got] == [0, 1, 2, 3, 4]
    assert got[1].report.base == got[0].report.result and got[1].report.bytes < got[1].report.whole_bytes
    states = [sharded(versions[0], rank, readers, 1) for rank in range(readers)]
    for number in (1, 2):
        folder = tmp_path / "v" / f"version-0000000{number}"
        run_ranks(readers, lambda comm: tilestone.apply_delta(states[comm.rank], folder, group=comm))
        assert_same(whole(states, versions[number]), versions[number])
    run_ranks(readers, lambda comm: tilestone.apply_delta(states[comm.rank], tmp_path / "v", group=comm))
    assert_same(whole(states, versions[4]), versions[4])


def test_a_directory_catches_up_from_any_version_and_from_none(tmp_path, versions):
    save_versions(tmp_path / "v", versions, 2, 0, anchor_every=4)
    shutil.rmtree(tmp_path / "v" / "version-00000004")  # not there yet: the newest is a delta
    for start in (*versions[:4], {key: torch.zeros_like(t) for key, t in versions[0].items()}):
        state = {key: tensor.clone() for key, tensor in start.items()}
        tilestone.apply_delta(state, tmp_path / "v", group=tilestone.solo())
        assert_same(state, versions[3])


def test_a_missed_base_is_refused_before_anything_changes_and_the_chain_is_named(tmp_path, versions):
    save_versions(tmp_path / "v", versions, 2, 0, anchor_every=10)
    state = {key: tensor.clone() for key, tensor in versions[0].items()}
    with pytest.raises(tilestone.MismatchError) as failed:
        tilestone.apply_delta(state, tmp_path / "v" / "version-00000002")
    assert "version-00000000 (whole), version-00000001, version-00000002" in str(failed.value)
    assert_same(state, versions[0])


def test_a_damaged_delta_is_found_before_anything_changes(tmp_path, versions):
    save_versions(tmp_path / "v", versions[:2], 2, 0, anchor_every=10)
    (path,) = (tmp_path / "v" / "version-00000001").glob("delta-00002*")
    content = bytearray(path.read_bytes())
    content[-3] ^= 16
    path.write_bytes(content)
    state = {key: tensor.clone() for key, tensor in versions[0].items()}
    with pytest.raises(tilestone.CorruptError):
        tilestone.apply_delta(state, tmp_path / "v" / "version-00000001")
    assert_same(state, versions[0])


def test_the_base_may_be_a_checkpoint_and_the_result_is_that_of_two_checkpoints(tmp_path, versions):
    old, new = versions[0], versions[1]
    tilestone.save(old, tmp_path / "a")
    tilestone.save(new, tmp_path / "b")

    def body(comm):
        held = sharded(new, comm.rank, comm.size, 1)
        tilestone.save_delta(held, tmp_path / "live", base=tmp_path / "a", group=comm)

    run_ranks(3, body)
    made = tilestone.save_delta(tmp_path / "b", tmp_path / "d.safetensors", base=tmp_path / "a")
    applied = tilestone.apply_delta(tmp_path / "a", tmp_path / "live", to=tmp_path / "c")
    assert (applied.base, applied.result) == (made.report.base, made.report.result)
    assert_same(tilestone.load(tmp_path / "c"), new)


def test_tensors_on_devices_and_strided_ones_change_in_place(tmp_path, versions):
    old, new = versions[0], versions[1]
    tilestone.save(old, tmp_path / "a")
    on_device = {key: put(tensor.clone()) for key, tensor in new.items()}
    last = tilestone.save_delta(on_device, tmp_path / "d", base=tmp_path / "a")
    assert last.report.changed > 5
    state = {key: put(tensor.clone()) for key, tensor in old.items()}
    tilestone.apply_delta(state, tmp_path / "d")
    assert_same({key: t.as_subclass(torch.Tensor) for key, t in state.items()}, new)
    strided = {key: t.mT.contiguous().mT if t.dim() == 2 else t.clone() for key, t in old.items()}
    versions_before = {key: tensor._version for key, tensor in strided.items()}
    tilestone.apply_delta(strided, tmp_path / "d")
    assert_same(strided, new)
    assert strided["large"]._version > versions_before["large"]


def test_a_failure_leaves_no_version_and_the_base_can_be_used_again(tmp_path, versions):
    first = tilestone.save_delta(versions[0], tmp_path / "v", anchor_every=10)
    lacking = {key: t for key, t in versions[1].items() if key != "scalar"}
    with pytest.raises(tilestone.MismatchError) as failed:
        tilestone.save_delta(lacking, tmp_path / "v", base=first, anchor_every=10)
    assert failed.value.key == "scalar"
    folder = tmp_path / "v" / "version-00000001"
    assert not folder.exists()
    with pytest.raises(tilestone.InvalidArgumentError) as failed:
        tilestone.save_delta({**versions[1], "step": 3}, tmp_path / "v", base=first, anchor_every=10)
    assert failed.value.key == "step"
    assert not folder.exists()
    folder.mkdir()
    (folder / "delta-00001-of-00002-0badc0de.safetensors").write_bytes(b"of a killed rank")
    tilestone.save_delta(versions[1], tmp_path / "v", base=first, anchor_every=10)
    assert len(list(folder.glob("delta-*"))) == 1
    state = {key: tensor.clone() for key, tensor in versions[0].items()}
    tilestone.apply_delta(state, tmp_path / "v")
    assert_same(state, versions[1])
    with pytest.raises(tilestone.InvalidArgumentError):
        tilestone.save_delta(versions[1], tmp_path / "v", base=first, anchor_every=10)  # was used
    first._kept = tilestone._core.DeltaBase()  # as after a failure once its version was complete
    with pytest.raises(tilestone.InvalidArgumentError, match="the base is lost"):
        tilestone.save_delta(versions[2], tmp_path / "x" / "d", base=first)
    with pytest.raises(tilestone.InvalidArgumentError):
        tilestone.save_delta(versions[1], tmp_path / "w")


def low_bit_flipped(tensor):
    """So many elements have changed, so little, that a delta has the XOR."""
    return (tensor.view(torch.int16) ^ (torch.rand(tensor.shape) < 0.5).short()).view(tensor.dtype)


@pytest.mark.parametrize("place", [torch.Tensor.clone, put])
def test_tied_tensors_get_each_xor_once(tmp_path, place):
    torch.manual_seed(8)
    tied = [torch.randn(300, 200).to(torch.bfloat16)]
    other = [tied[0].clone()]  # equal at first, but not tied
    for _ in range(2):
        tied.append(low_bit_flipped(tied[-1]))
        other.append(low_bit_flipped(other[-1]))
    last = None
    for t, o in zip(tied, other, strict=True):
        last = tilestone.save_delta({"a": t, "b": t, "o": o}, tmp_path / "v", base=last, anchor_every=9)
    assert b'\\"xor\\"' in (tmp_path / "v" / "version-00000001" / "delta.safetensors").read_bytes()
    memory = place(tied[0])
    state = {"a": memory, "b": memory.detach(), "o": place(other[0])}
    tilestone.apply_delta(state, tmp_path / "v")
    plain = {key: tensor.as_subclass(torch.Tensor) for key, tensor in state.items()}
    assert_same(plain, {"a": tied[2], "b": tied[2], "o": other[2]})


@pytest.mark.parametrize("place", [torch.Tensor.clone, put])
@pytest.mark.parametrize("view", [lambda w: w.view(-1), lambda w: w.t(), lambda w: w[:2]])
def test_memory_that_is_shared_in_another_way_is_refused_before_anything_changes(tmp_path, view, place):
    old = torch.randn(200, 200).to(torch.bfloat16)
    new = low_bit_flipped(old)
    last = tilestone.save_delta({"a": old, "b": view(old).clone()}, tmp_path / "v", anchor_every=9)
    tilestone.save_delta({"a": new, "b": view(new).clone()}, tmp_path / "v", base=last, anchor_every=9)
    memory = place(old.clone())
    with pytest.raises(tilestone.InvalidArgumentError, match="shares memory with") as failed:
        tilestone.apply_delta({"a": memory, "b": view(memory)}, tmp_path / "v")
    assert {failed.value.key, str(failed.value).split("memory with ")[1][0]} == {"a", "b"}
    assert_same({"a": memory.as_subclass(torch.Tensor)}, {"a": old})


def test_arrays_that_can_not_be_changed_in_place_are_refused(tmp_path, versions):
    old = {"a": numpy.arange(64.0)}
    last = tilestone.save_delta(old, tmp_path / "v", anchor_every=9)
    tilestone.save_delta({"a": old["a"] + 1}, tmp_path / "v", base=last, anchor_every=9)
    read_only = old["a"].copy()
    read_only.flags.writeable = False
    tilestone.save_delta(old, tmp_path / "whole", anchor_every=9)
    for array in (read_only, old["a"].astype(">f8")):
        for folder in ("v", "whole"):
            with pytest.raises(tilestone.InvalidArgumentError, match="in place"):
                tilestone.apply_delta({"a": array}, tmp_path / folder)
    notes = tilestone.open(tmp_path / "v" / "version-00000001").verify().notes
    assert any("delta.safetensors is a delta" in note for note in notes)
    with pytest.raises(tilestone.InvalidArgumentError, match="is a delta"):
        tilestone.save_delta(old, tmp_path / "x", base=tmp_path / "v" / "version-00000001")


def test_columns_of_one_memory_change(tmp_path):
    old = torch.randn(64, 64).to(torch.bfloat16)
    new = low_bit_flipped(old)
    last = None
    for each in (old, new):
        state = {"a": each[:, :20], "b": each[:, 20:]}
        last = tilestone.save_delta(state, tmp_path / "v", base=last, anchor_every=9)
    memory = old.clone()
    tilestone.apply_delta({"a": memory[:, :20], "b": memory[:, 20:]}, tmp_path / "v")
    assert_same({"w": memory}, {"w": new})


def test_a_missing_version_harms_only_those_before_it_and_changes_nothing(tmp_path, versions):
    save_versions(tmp_path / "v", versions[:4], 2, 0, anchor_every=10)
    shutil.rmtree(tmp_path / "v" / "version-00000001")
    for start in (0, 4):  # before the gap, and no version at all
        state = {key: tensor.clone() for key, tensor in versions[start].items()}
        with pytest.raises(tilestone.MismatchError):
            tilestone.apply_delta(state, tmp_path / "v")
        assert_same(state, versions[start])
    state = {key: tensor.clone() for key, tensor in versions[1].items()}
    tilestone.apply_delta(state, tmp_path / "v")
    assert_same(state, versions[3])


def test_a_tensor_added_in_a_chain_hinders_only_readers_before_it(tmp_path, versions):
    new = {"new": torch.arange(5.0)}
    chain = [versions[0], *({**each, **new} for each in versions[1:4])]
    save_versions(tmp_path / "v", chain, 2, 0, anchor_every=10)
    state = {key: tensor.clone() for key, tensor in chain[1].items()}
    tilestone.apply_delta(state, tmp_path / "v")
    assert_same(state, chain[3])
    for start in (chain[0], {key: torch.zeros_like(tensor) for key, tensor in chain[1].items()}):
        state = {key: tensor.clone() for key, tensor in start.items()}
        with pytest.raises((tilestone.MismatchError, tilestone.NotFoundError)) as failed:
            tilestone.apply_delta(state, tmp_path / "v")
        assert failed.value.key == "new"
        assert_same(state, start)


def twice(tensor):
    tensor["pieces"] *= 2


def huge(tensor):
    """128 MiB in one piece, of which a few bytes of XOR could be."""
    tensor.update(dtype="complex128", shape=[1 << 23])
    tensor["pieces"] = [{**tensor["pieces"][0], "offset": [0], "shape": [1 << 23], "kind": "xor"}]


@pytest.mark.parametrize(("harm", "said"), [(twice, "overlap"), (huge, "more than 64 MiB")])
def test_overlapping_and_huge_pieces_are_refused(tmp_path, versions, harm, said):
    save_versions(tmp_path / "v", versions[:2], 1, 0, anchor_every=10)
    path = tmp_path / "v" / "version-00000001" / "delta.safetensors"
    header = json.loads(path.read_bytes()[8:])
    tensors = json.loads(header["__metadata__"]["tensors"])
    with_pieces = next(tensor for tensor in tensors if tensor.get("pieces"))
    harm(with_pieces)
    header["__metadata__"]["tensors"] = json.dumps(tensors)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    state = {key: tensor.clone() for key, tensor in versions[0].items()}
    with pytest.raises(tilestone.CorruptError, match=said) as failed:
        tilestone.apply_delta(state, tmp_path / "v" / "version-00000001")
    assert failed.value.key == with_pieces["key"]
    assert_same(state, versions[0])


def test_a_base_that_is_not_the_version_before_is_refused(tmp_path, versions):
    save_versions(tmp_path / "v", versions[:2], 1, 0, anchor_every=10)
    for number in (0, 1):
        tilestone.save(versions[number], tmp_path / f"step-{number}")
    with pytest.raises(tilestone.MismatchError, match="version-00000001"):
        tilestone.save_delta(versions[3], tmp_path / "v", base=tmp_path / "step-0", anchor_every=10)
    tilestone.save_delta(versions[3], tmp_path / "v", base=tmp_path / "step-1", anchor_every=10)
    state = {key: tensor.clone() for key, tensor in versions[0].items()}
    tilestone.apply_delta(state, tmp_path / "v")
    assert_same(state, versions[3])


def test_a_whole_version_that_is_not_the_base_of_the_next_delta_is_an_error(tmp_path, versions):
    tilestone.save(versions[0], tmp_path / "v" / "version-00000000")
    tilestone.save(versions[1], tmp_path / "step")
    with pytest.raises(tilestone.MismatchError, match="has no id"):
        tilestone.save_delta(versions[2], tmp_path / "v", base=tmp_path / "step", anchor_every=20)
    tilestone.save_delta(versions[2], tmp_path / "v" / "other", base=tmp_path / "step")
    (tmp_path / "v" / "other").rename(tmp_path / "v" / "version-00000001")
    state = {key: tensor.clone() for key, tensor in versions[4].items()}
    with pytest.raises(tilestone.MismatchError, match="this is not the base of the delta"):
        tilestone.apply_delta(state, tmp_path / "v")
    assert_same(state, versions[0])


def test_a_whole_version_removes_what_a_killed_delta_has_left(tmp_path, versions):
    first = tilestone.save_delta(versions[0], tmp_path / "v", anchor_every=10)
    left = tmp_path / "v" / "version-00000001" / "delta-00001-of-00002-0badc0de.safetensors"
    left.parent.mkdir()
    left.write_bytes(b"of a killed rank")
    assert tilestone.save_delta(versions[1], tmp_path / "v", anchor_every=10).number == first.number + 1
    assert not left.exists()


@pytest.mark.parametrize(
    "bad", [{"anchor_every": 0}, {"anchor_every": 30}, {"path": 7}, {"base": 5}, {"base": "used"}]
)
def test_arguments_that_one_rank_refuses_fail_on_all_at_once(tmp_path, versions, bad):
    (tmp_path / "a").mkdir()

    def body(comm):
        given = {"path": tmp_path / "v", "base": None, "anchor_every": 20}
        used = tilestone.DeltaVersion("used", False, None)
        if comm.rank == 1:
            given |= bad if bad != {"base": "used"} else {"base": used}
        with pytest.raises((tilestone.InvalidArgumentError, tilestone.MismatchError)):
            tilestone.save_delta(versions[0], given.pop("path"), group=comm, timeout=60, **given)
        wrong = {"to": "x"} if comm.rank == 1 else {}
        with pytest.raises(tilestone.InvalidArgumentError, match="to is only for") as failed:
            tilestone.apply_delta(versions[0], tmp_path / "a", group=comm, timeout=60, **wrong)
        assert failed.value.rank == (1 if comm.rank == 0 else -1)  # -1: this one

    run_ranks(2, body)


def test_no_whole_version_is_saved_where_a_delta_is(tmp_path, versions):
    save_versions(tmp_path / "v", versions[:2], 1, 0, anchor_every=10)
    other = tilestone.save_delta(versions[0], tmp_path / "w", anchor_every=1)
    with pytest.raises(tilestone.AlreadyExistsError):
        tilestone.save_delta(versions[1], tmp_path / "v", base=other, anchor_every=1)
    assert not (tmp_path / "v" / "version-00000001" / ".metadata").exists()


def dtensor_rank(rank, world, folder):
    """A model's parameters as DTensors: versions are saved, and applied to plain tensors."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(7)
    mesh = init_device_mesh("cpu", (world,))
    weights = torch.randn(61, 33).to(torch.bfloat16)
    newer = changed(weights, 0.05)
    last = None
    for each in (weights, newer):
        state = {"model": {"w": distribute_tensor(each, mesh, [Shard(0)]), "b": torch.ones(3)}}
        last = tilestone.save_delta(state, folder, base=last, anchor_every=5)
    state = {"model": {"w": distribute_tensor(weights, mesh, [Shard(1)]), "b": torch.ones(3)}}
    tilestone.apply_delta(state, folder)
    dist.barrier()
    return torch.equal(state["model"]["w"].full_tensor().view(torch.int16), newer.view(torch.int16))


def test_dtensors_of_torch_ranks(tmp_path, worlds):
    assert worlds[2].run(dtensor_rank, str(tmp_path / "v")) == [True, True]
