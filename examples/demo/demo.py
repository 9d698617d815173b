"""A minute that shows what Tilestone does: trains a small GPT on 4 ranks, kills a rank in the middle
of a save, resumes, loads on 3 ranks, exports to Hugging Face's format, flips a bit, does the same with
stock PyTorch, and goes on in an object store.

    demo.py FOLDER

All files are written to FOLDER, which is emptied first. The exit status is 1 if a comparison fails.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from train import KILLED, Plan, run_rank

import tilestone

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "python" / "tests"))
from object_server import BUCKET, Server  # noqa: E402

SAVED, KILL, LAST = 20, 40, 60

all_equal = True


def announce(text: str) -> None:
    print(f"\n--- {text}", flush=True)


def tell(text: str) -> None:
    print(f"    {text}", flush=True)


def tell_if(equal: bool, what: str) -> None:
    global all_equal
    all_equal &= equal
    tell(f"{what}: {'equal, bit for bit' if equal else 'DIFFERENT'}")


def fork_rank(plan: Plan, rank: int, world: int, name: str) -> int:
    """Forks, because each new process would import torch for some seconds."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        root = plan.run.parent
        run_rank(plan, rank, world, root / f"{name}.store", root / f"{name}.report")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def run(plan: Plan, name: str, killed: int | None = None) -> dict[str, Any]:
    """Runs a process for each rank of the mesh. Returns rank 0's report."""
    world = 1
    for ranks in plan.mesh:
        world *= ranks
    started = time.perf_counter()
    processes = {fork_rank(plan, rank, world, name): rank for rank in range(world)}
    failed = False
    while processes:
        process, status = os.wait()
        rank, code = processes.pop(process), os.waitstatus_to_exitcode(status)
        if code != (-signal.SIGKILL if rank == killed else 0) and not failed:
            failed = True
            print(f"demo: {name}: rank {rank} ended with {code}", file=sys.stderr)
            for other in processes:  # they would wait for it
                os.kill(other, signal.SIGKILL)
    if failed:
        sys.exit(1)
    tell(f"({world} ranks, {time.perf_counter() - started:.0f} s)")
    return torch.load(plan.run.parent / f"{name}.report")


def command_line(*words: str) -> None:
    """Prints and runs a command of Tilestone's."""
    tell(f"$ tilestone {' '.join(words)}")
    done = subprocess.run(
        [sys.executable, "-m", "tilestone", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        tell(f"  {line}")


def same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def train_and_save(folder: Path) -> dict[str, Any]:
    announce(f"A GPT with AdamW on 2 x 2 ranks (FSDP2 x tensor parallelism), saved at step {SAVED}")
    plan = Plan((2, 2), folder / "run", LAST, save=SAVED, kill=KILL)
    tell(f"from step {KILL} on, rank {KILLED} waits for the moment at which it has begun to write")
    report = run(plan, "first", killed=KILLED)
    if "error" not in report:
        sys.exit("demo: each save was complete before the rank was killed; run it again")
    return report


def show_the_kill(folder: Path, report: dict[str, Any]) -> None:
    announce(f"SIGKILL has ended rank {KILLED} in the middle of a save")
    tell(f"rank 0 got, {report['error_after']:.1f} s after the save began:")
    tell(f"  {report['error'][:300]}")
    command_line("ls", os.path.relpath(folder / "run"))
    command_line("verify", os.path.relpath(folder / "run" / f"step-{SAVED}"))


def resume(folder: Path, report: dict[str, Any]) -> None:
    announce(f"Resuming on 2 x 2 ranks from step {SAVED}")
    last = max(report["losses"])
    again = run(Plan((2, 2), folder / "run", last, resume=SAVED), "resumed")
    tell_if(same_tensors(again["loaded"], report["saved"]), "tensors loaded / saved")
    after = {step: loss for step, loss in report["losses"].items() if step > SAVED}
    tell_if(again["losses"] == after, f"losses of steps {SAVED + 1} to {last} / before the kill")


def load_elsewhere(folder: Path, report: dict[str, Any]) -> None:
    announce(f"Loading step {SAVED} on 3 ranks (FSDP2 alone)")
    again = run(Plan((3,), folder / "run", SAVED, resume=SAVED), "elsewhere")
    tell_if(same_tensors(again["loaded"], report["saved"]), "tensors loaded / saved")
    saved = sum(tensor.numel() * tensor.element_size() for tensor in report["saved"].values())
    announce("Stock PyTorch (torch.distributed.checkpoint), the same ranks and state")
    tell(f"{'':18}Tilestone    stock      ({saved / 2**20:.1f} MiB; `make bench` measures)")
    for name, words, times in (("save", "save, 4 ranks", report), ("load", "load, 3 ranks", again)):
        ours, stock = times[name], times[f"stock_{name}"]
        tell(f"{words:18}{ours:6.0f} ms  {stock:6.0f} ms")


def show_the_formats(folder: Path, report: dict[str, Any]) -> None:
    ours, stock = folder / "run" / f"step-{SAVED}", folder / "stock" / f"step-{SAVED}"
    state = {key: torch.zeros_like(tensor) for key, tensor in report["saved"].items()}
    dcp.load(state, checkpoint_id=ours, no_dist=True)
    tell_if(same_tensors(state, report["saved"]), "Tilestone's files, loaded by stock PyTorch")
    command = [sys.executable, str(HERE / "read_without_torch.py"), str(ours), str(stock)]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    tell_if(result["differing"] == 0, "stock's files, read by Tilestone in a process without torch")


def export(folder: Path, report: dict[str, Any]) -> None:
    announce("The model as a Hugging Face folder")
    name = os.path.relpath(folder / "hf")
    command_line(
        "convert", os.path.relpath(folder / "run" / f"step-{SAVED}"), name, "--only", "model",
        "--shard-size", "1MB",
    )  # fmt: skip
    tell(f"{name}: {', '.join(sorted(file.name for file in (folder / 'hf').iterdir()))}")
    with tilestone.open(folder / "hf", framework="torch") as opened:
        found = opened.state_dict()
        tell(str(opened.verify()))
    saved = {key: item for key, item in report["saved"].items() if key.startswith("model.")}
    same = same_tensors({f"model.{key}": item for key, item in found.items()}, saved)
    tell_if(same, "tensors of the folder / saved")


def flip_a_bit(folder: Path, report: dict[str, Any]) -> None:
    announce("One bit of the checkpoint flips on the disk")
    path = folder / "flipped"
    shutil.copytree(folder / "run" / f"step-{SAVED}", path)
    key = "model.norm.weight"
    right = report["saved"][key]
    wanted = right[:8].numpy().tobytes()
    for file in path.glob("*.distcp"):
        data = bytearray(file.read_bytes())
        if wanted in data:
            data[data.index(wanted) + 6] ^= 0x40
            file.write_bytes(data)
            break
    state = {key: torch.zeros_like(right)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    tell(f"{key} as it was saved:   {right[1]:.6f}")
    tell(f"stock dcp.load, without an error:     {state[key][1]:.6f}")
    global all_equal
    try:
        tilestone.load({key: torch.zeros_like(right)}, str(path))
        all_equal = False
        tell("tilestone.load has not noticed it")
    except tilestone.CorruptError as error:
        tell(f"tilestone.load: CorruptError: {error}")


def go_on_in_a_store(folder: Path, report: dict[str, Any]) -> None:
    place = f"s3://{BUCKET}/run"
    announce(f"From step {SAVED} on with a CheckpointManager at {place} (SeaweedFS, started here)")
    with Server() as server:
        os.environ.update(server.environment)
        saved = run(Plan((2, 2), folder / "run", KILL, resume=SAVED, managed=place), "in_store")
        before = {step: loss for step, loss in report["losses"].items() if SAVED < step <= KILL}
        tell_if(saved["losses"] == before, f"losses of steps {SAVED + 1} to {KILL} / before the kill")
        command_line("ls", place)
        again = run(Plan((3,), folder / "run", KILL, managed=place), "restored")
        tell_if(same_tensors(again["managed"], saved["managed"]), "tensors restored on 3 ranks / saved")


def next_steps(folder: Path) -> None:
    announce("What next")
    tell(f".venv/bin/tilestone inspect {os.path.relpath(folder)}/run/step-{SAVED}")
    tell("docs/first_ten_minutes.md     save, load and open in a program of your own")
    tell("docs/train_kill_resume.md     an FSDP2 script that does what you have just seen")
    tell("docs/from_dcp.md, docs/megatron_guide.md     switch from stock: change one import")
    tell("make bench                    speed on this machine, against its peers")


def main(folder: Path) -> int:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "run").mkdir(parents=True)
    os.environ.update(OMP_NUM_THREADS="1", USE_LIBUV="0", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)  # a forked process can't use its parent's threads
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    report = train_and_save(folder)
    show_the_kill(folder, report)
    resume(folder, report)
    load_elsewhere(folder, report)
    show_the_formats(folder, report)
    export(folder, report)
    flip_a_bit(folder, report)
    go_on_in_a_store(folder, report)
    next_steps(folder)
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
