"""A Hugging Face folder that is made beside the old one, and then takes its place.

    parent/NAME                  the folder: the old model, or nothing
    parent/.NAME.huggingface/    while a new one is made; what is found there was left by a dead process
        pieces/                  a checkpoint of all ranks, if tensors have to be joined
        model/                   the new folder

1. Rank 0 removes what is left of an earlier attempt, and makes the hidden directory.
2. The files of the model are made in `model`, and are durable.
3. Rank 0 takes over the other files of the old folder (config.json, tokenizer files): as hard links,
   or as copies.
4. `model` is renamed to NAME, or the two are exchanged, which is one step of the file system.
5. The hidden directory is removed, with the old model in it.

Before step 4 the folder is untouched, after it the new one is complete and durable. Nothing locks the
folder: two programs must not write to one folder at the same time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from tilestone import _core
from tilestone._errors import AlreadyExistsError
from tilestone._options import valid

_HIDDEN = ".huggingface"
#: Of torch's writer: the pieces of a model that it has joined.
_TORCHS_PIECES = "sharded"
#: Files by which a folder is a checkpoint that is no Hugging Face folder.
_OTHER_INDEXES = (".metadata", "metadata.json")


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


class NewFolder:
    """The names of a folder that is being made, and rank 0's steps of it.

    Args:
        path: of the folder, in a file system. Symbolic links are resolved.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        valid.refuse_any_url(path, "a Hugging Face folder")
        self.path = os.path.realpath(path)
        self._parent, self._name = os.path.split(self.path)
        self._hidden = f".{self._name}{_HIDDEN}"
        self.place = os.path.join(self._parent, self._hidden)
        self.pieces = os.path.join(self.place, "pieces")
        self.model = os.path.join(self.place, "model")

    def begin(self) -> None:
        """Step 1.

        Raises:
            AlreadyExistsError: the folder holds a checkpoint of another kind.
        """
        for name in _OTHER_INDEXES:
            if os.path.lexists(os.path.join(self.path, name)):
                raise AlreadyExistsError(
                    f"{self.path} holds a checkpoint that is no Hugging Face folder", file=name,
                    hint="save elsewhere, or remove that checkpoint first",
                )  # fmt: skip
        self.abandon()
        os.makedirs(self.place)
        if os.path.isdir(self.path):
            shutil.copymode(self.path, self.place)

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
        """Removes the hidden directory."""
        shutil.rmtree(self.place, ignore_errors=True)

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
        source, target = os.fsencode(self.pieces), os.fsencode(self.model)
        _core.convert(source, target, options, None, None, comm)
