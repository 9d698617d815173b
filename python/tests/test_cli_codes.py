"""The exit codes of the command line: only a damaged checkpoint gives 1."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import pickle
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time

import numpy
import pytest

import tilestone

OK, DAMAGED, USAGE, IO, UNSAFE = range(5)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("codes") / "c"
    state = {f"k{i}": numpy.zeros(1) for i in range(5000)} | {"w": numpy.arange(6)}
    tilestone.save(state, path)
    return path


def command(*words: str | bytes | pathlib.Path, **options: object) -> subprocess.CompletedProcess[bytes]:
    line = [sys.executable, "-m", "tilestone", *words]
    return subprocess.run(line, stderr=subprocess.PIPE, timeout=60, **options)  # type: ignore[call-overload]


def test_a_closed_pipe_ends_the_command_quietly(path: pathlib.Path) -> None:
    line = f"'{sys.executable}' -m tilestone ls '{path}' | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == str(128 + signal.SIGPIPE)
    assert done.stderr == ""


def on_a_terminal(*words: str | pathlib.Path, **environment: str) -> tuple[str, int]:
    """What the command prints on a terminal of 80 columns, and its exit code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    line = [sys.executable, "-m", "tilestone", *words]
    process = subprocess.Popen(
        line, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"} | environment
    )
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # EIO: the command has closed the terminal
        while part := os.read(ours, 1 << 16):
            text += part
    os.close(ours)
    return text.decode(), process.wait(60)


def test_terminals_have_colours_unless_no_color_is_set(path: pathlib.Path) -> None:
    said, code = on_a_terminal("verify", path)
    assert code == OK and "\x1b[32mok\x1b[0m: " in said
    said, code = on_a_terminal("verify", path, NO_COLOR="1")
    assert code == OK and "\rok: " in said.replace("\x1b[K", "").replace("\n", "\r") and "\x1b[3" not in said
    said, code = on_a_terminal("ls", path / "nothing")
    assert code == IO and "\x1b[31mtilestone:\x1b[0m no checkpoint" in said
    assert b"\x1b[" not in command("verify", path, stdout=subprocess.PIPE).stdout


def test_what_commands_list_fits_a_terminal_of_80_columns(tmp_path: pathlib.Path) -> None:
    long = "model." + "layer." * 30 + "weight"
    for name, values in (("a", [1.0, 2.0]), ("b", [1.0, 2.5]), ("cut", [0.0])):
        tilestone.save({long: numpy.array(values), "é" * 80: 1}, tmp_path / name)
    for file in (tmp_path / "cut").glob("*.distcp"):
        os.truncate(file, 20)
    tilestone.save({"w": numpy.zeros(1)}, tmp_path / "left")
    (tmp_path / "left/.metadata").unlink()
    for words, code in (
        (("ls", tmp_path / "a"), OK), (("du", tmp_path / "a"), OK),
        (("inspect", tmp_path / "a", long), OK), (("diff", tmp_path / "a", tmp_path / "b"), DAMAGED),
        (("verify", tmp_path / "cut"), DAMAGED), (("gc", "--force", tmp_path / "left"), OK),
    ):  # fmt: skip
        said, ended = on_a_terminal(*words, NO_COLOR="1")
        lines = re.split(r"[\r\n]+", said.replace("\x1b[K", ""))
        if words[0] == "inspect":
            lines = [line for line in lines if not line.startswith(long)]  # the key itself is whole
        width = max(len(line) for line in lines)
        assert ended == code and 0 < width <= 80, said


def test_a_full_output_device_is_an_io_error(path: pathlib.Path) -> None:
    with open("/dev/full", "w") as full:
        for words in (["ls"], ["ls", "--json"], ["verify"], ["inspect"]):
            done = command(words[0], path, *words[1:], stdout=full)
            assert done.returncode == IO, words
            said = done.stderr.decode()
            assert said.count("No space left on device") == 1 and "standard output" in said
        for word in ("--help", "--version"):
            assert command(word, stdout=full).returncode == IO


def test_paths_need_not_be_utf8(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    odd = os.fsencode(tmp_path) + b"/\xff\xfe"
    done = command("ls", odd, stdout=subprocess.PIPE)
    assert done.returncode == IO and b"no checkpoint at" in done.stderr
    os.symlink(path, odd)
    assert command("verify", odd, stdout=subprocess.PIPE).returncode == OK


def test_elements_that_numpy_lacks_are_written_or_refused_but_are_not_damage(
    tmp_path: pathlib.Path,
) -> None:
    import torch

    names = ["bfloat16", "complex32", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e8m0fnu"]
    names += [name for name in ("float4_e2m1fn_x2", "uint16", "uint32") if hasattr(torch, name)]
    state = {
        name: torch.zeros(4, dtype=torch.uint8).view(getattr(torch, name))
        for name in names
    }
    tilestone.save(state, tmp_path / "c")
    for name in names:
        npy = command("cat", tmp_path / "c", name, "--npy", tmp_path / "x.npy")
        shown = command("cat", tmp_path / "c", name, stdout=subprocess.PIPE)
        read = subprocess.run(
            [sys.executable, "-c", f"import tilestone; tilestone.open({str(tmp_path / 'c')!r})[{name!r}]"],
            timeout=60,
        )
        assert npy.returncode in (OK, USAGE) and shown.returncode in (OK, USAGE), name
        assert read.returncode == 0


def test_ctrl_c_ends_the_command_as_the_shell_expects(path: pathlib.Path) -> None:
    reader, writer = os.pipe()  # nobody reads, so the command blocks on its output
    line = [sys.executable, "-m", "tilestone", "ls", path, "--json"]
    running = subprocess.Popen(line, stdout=writer, stderr=subprocess.PIPE)
    time.sleep(1)
    running.send_signal(signal.SIGINT)
    assert running.wait(10) == -signal.SIGINT  # which a shell reports as 130
    os.close(reader)
    os.close(writer)


def test_errors_have_the_systems_reason_once_and_the_path_as_given(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pathlib.Path("file").write_text("x")
    with pytest.raises(OSError) as raised:
        tilestone.save({"w": numpy.zeros(3)}, "file/below")
    error = raised.value
    assert isinstance(error, tilestone.StorageError)
    assert str(error).count("Not a directory") == 1 and "file" in str(error)
    assert error.strerror == "Not a directory" and error.filename.endswith("file/below")
    tilestone.save({"w": numpy.zeros(3)}, "c")
    for data in pathlib.Path("c").glob("*.distcp"):
        data.unlink()
        data.mkdir()
    with pytest.raises(tilestone.CheckpointError) as raised:
        tilestone.open("c").read("w")
    assert "c/" in str(raised.value)
    with pytest.raises(FileNotFoundError) as absent:
        tilestone.open("nowhere")
    assert absent.value.errno == 2 and "nowhere" in str(absent.value)


def test_exceptions_have_the_packages_names_and_hints_use_pythons_option_names(
    tmp_path: pathlib.Path,
) -> None:
    tilestone.save({"w": numpy.zeros(3)}, tmp_path)
    with pytest.raises(tilestone.AlreadyExistsError, match="overwrite=True") as raised:
        tilestone.save({"w": numpy.zeros(3)}, tmp_path)
    assert "overwrite=True" in raised.value.hint
    assert f"{type(raised.value).__module__}.{type(raised.value).__qualname__}" == (
        "tilestone.AlreadyExistsError"
    )
    with pytest.raises(tilestone.MismatchError, match="cast=True"):
        tilestone.load({"w": numpy.zeros(3, numpy.float32)}, tmp_path)


def test_a_missing_data_file_is_damage_and_not_a_missing_checkpoint(tmp_path: pathlib.Path) -> None:
    tilestone.save({"w": numpy.zeros(3), "o": {1}}, tmp_path)
    (data,) = tmp_path.glob("*.distcp")
    data.unlink()
    for read in (
        lambda: tilestone.load(tmp_path),
        lambda: tilestone.load({"w": numpy.zeros(3)}, tmp_path),
        lambda: tilestone.open(tmp_path).read("w"),
        lambda: tilestone.open(tmp_path).read_many(["w"]),
        lambda: tilestone.open(tmp_path).object("o"),
    ):
        with pytest.raises(tilestone.CorruptError, match="data file .* is missing") as raised:
            read()
        assert not isinstance(raised.value, FileNotFoundError)
        assert data.name in str(raised.value)
    assert not tilestone.open(tmp_path).verify().ok
    for words in (["verify"], ["cat", "w"], ["cat", "o"]):
        assert command(words[0], tmp_path, *words[1:], stdout=subprocess.PIPE).returncode == DAMAGED
    assert command("ls", tmp_path, stdout=subprocess.PIPE).returncode == OK


class _Call:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("exit 1",)


@pytest.mark.parametrize(
    ("held", "code"),
    [
        ({"a": 1}, DAMAGED), ([1], DAMAGED), ((1,), DAMAGED), (7, DAMAGED), ("text", DAMAGED),
        (None, DAMAGED), ({"a": [(_Call(),)]}, UNSAFE), ([_Call()], UNSAFE), (_Call(), UNSAFE),
    ],
    ids=range(9),
)  # fmt: skip
def test_a_metadata_file_that_holds_something_else_is_damaged_or_unsafe(
    held: object, code: int, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(held))
    for mark in (None, '{"sharded_backend": "torch_dist"}', "[1]"):
        if mark is not None:
            (tmp_path / "metadata.json").write_text(mark)
        for words in (["ls"], ["inspect"], ["verify"], ["cat", "--common"]):
            line = ["tilestone", words[0], str(tmp_path), *words[1:]]
            found = tilestone._core.cli([word.encode() for word in line])
            assert (found, capfd.readouterr().out) == (code, ""), (mark, words)


def test_the_help_lists_every_exit_code() -> None:
    said = command("--help", stdout=subprocess.PIPE).stdout.decode()
    codes = said.partition("Exit codes:")[2]
    for code in (OK, DAMAGED, USAGE, IO, UNSAFE, 128 + signal.SIGINT):
        assert re.search(rf"\b{code} +[a-z]", codes), code


def test_an_entry_of_metadata_that_is_something_else_is_damaged_or_unsafe(
    tmp_path: pathlib.Path,
) -> None:
    from torch.distributed.checkpoint.metadata import Metadata

    for entry, code in (({"a": 1}, DAMAGED), (7, DAMAGED), ([_Call()], UNSAFE), (_Call(), UNSAFE)):
        held = Metadata(state_dict_metadata={"w": entry})
        (tmp_path / ".metadata").write_bytes(pickle.dumps(held))
        assert tilestone._core.cli([b"tilestone", b"ls", os.fsencode(tmp_path)]) == code, entry
