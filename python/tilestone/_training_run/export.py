"""Models for others, which a run makes of its steps: Hugging Face folders."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from tilestone import _core
from tilestone._calls.async_save import end_saves
from tilestone._calls.maintenance import convert
from tilestone._calls.model_folder import NewFolder
from tilestone._calls.opening import open as open_checkpoint
from tilestone._errors import AlreadyExistsError, InvalidArgumentError
from tilestone._options import valid
from tilestone._options.rename import Rename, renaming

logger = logging.getLogger("tilestone")

_SHARD_BYTES = 5_000_000_000  # of a safetensors file, as save_pretrained has long had it
_FOLDER = re.compile(r"step-(\d{8,})")
_REMOVED = re.compile(rf"\.{_FOLDER.pattern}\.removed")  # while it is removed
_MADE = re.compile(rf"\.({_FOLDER.pattern})\.tilestone-.*")  # while it is made, or of a dead process
_SOURCE = os.path.join(".tilestone", "source")  # in an export: the save id of the step's checkpoint
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
        config_dir: a folder, which rank 0 sees, whose files are copied into each export: config.json,
            the tokenizer's files, code; not its weights and subfolders. None: there are none.
        keep: so many of the newest exports are kept; None: all. Those of steps that the run has left
            count as older.

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
        if self.config_dir is not None:
            object.__setattr__(self, "config_dir", valid.absolute(os.fspath(self.config_dir)))

    def check_config(self) -> None:
        """Refuses a config_dir in which there is no config.json, as this rank sees it."""
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
        return os.path.join(self.config_dir, name)

    def copy_config(self, folder: str) -> None:
        """Copies the files of config_dir into a folder."""
        if self.config_dir is None:
            return
        for name in os.listdir(self.config_dir):
            source, target = self._in_config(name), os.path.join(folder, name)
            if name.startswith(".") or name.endswith(_WEIGHTS) or not os.path.isfile(source):
                continue
            with open(source, "rb") as read:
                data = read.read()
            if name == "config.json" and self.dtype_name:
                config = json.loads(data)
                if not {"dtype", "torch_dtype"} & config.keys():
                    config["dtype"] = None
                _set_dtype(config, self.dtype_name)
                data = json.dumps(config, indent=2).encode() + b"\n"
            _write(target, data)


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Has a config.json, and the parts of it ("text_config"), name the dtype in which transformers loads."""
    for name, value in config.items():
        if name in ("dtype", "torch_dtype"):
            config[name] = dtype
        elif name.endswith("_config") and isinstance(value, dict):
            _set_dtype(value, dtype)


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


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
    error: BaseException | None
    seconds: float


def _text(error: BaseException) -> str:
    return str(error) or repr(error)


class Exporter:
    """Makes a run's exports, on a thread of rank 0, and has steps pruned.

    While an export is made no step is pruned, because it could be the one that is read; when the next
    one begins, those before it are. One further step may wait; a newer one takes its place.

    Args:
        export: what is exported; None: nothing, here.
        directory: the run's; absolute.
        name_of: the folder of a step.
        prune_after: prunes once a step is durable; returns at once. It keeps the step and later ones.
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
        self._works = False  # whether a thread makes exports
        self._is_closed = False  # whether the program ends, and no export begins any more
        self._waiting: int | None = None  # the step that is next
        self._unpruned: list[int] = []
        self.ended: list[Exported] = []
        _exporters.add(self)

    def after(self, step: int, save_id: str) -> None:
        """The save of a step has ended, well or not. Returns soon."""
        if self._is_due(step) and self._save_id_of(step) == save_id:
            self._begin(step)
        with self._changed:
            if self._works:
                self._unpruned.append(step)
                return
        self._prune_after(step)

    def restored(self, step: int, on_hosts: str) -> None:
        """A run continues from a step, which is exported now if that was not done.

        Args:
            step: the step.
            on_hosts: the folder on the hosts of which it was loaded, whose name ends with the save id;
                "": from the run's directory. That may lack a step of the hosts, or have one of the
                same number that the run has left.
        """
        if not self._is_due(step):
            return
        save_id = self._save_id_of(step)
        if not save_id or (on_hosts and not on_hosts.endswith(save_id)):
            return
        if self._source_of(step) != save_id:
            self._begin(step)

    def _is_due(self, step: int) -> bool:
        return self._export is not None and step % self._export.every == 0

    def _begin(self, step: int) -> None:
        with self._changed:
            if self._is_closed:
                logger.warning("Step %d is not exported, because the program ends", step)
                return
            if self._waiting is not None:
                logger.warning(
                    "Step %d is not exported: the one before is still exported, and step %d takes its turn",
                    self._waiting, step,
                )  # fmt: skip
            self._waiting = step
            if self._works or _is_ending.is_set():  # then finish() makes it
                return
            try:
                threading.Thread(target=self._work, name="tilestone-export", daemon=False).start()
                self._works = True
            except RuntimeError as error:
                if not threading.main_thread().is_alive():  # the program ends, before it calls _exit()
                    return
                self._waiting = None  # too many threads
                self._end(Exported(step, self._path(step), error, 0.0))

    def wait(self) -> None:
        """Waits until no export is under way. Does nothing in a forked child."""
        if self._process == os.getpid():
            with self._changed:
                self._changed.wait_for(lambda: not self._works)

    def finish(self) -> None:
        """At the program's end, when no thread can begin: makes what waits; nothing begins later.

        Does nothing in a forked child, in which a lock of the parent may be held for ever.
        """
        if self._process != os.getpid():
            return
        self.wait()
        with self._changed:
            self._is_closed = True
            self._works = self._waiting is not None
        if self._works:
            self._work()

    def _path(self, step: int) -> str:
        return os.path.join(self._directory, "export", "hf", f"step-{step:08}")

    def _work(self) -> None:
        try:
            while (step := self._next()) is not None:
                ended = self._tried(step)
                if ended.error is not None:
                    logger.warning("The export of step %d has failed, and is tried again: %s", step, _text(ended.error))
                    ended = self._tried(step)
                self._end(ended)
        except BaseException:
            with self._changed:  # nobody may wait for this thread
                self._works, self._waiting = False, None
                self._changed.notify_all()
            raise

    def _next(self) -> int | None:
        """The step that is to be exported; None: there is none, and the thread ends."""
        with self._changed:
            step, self._waiting = self._waiting, None
            if step is None:
                self._works = False
                self._changed.notify_all()
                steps, self._unpruned = self._unpruned, []
            else:
                steps = [step] if step in self._unpruned else []
                self._unpruned = [each for each in self._unpruned if each > step]
            for each in steps:
                self._prune_after(each)
            return step

    def _end(self, ended: Exported) -> None:
        if ended.error is None:
            logger.info("Exported step %d to %s in %.1f s", ended.step, ended.path, ended.seconds)
        else:
            logger.error("Step %d was not exported: %s", ended.step, _text(ended.error))
        self.ended.append(ended)

    def _save_id_of(self, step: int) -> str:
        """Of the durable checkpoint of a step; "": there is none."""
        try:
            with open_checkpoint(os.path.join(self._directory, self._name_of(step))) as found:
                return found.save_id
        except Exception:  # the thread must go on
            return ""

    def _source_of(self, step: int) -> str | None:
        """The save id of the checkpoint that a step's export was made of; None: there is no export."""
        try:
            with open(os.path.join(self._path(step), _SOURCE)) as file:
                return file.read()
        except OSError:
            return None

    def _tried(self, step: int) -> Exported:
        began, path, failed = time.monotonic(), self._path(step), None
        new = NewFolder(path)
        try:
            self._make(step, new)
            self._remove_old(step)
        except BaseException as error:  # SystemExit of `rename` too
            failed = error
            new.abandon()
        return Exported(step, path, failed, time.monotonic() - began)

    def _make(self, step: int, new: NewFolder) -> None:
        export = self._export
        assert export is not None
        new.begin()
        new.end.atexit = False  # _exit() waits for it
        source = self._save_id_of(step)  # a step that is saved anew meanwhile is exported again
        convert(
            os.path.join(self._directory, self._name_of(step)), new.model, format="safetensors",
            only=export.only, rename=export.rename, cast=export.dtype, shard_size=_SHARD_BYTES,
        )  # fmt: skip
        export.copy_config(new.model)
        _write(os.path.join(new.model, _SOURCE), source.encode())
        new.publish()

    def _remove_old(self, made: int) -> None:
        """Removes the exports that are not kept, and what killed processes have left.

        Args:
            made: the step that was exported last. The run has left higher ones.
        """
        assert self._export is not None
        above = os.path.dirname(self._path(0))
        names = os.listdir(above)
        found = [(int(m[1]) <= made, int(m[1]), name) for name in names if (m := _FOLDER.fullmatch(name))]
        for _, _, name in sorted(found)[: -self._export.keep] if self._export.keep else []:
            gone = os.path.join(above, f".{name}.removed")
            shutil.rmtree(gone, ignore_errors=True)
            os.rename(os.path.join(above, name), gone)  # nobody sees a part of it
        for name in os.listdir(above):
            if _REMOVED.fullmatch(name):
                shutil.rmtree(os.path.join(above, name), ignore_errors=True)
            elif left := _MADE.fullmatch(name):
                with contextlib.suppress(AlreadyExistsError):  # another process makes it
                    _core.clean_beside(os.fsencode(os.path.join(above, left[1])))


_exporters: weakref.WeakSet[Exporter] = weakref.WeakSet()
_is_ending = threading.Event()  # the program


@atexit.register
def _exit() -> None:
    _is_ending.set()
    end_saves()  # whose exports then wait
    for each in list(_exporters):
        each.finish()
