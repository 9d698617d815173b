"""The package without torch: numpy, ml_dtypes and DLPack arrays, values; torch is not imported."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy
import pytest
from thread_ranks import run_ranks

import tilestone


def run_python(code: str, *args: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def random_array(name: str, shape: tuple[int, ...], seed: int) -> numpy.ndarray:
    """Random bits, which are valid values of every dtype except bool."""
    dtype = tilestone.DType(name).numpy
    generator = numpy.random.default_rng(seed)
    if name == "bool":
        return generator.integers(0, 2, shape).astype(bool)
    count = int(numpy.prod(shape)) * dtype.itemsize
    return numpy.frombuffer(generator.bytes(count), dtype).reshape(shape).copy()


def same_bits(a: numpy.ndarray, b: numpy.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_import_save_load_open_and_the_command_never_import_torch(ckpt: str) -> None:
    out = run_python(
        """
        import sys, numpy, tilestone
        w = numpy.arange(12.0).reshape(3, 4)
        state = {"w": w, "step": 3, "nested": {"list": [1, "a", None]}, "odd": {1, 2}}
        tilestone.save(state, sys.argv[1])
        wanted = {"w": numpy.zeros((3, 4)), "step": 0, "nested": {"list": None}}
        got = tilestone.load(wanted, sys.argv[1])
        assert got["w"] is wanted["w"] and (got["w"] == w).all(), got
        assert got["step"] == 3 and got["nested"] == {"list": [1, "a", None]}, got
        with tilestone.open(sys.argv[1]) as ckpt:
            assert (ckpt.read("w", box=((1, 3), (0, 2))) == w[1:3, 0:2]).all()
            assert ckpt.verify().ok
        assert tilestone._core.cli([b"tilestone", b"ls", sys.argv[1].encode()]) == 0
        assert "torch" not in sys.modules
        print("done")
        """,
        ckpt,
    )
    assert out.endswith("done\n")
    assert "w" in out


@pytest.mark.parametrize("name", tilestone.dtype_names())
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (1,), (2, 3, 4, 5, 6)])
def test_numpy_arrays_of_every_dtype_come_back_bit_for_bit(
    name: str, shape: tuple[int, ...], ckpt: str
) -> None:
    array = random_array(name, shape, seed=len(shape))
    tilestone.save({"x": array}, ckpt)
    wanted = {"x": numpy.zeros(shape, array.dtype)}
    loaded = tilestone.load(wanted, ckpt)["x"]
    assert loaded is wanted["x"]
    assert same_bits(loaded, array)
    with tilestone.open(ckpt) as opened:
        assert opened["x"].dtype == name
        assert opened["x"].shape == shape
        assert same_bits(opened.read("x"), array)


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a.T,
        lambda a: a[::2, 1::3],
        lambda a: a[::-1],
        lambda a: numpy.broadcast_to(a[:1], (5, *a.shape[1:])),
        lambda a: a.astype(">f4"),
    ],
    ids=["transposed", "steps", "reversed", "broadcast", "big-endian"],
)
def test_numpy_views_are_saved_by_their_elements(view, ckpt: str) -> None:
    array = view(numpy.arange(48, dtype=numpy.float32).reshape(6, 8))
    tilestone.save({"x": array}, ckpt)
    with tilestone.open(ckpt) as opened:
        numpy.testing.assert_array_equal(opened.read("x"), array)


def test_numpy_views_are_filled_in_place(ckpt: str) -> None:
    array = numpy.arange(12.0).reshape(3, 4)
    tilestone.save({"x": array}, ckpt)
    target = numpy.zeros((8, 3))
    tilestone.load({"x": target[::2].T}, ckpt)
    numpy.testing.assert_array_equal(target[::2].T, array)
    assert not target[1::2].any()


def test_a_read_only_array_in_a_template_is_replaced_and_not_written(ckpt: str) -> None:
    tilestone.save({"x": numpy.ones(3)}, ckpt)
    frozen = numpy.zeros(3)
    frozen.flags.writeable = False
    loaded = tilestone.load({"x": frozen}, ckpt)["x"]
    assert loaded is not frozen
    assert (loaded == 1).all()
    assert not frozen.any()


class SpeaksDLPack:
    """An array of another library."""

    def __init__(self, array: numpy.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: object) -> object:
        return self.array.__dlpack__(**options)  # type: ignore[arg-type]

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def test_arrays_that_speak_dlpack_are_saved_and_filled(ckpt: str) -> None:
    array = numpy.arange(6, dtype=numpy.int16).reshape(2, 3)
    tilestone.save({"x": SpeaksDLPack(array.T)}, ckpt)
    target = numpy.zeros((3, 2), numpy.int16)
    wanted = SpeaksDLPack(target)
    assert tilestone.load({"x": wanted}, ckpt)["x"] is wanted
    numpy.testing.assert_array_equal(target, array.T)


def test_sharded_tensors_of_threads_are_resharded(ckpt: str) -> None:
    whole = numpy.arange(24 * 6, dtype=ml_dtypes.bfloat16).reshape(24, 6)

    def save(comm: tilestone.Communicator) -> None:
        rows = 24 // comm.size
        local = whole[comm.rank * rows : (comm.rank + 1) * rows]
        tensor = tilestone.ShardedTensor.from_rank_offsets("w", local, (0, comm.rank, comm.size))
        tilestone.save({"w": tensor, "step": 7}, ckpt, group=comm)

    def load(comm: tilestone.Communicator) -> None:
        columns = 6 // comm.size
        local = numpy.zeros((24, columns), ml_dtypes.bfloat16)
        tensor = tilestone.ShardedTensor.from_rank_offsets("w", local, (1, comm.rank, comm.size))
        loaded = tilestone.load({"w": tensor, "step": None}, ckpt, group=comm)
        assert loaded["w"] is local
        assert loaded["step"] == 7
        assert same_bits(local, numpy.ascontiguousarray(whole[:, comm.rank * columns :][:, :columns]))

    run_ranks(4, save)
    run_ranks(3, load)
    with tilestone.open(ckpt) as opened:
        assert opened.world_size == 4
        assert [box.offset for box in opened["w"].boxes] == [(0, 0), (6, 0), (12, 0), (18, 0)]
        assert same_bits(opened["w"][3:20, 2:5], numpy.ascontiguousarray(whole[3:20, 2:5]))


def test_an_open_checkpoint_describes_its_content(ckpt: str) -> None:
    state = {"a": {"w": numpy.zeros((4, 4), numpy.float32)}, "b": "text", "c": (1, 2)}
    tilestone.save(state, ckpt)
    opened = tilestone.open(ckpt)
    assert opened.keys() == ["a.w", "b", "c"]
    assert list(opened) == opened.keys() and len(opened) == 3
    assert "a.w" in opened and "a" not in opened
    assert opened.tensor_keys() == ["a.w"] and opened.object_keys() == ["b", "c"]
    assert opened["b"] == "text" and opened["c"] == (1, 2)
    assert opened.path_of("a.w") == ("a", "w")
    assert opened.nbytes == 64 and opened["a.w"].nbytes == 64
    assert opened.format == "torch_dist" and opened.writer.startswith("Tilestone")
    assert dict(opened.items())["b"] == "text"
    out = numpy.full((2, 4), 5, numpy.float32)
    assert opened.read("a.w", ((0, 2), (0, 4)), out=out) is out and not out.any()
    opened.close()
    with pytest.raises(tilestone.InvalidArgumentError, match="is closed"):
        opened.keys()


def test_reading_a_missing_key_names_similar_keys(ckpt: str) -> None:
    tilestone.save({"layers.0.weight": numpy.zeros(2)}, ckpt)
    with tilestone.open(ckpt) as opened:
        with pytest.raises(KeyError) as raised:
            opened["layers.0.weigth"]
        assert isinstance(raised.value, tilestone.NotFoundError)
        assert raised.value.key == "layers.0.weigth"
        assert "layers.0.weight" in raised.value.hint
    with pytest.raises(FileNotFoundError):
        tilestone.open(pathlib.Path(ckpt) / "nothing")


def test_a_box_outside_the_tensor_is_refused(ckpt: str) -> None:
    tilestone.save({"x": numpy.zeros((2, 3))}, ckpt)
    with tilestone.open(ckpt) as opened:
        with pytest.raises(tilestone.InvalidArgumentError, match=r"shape \(2, 3\)"):
            opened.read("x", ((0, 3), (0, 1)))
