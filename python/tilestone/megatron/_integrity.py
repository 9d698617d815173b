"""`integrity.json`: the SHA-256 of each file in a checkpoint's directory, as Megatron-Core writes it.

The ranks divide the files among them: each hashes its own data files, which its host has in memory.
Hashing is done by OpenSSL, without the GIL. A save of Tilestone adds its id. So hashes that a later
save has left behind, because it was killed before it removed them, are known to be old.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from typing import Any

from tilestone import _core
from tilestone._errors import CheckpointError, CorruptError, UnsafeError
from tilestone._options import valid
from tilestone.megatron import _ranks
from tilestone.megatron._files import storage_errors
from tilestone.megatron._stored import INTEGRITY_FILE, literal, open_sharded
from tilestone.megatron._ranks import Deadline, agreed, on_one

logger = logging.getLogger("tilestone.megatron")

_ALGORITHM = "sha256"


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
                    self._known[name] = _core.sha256_of_file(os.fsencode(folder), name)

    def write(self) -> None:
        """Hashes what is missing, and writes the file. Every rank calls, after publication.

        Raises:
            StorageError: a file can't be read, or the hashes can't be written; on every rank.
        """
        folder, group, work = literal(self._directory), self._group, "hashing of a checkpoint"
        own, size = _ranks.rank(group), _ranks.size(group)

        files = on_one(work, group, lambda: _files_in(folder), self._deadline)

        def hashed() -> dict[str, str]:
            mine = {}
            for number, name in enumerate(files):
                writer = _writer(name, self.save_id)
                if (number if writer is None else writer) % size == own:
                    known = self._known.get(name)
                    mine[name] = known or _core.sha256_of_file(os.fsencode(folder), name)
            return mine

        def publish(said: list[dict[str, str]]) -> None:
            found = {name: digest for each in said for name, digest in each.items()}
            content: dict[str, Any] = {"algorithm": _ALGORITHM, "files": dict(sorted(found.items()))}
            if self.save_id:
                content["save_id"] = self.save_id
            text = json.dumps(content, indent=2)
            _core.put_file(valid.directory(folder), INTEGRITY_FILE, text.encode())

        agreed(work, group, hashed, dict, publish, self._deadline)


def remove_old(checkpoint_dir: Any) -> None:
    """Removes the hashes of a checkpoint that a save has replaced. One rank calls."""
    try:
        _core.remove_file(valid.directory(literal(checkpoint_dir)), INTEGRITY_FILE)
    except CheckpointError as problem:
        logger.warning("Can't remove %s of a replaced checkpoint: %s", INTEGRITY_FILE, problem)


def check(checkpoint_dir: Any, rank: int, ranks: int) -> None:
    """Compares this rank's share of the files with the hashes of `integrity.json`.

    Does nothing if that file does not exist, or is of an earlier save; what Tilestone has written
    is checked when it is read.

    Raises:
        CorruptError: a file is missing, has another content, or is not named there.
    """
    folder = literal(checkpoint_dir)
    if _core.bytes_at(valid.directory(folder), INTEGRITY_FILE, 0, 0) is None:
        return
    with open_sharded(checkpoint_dir) as checkpoint:
        save_id = checkpoint.save_id
    for name, problem, unsafe in _core.check_hashes(valid.directory(folder), save_id, rank, ranks):
        path = os.path.join(folder, name)
        raise (UnsafeError if unsafe else CorruptError)(f"{path}: {problem}", file=path)


def _writer(name: str, save_id: str) -> int | None:
    """The rank whose data file a name denotes; None: it denotes no data file of the save."""
    match = re.fullmatch(rf".*{re.escape(save_id)}__([0-9]{{1,9}})_[0-9]+\.distcp", name)
    return int(match[1]) if save_id and match else None


def _files_in(folder: str) -> list[str]:
    """The names of the files that Megatron-Core hashes: all that are not in a folder below."""
    with storage_errors(folder), os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_file() and e.name != INTEGRITY_FILE)
