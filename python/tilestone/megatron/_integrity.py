"""`integrity.json`: the SHA-256 of each file in a checkpoint's directory, as Megatron-Core writes it.

The ranks divide the files among them: each hashes its own data files, which its host has in memory.
Hashing is done by OpenSSL, without the GIL. A save of Tilestone adds its id. So hashes that a later
save has left behind, because it was killed before it removed them, are known to be old.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
from typing import Any

from tilestone._errors import CorruptError, StorageError, UnsafeError
from tilestone.megatron import _ranks
from tilestone.megatron._files import read_json, replace_file, sync_folder
from tilestone.megatron._stored import INTEGRITY_FILE, literal, open_sharded
from tilestone.megatron._ranks import Deadline, agreed, then_one

logger = logging.getLogger("tilestone.megatron")

_ALGORITHM = "sha256"
_PIECE = 4 << 20  # bytes that are hashed at once


class Hashes:
    """The hashes of a checkpoint that is being saved.

    Args:
        checkpoint_dir: the checkpoint's directory.
        group, deadline: of the save.

    Attributes:
        save_id: of the save, once it is known; "": it is not one of the engine.
    """

    def __init__(self, checkpoint_dir: Any, group: Any, deadline: Deadline) -> None:
        self._directory = checkpoint_dir
        self._group = _ranks.default_group(group)
        self._deadline = deadline
        self._known: dict[str, str] = {}
        self.save_id = ""

    def hash_files(self) -> None:
        """Hashes this rank's data files, unless they are not in the directory yet."""
        folder, own = literal(self._directory), _ranks.rank(self._group)
        with contextlib.suppress(OSError):  # write() reports it
            for name in os.listdir(folder):
                if _writer(name, self.save_id) == own:
                    self._known[name] = _hash(os.path.join(folder, name))

    def write(self) -> None:
        """Hashes what is missing, and writes the file. Every rank calls, after publication.

        Raises:
            StorageError: a file can't be read, or the hashes can't be written; on every rank.
        """
        folder, group, work = literal(self._directory), self._group, "hashing of a checkpoint"
        own, size = _ranks.rank(group), _ranks.size(group)

        def listed() -> bytes:
            return json.dumps(_files_in(folder)).encode()

        _, answer = then_one(work, group, lambda: None, listed, self._deadline)

        def hashed() -> dict[str, str]:
            mine = {}
            for number, name in enumerate(json.loads(answer)):
                writer = _writer(name, self.save_id)
                if (number if writer is None else writer) % size == own:
                    known = self._known.get(name)
                    mine[name] = known or _hash(os.path.join(folder, name))
            return mine

        def publish(said: list[bytes]) -> bytes:
            found: dict[str, str] = {}
            for each in said:
                found |= json.loads(each)
            content: dict[str, Any] = {"algorithm": _ALGORITHM, "files": dict(sorted(found.items()))}
            if self.save_id:
                content["save_id"] = self.save_id
            path = os.path.join(folder, INTEGRITY_FILE)
            with _as_storage_error(path):
                replace_file(path, json.dumps(content, indent=2))
            return b""

        def words(found: dict[str, str]) -> bytes:
            return json.dumps(found).encode()

        agreed(work, group, hashed, words, publish, self._deadline)


def remove_old(checkpoint_dir: Any) -> None:
    """Removes the hashes of a checkpoint that a save has replaced. One rank calls."""
    folder = literal(checkpoint_dir)
    try:
        os.unlink(os.path.join(folder, INTEGRITY_FILE))
        sync_folder(folder)
    except FileNotFoundError:
        return
    except OSError as problem:
        logger.warning("Can't remove %s of a replaced checkpoint: %s", INTEGRITY_FILE, problem)


def check(checkpoint_dir: Any, rank: int, ranks: int) -> None:
    """Compares this rank's share of the files with the hashes of `integrity.json`.

    Does nothing if that file does not exist, or is of an earlier save; what Tilestone has written
    is checked when it is read.

    Raises:
        CorruptError: a file is missing, has another content, or is not named there.
        UnsafeError: a name is not that of a file in the directory.
    """
    folder = literal(checkpoint_dir)
    path = os.path.join(folder, INTEGRITY_FILE)
    try:
        found = read_json(path)
    except FileNotFoundError:
        return
    files = found.get("files") if isinstance(found, dict) else None
    if not isinstance(files, dict) or found.get("algorithm") != _ALGORITHM:
        raise CorruptError(f"{path} does not hold sha256 hashes of files", file=path)
    if "save_id" in found and found["save_id"] != _save_id(checkpoint_dir):
        if rank == 0:
            logger.warning("%s is of an earlier save, and is ignored", path)
        return
    for name in sorted(files)[rank::ranks]:
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise UnsafeError(f"{path} names a file outside the checkpoint: {name!r}", file=path)
        _check_file(os.path.join(folder, name), files[name])
    if rank == 0 and (more := set(_files_in(folder)) - set(files)):
        extra = os.path.join(folder, min(more))
        raise CorruptError(f"{extra} is not named in {INTEGRITY_FILE}", file=extra)


def _save_id(checkpoint_dir: Any) -> str:
    with open_sharded(checkpoint_dir) as checkpoint:
        return checkpoint.save_id


def _writer(name: str, save_id: str) -> int | None:
    """The rank whose data file a name denotes; None: it denotes no data file of the save."""
    match = re.fullmatch(rf".*{re.escape(save_id)}__([0-9]{{1,9}})_[0-9]+\.distcp", name)
    return int(match[1]) if save_id and match else None


def _files_in(folder: str) -> list[str]:
    """The names of the files that Megatron-Core hashes: all that are not in a folder below."""
    with _as_storage_error(folder), os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_file() and e.name != INTEGRITY_FILE)


def _check_file(path: str, expected: Any) -> None:
    try:
        found = _hash(path)
    except StorageError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise CorruptError(f"{path}, which {INTEGRITY_FILE} names, is missing", file=path) from None
    if found != expected:
        raise CorruptError(
            f"{path} has the sha256 {found}, but {INTEGRITY_FILE} has {expected}", file=path
        )


def _hash(path: str) -> str:
    found = hashlib.sha256()
    piece = memoryview(bytearray(_PIECE))
    with _as_storage_error(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with open(descriptor, "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UnsafeError(f"{path} is not a regular file", file=path)
            while count := file.readinto(piece):
                found.update(piece[:count])
    return found.hexdigest()


@contextlib.contextmanager
def _as_storage_error(path: str) -> Any:
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(message=str(error), file=path, errno=error.errno) from error
