"""Models for others, which a run makes of its steps: Hugging Face folders."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

from tilestone import _core
from tilestone._calls.maintenance import convert
from tilestone._calls.model_folder import NewFolder, is_hidden
from tilestone._calls.opening import open as open_checkpoint
from tilestone._errors import InvalidArgumentError
from tilestone._options import valid
from tilestone._options.rename import Rename, renaming

logger = logging.getLogger("tilestone")

_SHARD_BYTES = 5_000_000_000  # of a safetensors file, as save_pretrained has long had it
_FOLDER = re.compile(r"step-(\d{8,})")
# Files of a model's folder that hold weights, or say where they are.
_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Export:
    """What a `CheckpointManager` exports of its steps.

    Each export is a folder "export/hf/step-00005000" in the run's directory, which transformers opens:
    safetensors files of at most 5 GB with their index, and the files of `config_dir`. docs/huggingface.md
    describes it.

    Args:
        format: "hf", a Hugging Face folder.
        every: steps that are saved are exported if they are multiples of it.
        rename, only: as for `tilestone.convert`: the part of the state that is exported, under which
            keys. `only=""` is the whole state, which must have only tensors then. A function is
            called on a thread of rank 0.
        dtype: as `cast` of `tilestone.convert`; config.json gets it too.
        config_dir: a folder whose files are copied into each export: config.json, the tokenizer's
            files, code; not its weights and subfolders. None: there are none.
        keep: so many of the newest exports are kept; None: all.

    Raises:
        InvalidArgumentError: an argument can't be used.
    """

    format: str = "hf"
    every: int = 1
    rename: Rename | None = None
    dtype: Any = None
    config_dir: str | os.PathLike[str] | None = None
    keep: int | None = None
    only: str = "model"

    def __post_init__(self) -> None:
        if self.format != "hf":
            raise InvalidArgumentError(f'export.format must be "hf", not {self.format!r}')
        for name, value in (("every", self.every), ("keep", 1 if self.keep is None else self.keep)):
            if valid.whole(f"export.{name}", value, 64) == 0:
                raise InvalidArgumentError(f"export.{name} must be at least 1")
        renaming("export.rename", self.rename)
        if self.dtype is not None:
            _core.ConvertOptions().cast = self.dtype_name
        if self.config_dir is not None and not os.path.isfile(self._in_config("config.json")):
            raise InvalidArgumentError(
                f"export.config_dir has no config.json: {os.fspath(self.config_dir)!r}",
                hint="write one with config.save_pretrained(config_dir)",
            )

    @property
    def dtype_name(self) -> str:
        """The dtype by its name; "": it stays."""
        return "" if self.dtype is None else str(self.dtype).removeprefix("torch.")

    def _in_config(self, name: str) -> str:
        assert self.config_dir is not None
        return os.path.join(os.path.expanduser(self.config_dir), name)

    def copy_config(self, folder: str) -> None:
        """Copies the files of config_dir into a folder."""
        if self.config_dir is None:
            return
        for name in os.listdir(os.path.expanduser(self.config_dir)):
            source, target = self._in_config(name), os.path.join(folder, name)
            if name.startswith(".") or name.endswith(_WEIGHTS) or not os.path.isfile(source):
                continue
            with open(source, "rb") as read:
                text = read.read()
            if name == "config.json":
                text = self._with_dtype(text)
            with open(target, "wb") as written:
                written.write(text)
                written.flush()
                os.fsync(written.fileno())

    def _with_dtype(self, text: bytes) -> bytes:
        """A config.json that names the dtype of the export, by which transformers loads it."""
        if not self.dtype_name:
            return text
        config = json.loads(text)
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = self.dtype_name
        return json.dumps(config, indent=2).encode() + b"\n"


@dataclasses.dataclass(frozen=True)
class Exported:
    """An export that has ended.

    Attributes:
        step: the step.
        path: the folder.
        error: why it was not made, at the second try; None: it was.
        seconds: that the last try took.
    """

    step: int
    path: str
    error: Exception | None
    seconds: float


class Exporter:
    """Makes a run's exports, on a thread of rank 0, and has steps pruned.

    While an export is made no step is pruned, because it could be the one that is read. One further
    step may wait; a newer one takes its place.

    Args:
        export: what is exported; None: nothing, here.
        directory: the run's.
        name_of: the folder of a step.
        prune_after: prunes once a step is durable; returns at once.
    """

    def __init__(
        self,
        export: Export | None,
        directory: str,
        name_of: Callable[[int], str],
        prune_after: Callable[[int], None],
    ) -> None:
        self._export = export
        self._directory = directory
        self._name_of = name_of
        self._prune_after = prune_after
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._works = False  # whether the thread runs
        self._waiting: tuple[int, str] | None = None  # the step that is next, and its save id
        self._unpruned: list[int] = []
        self.ended: list[Exported] = []

    def after(self, step: int, save_id: str) -> None:
        """The save of a step has ended, well or not. Returns at once."""
        self._begin(step, save_id)
        with self._changed:
            if self._works:
                self._unpruned.append(step)
                return
        self._prune_after(step)

    def restored(self, step: int) -> None:
        """A run continues from a step, which is exported now if that was not done."""
        if not os.path.lexists(self._path(step)):
            self._begin(step, "")

    def _begin(self, step: int, save_id: str) -> None:
        if self._export is None or step % self._export.every != 0:
            return
        with self._changed:
            if self._waiting is not None:
                logger.warning(
                    "Step %d is not exported: the one before is still exported, and step %d takes its turn",
                    self._waiting[0], step,
                )  # fmt: skip
            self._waiting = step, save_id
            if not self._works:
                self._works = True
                threading.Thread(target=self._work, name="tilestone-export").start()

    def wait(self) -> None:
        """Waits until no export is under way. Does nothing in a forked child."""
        if self._process == os.getpid():
            with self._changed:
                self._changed.wait_for(lambda: not self._works)

    def _path(self, step: int) -> str:
        return os.path.join(self._directory, "export", "hf", f"step-{step:08}")

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._waiting is None:
                    self._works = False
                    steps, self._unpruned = self._unpruned, []
                    for step in steps:
                        self._prune_after(step)
                    self._changed.notify_all()
                    return
                (step, save_id), self._waiting = self._waiting, None
            if save_id and self._save_id_of(step) != save_id:
                continue  # the save has failed
            ended = self._tried(step)
            if ended.error is not None:
                logger.warning("The export of step %d has failed, and is tried again: %s", step, ended.error)
                ended = self._tried(step)
            if ended.error is None:
                logger.info("Exported step %d to %s in %.1f s", step, ended.path, ended.seconds)
            else:
                logger.error("Step %d was not exported: %s", step, ended.error)
            self.ended.append(ended)

    def _save_id_of(self, step: int) -> str:
        """Of the durable checkpoint of a step; "": there is none."""
        try:
            with open_checkpoint(os.path.join(self._directory, self._name_of(step))) as found:
                return found.save_id
        except Exception:  # the thread must go on
            return ""

    def _tried(self, step: int) -> Exported:
        began, path, failed = time.monotonic(), self._path(step), None
        new = NewFolder(path)
        try:
            self._make(step, new)
            self._remove_old()
        except Exception as error:
            failed = error
            new.abandon()
        return Exported(step, path, failed, time.monotonic() - began)

    def _make(self, step: int, new: NewFolder) -> None:
        export = self._export
        assert export is not None
        new.begin()
        convert(
            os.path.join(self._directory, self._name_of(step)), new.model, format="safetensors",
            only=export.only, rename=export.rename, cast=export.dtype, shard_size=_SHARD_BYTES,
        )  # fmt: skip
        export.copy_config(new.model)
        new.publish()

    def _remove_old(self) -> None:
        """Removes the exports that are not kept, and what killed processes have left."""
        assert self._export is not None
        above = os.path.dirname(self._path(0))
        names = os.listdir(above)
        found = sorted((int(m[1]), name) for name in names if (m := _FOLDER.fullmatch(name)))
        for _, name in found[: -self._export.keep] if self._export.keep else []:
            gone = os.path.join(above, f".{name}.removed")
            shutil.rmtree(gone, ignore_errors=True)
            os.rename(os.path.join(above, name), gone)  # nobody sees a part of it
        for name in os.listdir(above):
            if is_hidden(name) or name.endswith(".removed"):
                shutil.rmtree(os.path.join(above, name), ignore_errors=True)
