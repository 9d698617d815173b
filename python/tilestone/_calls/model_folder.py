"""A Hugging Face folder that is made beside the old one, and then takes its place.

    parent/NAME                   the folder: the old model, or nothing
    parent/.NAME.tilestone-ID/    the engine's directory of a save (engine/commit/sibling.cc)
        pieces/                   a checkpoint of all ranks, if tensors have to be joined
        model/                    the new folder

The files of the model are made in `model`, and are durable. Rank 0 takes over the other files of the
old folder (config.json, tokenizer files), as hard links or as copies, and then has `model` take the
folder's place, which is one step of the file system. What is written to the folder meanwhile is lost.
"""

from __future__ import annotations

import os
import shutil
import threading
import uuid
import weakref
from collections.abc import Mapping
from typing import Any, NoReturn

from tilestone import _core
from tilestone._errors import AlreadyExistsError, InvalidArgumentError, UnsupportedError
from tilestone._options import valid

#: Of torch's writer: the pieces of a model that it has joined.
_TORCHS_PIECES = "sharded"

#: Those of this process that have begun, by path: of two saves to a folder the earlier one ends.
_begun: weakref.WeakValueDictionary[str, NewFolder] = weakref.WeakValueDictionary()


def _is_of_a_model(name: str) -> bool:
    """Whether a file or directory of a folder belongs to its model, which a new one replaces."""
    return name.endswith((".safetensors", ".safetensors.index.json")) or name in (
        ".tilestone", _TORCHS_PIECES,
    )  # fmt: skip


def sync(directory: str) -> None:
    """Makes the names in a directory durable."""
    held = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(held)
    finally:
        os.close(held)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
        with open(target, "rb") as copied:
            os.fsync(copied.fileno())


def _abandon(sibling: _core.NewSibling, process: int) -> None:
    if os.getpid() == process:  # not in a forked child
        sibling.abandon()


class NewFolder:
    """The names of a folder that is being made, and rank 0's steps of it.

    On rank 0 the hidden directory goes with the object, if it was not published.

    Args:
        path: of the folder, in a file system. Symbolic links are resolved.
        attempt: rank 0's; by default a new one.

    Attributes:
        end: once it has begun, removes the hidden directory; at the interpreter's end, too.
    """

    def __init__(self, path: str | os.PathLike[str], attempt: str = "") -> None:
        valid.refuse_any_url(path, "a Hugging Face folder")
        self.path = os.path.realpath(path)
        self.attempt = attempt or str(uuid.uuid4())
        parent, name = os.path.split(self.path)
        self.place = os.path.join(parent, f".{name}.tilestone-{self.attempt}")
        self.pieces = os.path.join(self.place, "pieces")
        self.model = os.path.join(self.place, "model")
        self.end: Any = None
        self._sibling: Any = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Makes the hidden directory.

        Raises:
            AlreadyExistsError: the folder holds a checkpoint of another kind, or another process
                saves to it.
            InvalidArgumentError: it is a file.
            UnsupportedError: it can't be replaced in one step.
        """
        self._check_old()
        if (earlier := _begun.get(self.path)) is not None:
            earlier.abandon()
        self._sibling = _core.NewSibling(os.fsencode(self.path), self.attempt)
        self.end = weakref.finalize(self, _abandon, self._sibling, os.getpid())
        _begun[self.path] = self
        try:
            self._sibling.begin()
        except BaseException:
            self.abandon()
            raise

    def _check_old(self) -> None:
        """Refuses what is at the path and is no folder that can be replaced."""
        if not os.path.lexists(self.path):
            return
        if not os.path.isdir(self.path):
            raise InvalidArgumentError(f"{self.path} is a file, and a folder is written")
        self.refuse_working_directory()
        if os.path.ismount(self.path):
            self._refuse("another file system is mounted there")
        what, file = _core.other_than_model(os.fsencode(self.path))
        if what:
            raise AlreadyExistsError(
                f"{self.path} is no Hugging Face folder: it holds {what}", file=file,
                hint="save elsewhere, or remove that first",
            )  # fmt: skip

    def refuse_working_directory(self) -> None:
        """For every rank that has one: it would be removed with the old folder.

        Raises:
            UnsupportedError: the working directory of this process is in the folder.
        """
        try:
            here = os.getcwd()
        except OSError:  # it was removed
            return
        if os.path.join(here, "").startswith(os.path.join(self.path, "")):
            self._refuse("the working directory of this process is in it")

    def _refuse(self, why: str) -> NoReturn:
        raise UnsupportedError(
            f"{self.path} can't be replaced: {why}", hint="save to a folder that does not exist"
        )

    def publish(self) -> None:
        """Takes over the other files of the old folder, and puts the new one in its place.

        Raises:
            AlreadyExistsError: a later save of this process has ended this one.
        """
        with self._lock:
            if self.end is None or not self.end.alive:
                raise AlreadyExistsError(f"a later save to {self.path} has ended this one")
            self._publish()
            self._abandon()

    def _publish(self) -> None:
        os.makedirs(self.model, exist_ok=True)  # of a state without tensors
        if os.path.isdir(self.path):
            shutil.copymode(self.path, self.model)
            for entry in os.scandir(self.path):
                target = os.path.join(self.model, entry.name)
                if _is_of_a_model(entry.name) or os.path.lexists(target):
                    continue
                if entry.is_symlink():
                    os.symlink(os.readlink(entry.path), target)
                elif entry.is_dir():
                    shutil.copytree(entry.path, target, symlinks=True, copy_function=_link)
                else:
                    _link(entry.path, target)
        for directory, _, _ in os.walk(self.model):
            sync(directory)
        self._sibling.publish(os.path.basename(self.model))

    def abandon(self) -> None:
        """Removes the hidden directory, also of an attempt that has failed."""
        with self._lock:
            self._abandon()

    def _abandon(self) -> None:
        # Not by a call, which does nothing at the interpreter's end.
        if self.end is not None and (left := self.end.detach()):
            _abandon(*left[2])

    def join(self, files: Mapping[str, str], other_file: str, comm: Any = None) -> None:
        """Makes `model` of `pieces`: every rank of the communicator writes some of the files.

        Args:
            files: the file of each key; `other_file`: of all other keys, or "".
            comm: by default this process works alone.
        """
        options = _core.ConvertOptions()
        options.format = "safetensors"
        options.files = dict(files)
        options.other_file = other_file
        options.timeout = _core.DEFAULT_TIMEOUT
        source, target = os.fsencode(self.pieces), os.fsencode(self.model)
        _core.convert(source, target, options, None, comm)
