"""use_wheel all|store|stranger URL: uses the installed package as its user would: saves, loads,
verifies, runs the command line, with directories and an object store; or only saves to the store
and loads; or finds an error there, because no authority is known that has signed its certificate.

check_wheel runs it in an environment that has only the wheel and what pip installed with it.
"""

import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys

import ml_dtypes
import numpy

import tilestone


def check_the_environment() -> None:
    for name in ("cc", "c++", "gcc", "g++", "clang", "cmake", "mpirun"):
        assert shutil.which(name) is None, f"the environment has {name}"
    assert importlib.util.find_spec("torch") is None, "the environment has torch"
    assert pathlib.Path(sys.prefix) in pathlib.Path(tilestone.__file__).parents, tilestone.__file__


def save_load_and_verify(location: str, **options: str) -> None:
    state = {
        "weight": numpy.arange(1 << 20, dtype=numpy.float32).reshape(1024, 1024),
        "low": numpy.linspace(-4, 4, 4099).astype(ml_dtypes.bfloat16),
        "step": 1200,
    }
    tilestone.save(state, location, **options)
    wanted = {"weight": numpy.zeros_like(state["weight"]), "low": numpy.zeros_like(state["low"])}
    loaded = tilestone.load({**wanted, "step": 0}, location)
    assert loaded["step"] == 1200
    for key, array in wanted.items():
        assert loaded[key] is array and array.tobytes() == state[key].tobytes(), key
    with tilestone.open(location) as opened:
        part = opened.read("weight", box=((3, 5), (7, 11)))
        assert (numpy.asarray(part) == state["weight"][3:5, 7:11]).all()
        assert opened.verify().ok


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: exit {done.returncode}: {done.stderr}"
    return done.stdout


def use_the_command_line(location: str) -> None:
    assert "bfloat16" in run("tilestone", "ls", location)
    assert "weight" in run(sys.executable, "-I", "-m", "tilestone", "ls", location)
    run("tilestone", "verify", location)


def check_that_mpi_is_refused() -> None:
    try:
        tilestone.mpi_world()
    except tilestone.UnsupportedError as error:
        assert "pip install ." in str(error) and "TILESTONE_MPI" in str(error), error
    else:
        raise AssertionError("mpi_world() works without MPI")


def check_that_a_stranger_is_refused(location: str) -> None:
    try:
        tilestone.save({"step": 1}, location)
    except tilestone.StorageError as error:
        assert "certificate" in str(error) and "AWS_CA_BUNDLE" in str(error), error
    else:
        raise AssertionError("any certificate is good enough")


def check_mapped_libraries() -> None:
    """All of our libraries come from the wheel, although the system may have them too."""
    mapped = set(re.findall(r"(/\S+)$", pathlib.Path("/proc/self/maps").read_text(), re.MULTILINE))
    for path in mapped:
        if re.search(r"/lib(fmt|spdlog|isal|uring|xxhash|zstd|mpi|curl|pugixml)\b", path):
            assert "/tilestone.libs/" in path, f"{path} is not from the wheel"
    names = {pathlib.Path(path).name.split("-")[0] for path in mapped if "/tilestone.libs/" in path}
    assert names == {"libfmt", "libspdlog", "libisal"}, names


def use_directories() -> None:
    save_load_and_verify("checkpoint")
    save_load_and_verify("arrays", format="zarr")
    use_the_command_line("checkpoint")
    check_that_mpi_is_refused()


def main(arguments: list[str]) -> None:
    check_the_environment()
    mode, url = arguments
    if mode == "stranger":
        check_that_a_stranger_is_refused(url)
    else:
        save_load_and_verify(url)
    if mode == "all":
        use_the_command_line(url)
        use_directories()
    check_mapped_libraries()
    version = ".".join(map(str, sys.version_info[:3]))
    words = " ".join([*arguments, "ok"])
    print(f"use_wheel: tilestone {tilestone.__version__} works with Python {version}: {words}")


if __name__ == "__main__":
    main(sys.argv[1:])
