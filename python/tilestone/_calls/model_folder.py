"""A Hugging Face folder that is made beside the old one, and then takes its place.

    parent/NAME                  the folder: the old model, or nothing
    parent/.NAME.huggingface-ID/ while a new one is made; ID is another one for each attempt
        pieces/                  a checkpoint of all ranks, if tensors have to be joined
        model/                   the new folder

1. Rank 0 removes what dead processes have left, and makes the hidden directory, which it locks: the
   directories of others that are locked stay. Where a file system has no locks, they count as dead.
2. The files of the model are made in `model`, and are durable.
3. Rank 0 takes over the other files of the old folder (config.json, tokenizer files): as hard links,
   or as copies.
4. `model` is renamed to NAME, or the two are exchanged, which is one step of the file system.
5. The hidden directory is removed, with the old model in it.

Before step 4 the folder is untouched, after it the new one is complete and durable. Nothing locks the
folder itself: of two saves the one that ends last stays, and what is written to it by others during
the steps 3 and 4 is lost.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import uuid
import weakref
from collections.abc import Mapping
from typing import Any, NoReturn

from tilestone import _core
from tilestone._errors import AlreadyExistsError, InvalidArgumentError, UnsupportedError
from tilestone._options import valid

#: Of torch's writer: the pieces of a model that it has joined.
_TORCHS_PIECES = "sharded"


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


def _locked(place: str) -> int | None:
    """Locks a hidden directory, until the file is closed; None: another process has."""
    held = os.open(place, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        return None
    except OSError:  # there are no locks here
        pass
    return held


def _remove(place: str, held: int, process: int) -> None:
    if os.getpid() == process:  # not in a forked child
        shutil.rmtree(place, ignore_errors=True)
        os.close(held)


def remove_dead(parent: str, names: str) -> None:
    """Removes what dead processes have left of folders that they were making.

    Args:
        names: a regular expression for the names of the folders.
    """
    hidden = re.compile(rf"\.{names}\.huggingface-[0-9a-f]{{32}}")
    for name in os.listdir(parent) if os.path.isdir(parent) else []:
        if not hidden.fullmatch(name):
            continue
        left = os.path.join(parent, name)
        try:
            held = _locked(left)
        except OSError:  # another process has removed it
            continue
        if held is not None:
            _remove(left, held, os.getpid())


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
        self.attempt = attempt or uuid.uuid4().hex
        self._parent, self._name = os.path.split(self.path)
        self._hidden = f".{self._name}.huggingface-{self.attempt}"
        self.place = os.path.join(self._parent, self._hidden)
        self.pieces = os.path.join(self.place, "pieces")
        self.model = os.path.join(self.place, "model")
        self.end: Any = None

    def begin(self) -> None:
        """Step 1.

        Raises:
            AlreadyExistsError: the folder holds a checkpoint of another kind.
            InvalidArgumentError: it is a file.
            UnsupportedError: it can't be replaced in one step.
        """
        is_old = self._check_old()
        remove_dead(self._parent, re.escape(self._name))
        os.makedirs(self.place)
        held = _locked(self.place)
        if held is None:
            raise AlreadyExistsError(f"another save to {self.path} began at the same moment")
        self.end = weakref.finalize(self, _remove, self.place, held, os.getpid())
        if is_old:
            shutil.copymode(self.path, self.place)
            self._try_exchange()

    def _check_old(self) -> bool:
        """Whether there is something at the path, which must be a folder that can be replaced."""
        if not os.path.lexists(self.path):
            return False
        if not os.path.isdir(self.path):
            raise InvalidArgumentError(f"{self.path} is a file, and a folder is written")
        self.refuse_working_directory()
        if os.path.ismount(self.path):
            self._refuse("another file system is mounted there")
        if not os.access(self.path, os.W_OK, effective_ids=True):
            mode = os.stat(self.path).st_mode & 0o7777
            self._refuse(f"this process must not write to it (its mode is {mode:o})")
        what, file = _core.other_than_model(os.fsencode(self.path))
        if what:
            raise AlreadyExistsError(
                f"{self.path} is no Hugging Face folder: it holds {what}", file=file,
                hint="save elsewhere, or remove that first",
            )  # fmt: skip
        return True

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

    def _try_exchange(self) -> None:
        for name in ("new", "old/not empty"):
            os.makedirs(os.path.join(self.place, "trial", name))
        try:
            _core.replace_directory(os.fsencode(os.path.join(self.place, "trial")), "new", "old")
        except UnsupportedError as error:
            error.add_hint("save to a folder that does not exist")
            raise
        shutil.rmtree(os.path.join(self.place, "trial"))

    def publish(self) -> None:
        """Steps 3 to 5."""
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
        made = os.path.join(self._hidden, os.path.basename(self.model))
        _core.replace_directory(os.fsencode(self._parent or "/"), made, self._name)
        self.abandon()

    def abandon(self) -> None:
        """Step 5, also of an attempt that has failed."""
        # Not by a call, which does nothing at the interpreter's end.
        if self.end is not None and (left := self.end.detach()):
            _remove(*left[2])

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
