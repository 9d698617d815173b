"""tilestone.dcp where torch plans: users' planners, extensions, readers and writers."""

from __future__ import annotations

import io
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from test_stock import assert_same
from torch.distributed.checkpoint._extension import StreamTransformExtension

import tilestone
import tilestone.dcp as dcp

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Recorder(dcp.DefaultSavePlanner):
    """A user's planner: makes new tensors lazily, and records the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False) -> None:
        self.calls.append(f"set_up {storage_meta.save_id is not None}")
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self):
        self.calls.append("local")
        return super().create_local_plan()

    def create_global_plan(self, all_plans):
        self.calls.append("global")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan):
        self.calls.append("finish")
        return super().finish_plan(new_plan)

    def transform_object(self, write_item, object):
        self.calls.append(write_item.index.fqn)
        made = super().transform_object(write_item, object)
        return made * 2 if isinstance(made, torch.Tensor) else made


class Halved(dcp.DefaultLoadPlanner):
    """Reads into memory of its own, and halves it into the state's tensors."""

    def resolve_tensor(self, read_item):
        return torch.empty_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item, tensor) -> None:
        super().resolve_tensor(read_item).copy_(tensor / 2)


def test_every_hook_of_a_users_planner_is_called_as_by_torch(ckpt: str) -> None:
    state = {"a": torch.ones(3, 4).t(), "n": 1, "b": torch.arange(10.0)[::2]}
    ours, theirs = Recorder(), Recorder()
    dcp.save(state, checkpoint_id=ckpt, planner=ours)
    stock.save(state, checkpoint_id=ckpt + "-torch", planner=theirs)
    assert ours.calls == theirs.calls == ["set_up True", "local", "global", "finish", "n", "a", "b"]
    assert tilestone.load(ckpt)["b"].tolist() == [0, 4, 8, 12, 16]
    for load, planner in ((dcp.load, Halved()), (stock.load, Halved())):
        wanted = {"a": torch.zeros(4, 3), "n": 0, "b": torch.zeros(5)}
        load(wanted, storage_reader=dcp.FileSystemReader(ckpt), planner=planner)
        assert_same(wanted, {**state, "a": state["a"].contiguous(), "b": state["b"].contiguous()})


class Waits(dcp.DefaultSavePlanner):
    """Lets another save begin while it writes."""

    def __init__(self, other: Callable[[], object]) -> None:
        super().__init__()
        self._other = other

    def resolve_data(self, write_item: Any) -> Any:
        other, self._other = self._other, lambda: None
        other()
        return super().resolve_data(write_item)


def test_a_save_that_a_later_one_of_its_process_has_ended_says_so(ckpt: str) -> None:
    def other() -> None:
        stock.save({"n": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(ckpt), no_dist=True)

    with pytest.raises(dcp.CheckpointException, match="ended by a later one of the same process"):
        stock.save(
            {"n": torch.zeros(2)}, storage_writer=dcp.FileSystemWriter(ckpt), planner=Waits(other),
            no_dist=True,
        )  # fmt: skip
    assert tilestone.load(ckpt)["n"].tolist() == [1, 1]


class Xor(StreamTransformExtension):
    """Inverts every byte."""

    @staticmethod
    def from_descriptor(version: str) -> Xor:
        return Xor()

    @staticmethod
    def registry_name() -> str:
        return "stream.xor"

    def get_descriptor(self) -> str:
        return "stream.xor/1"

    def transform_to(self, output: Any) -> Any:
        class Into(io.RawIOBase):
            def writable(self) -> bool:
                return True

            def write(self, data: Any) -> int:
                output.write(bytes(byte ^ 255 for byte in bytes(data)))
                return len(bytes(data))

            def close(self) -> None:
                output.close()

        return Into()

    def transform_from(self, input: Any) -> Any:
        return io.BytesIO(bytes(byte ^ 255 for byte in input.read()))


def test_extensions_transform_items_as_in_torch(ckpt: str) -> None:
    state = {"w": torch.arange(5), "n": {"k": 3}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(ckpt, _extensions=[Xor()]))
    registry = stock._extension.ExtensionRegistry()
    registry.register(Xor)
    for reader in (dcp.FileSystemReader, stock.FileSystemReader):
        wanted = {"w": torch.zeros(5, dtype=torch.int64), "n": {"k": 0}}
        dcp.load(wanted, storage_reader=reader(ckpt, _extension_registry=registry))
        assert_same(wanted, state)
    manifests = list(pathlib.Path(ckpt, ".tilestone").glob("*"))
    assert manifests, "its items have checksums"

    before = {"w": torch.zeros(5, dtype=torch.int64), "n": {"k": 0}}
    with pytest.raises(dcp.CheckpointException, match=f"{Xor.registry_name()}.*_extension_registry"):
        dcp.load(before, checkpoint_id=ckpt)  # a reader that doesn't know the extension
    assert before["n"]["k"] == 0 and not before["w"].any()


class Renaming(dcp.FileSystemReader):
    """A user's reader: loads under other names."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> stock.Metadata:
        found = super().read_metadata(*args, **kwargs)
        for index in list(found.storage_data):
            other = stock.metadata.MetadataIndex("new." + index.fqn, index.offset)
            found.storage_data[other] = found.storage_data.pop(index)
        for key in list(found.state_dict_metadata):
            found.state_dict_metadata["new." + key] = found.state_dict_metadata.pop(key)
        found.planner_data = None
        return found


class Noting(dcp.FileSystemWriter):
    """A user's writer: notes what is written."""

    def write_data(self, plan, planner):
        self.noted = [item.index.fqn for item in plan.items]
        return super().write_data(plan, planner)


def test_subclasses_that_override_a_method(ckpt: str) -> None:
    writer = Noting(ckpt)
    dcp.save({"w": torch.ones(3)}, storage_writer=writer)
    assert writer.noted == ["w"]
    wanted = {"new.w": torch.zeros(3)}
    dcp.load(wanted, storage_reader=Renaming(ckpt))
    assert wanted["new.w"].sum() == 3


@pytest.mark.parametrize("options", [{"single_file_per_rank": False}, {"thread_count": 2}])
def test_several_files_for_one_rank(options: dict[str, Any], ckpt: str) -> None:
    state = {str(i): torch.full((7,), i) for i in range(4)}
    for planner in (None, dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)):
        writer = dcp.FileSystemWriter(ckpt, **options)
        dcp.save(state, storage_writer=writer, planner=planner)
        names = [name for name in os.listdir(ckpt) if name.endswith(".distcp")]
        assert len(names) == (4 if "single_file_per_rank" in options else 2)
        wanted = {key: torch.zeros(7, dtype=torch.int64) for key in state}
        stock.load(wanted, checkpoint_id=ckpt)
        assert_same(wanted, state)


def test_a_save_that_fails_leaves_the_checkpoint_before_it(ckpt: str) -> None:
    class Failing(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item):
            raise OSError("no such device")

    dcp.save({"n": 1}, checkpoint_id=ckpt)
    with pytest.raises(dcp.CheckpointException, match="no such device") as raised:
        dcp.save({"n": 2}, checkpoint_id=ckpt, planner=Failing())
    dcp.save({"n": 3}, checkpoint_id=ckpt, planner=Recorder())  # while the exception is kept
    assert raised and tilestone.load(ckpt) == {"n": 3}


def test_a_planner_may_leave_elements_out_but_the_log_says_so(ckpt: str, caplog) -> None:
    class Half(dcp.DefaultSavePlanner):
        def create_global_plan(self, all_plans):
            plans, metadata = super().create_global_plan(all_plans)
            del plans[0].items[-1]
            return plans, metadata

        def create_local_plan(self):
            plan = super().create_local_plan()
            (item,) = plan.items
            halves = []
            for offset in (0, 2):
                chunk = stock.ChunkStorageMetadata(torch.Size([offset]), torch.Size([2]))
                index = stock.metadata.MetadataIndex("w", chunk.offsets)
                data = stock.planner.TensorWriteData(chunk, item.tensor_data.properties,
                                                     torch.Size([4]))
                kind = stock.planner.WriteItemType.SHARD
                halves.append(stock.WriteItem(index, kind, tensor_data=data))
            plan.items[:] = halves
            return plan

        def lookup_object(self, index):
            return self.state_dict["w"][index.offset[0] : index.offset[0] + 2]

    dcp.save({"w": torch.arange(4)}, checkpoint_id=ckpt, planner=Half())
    assert "no manifest" in caplog.text
    assert len(stock.FileSystemReader(ckpt).read_metadata().storage_data) == 1
