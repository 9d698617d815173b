"""Reads a checkpoint without a template, without other ranks and without torch."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from tilestone import _core
from tilestone._calls import binding
from tilestone._calls.stored_tensor import StoredTensor
from tilestone._errors import CheckpointError, InvalidArgumentError, NotFoundError
from tilestone._objects import converters
from tilestone._objects.given import BoxLike, to_box
from tilestone._options import valid
from tilestone._options.keywords import checked, keywords
from tilestone._options.progress import ProgressCallback, reporting
from tilestone._options.kinds import checked_framework
from tilestone._options.values import OpenOptions
from tilestone._protocols import SupportsDlpack

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tilestone._options.values import OpenKeywords


class Checkpoint:
    """An open checkpoint, made by `tilestone.open`.

    It is a context manager, and several threads may use it at the same time.

    Attributes:
        path: its directory.
        framework: "numpy" or "torch": the kind of arrays that `read` returns.
    """

    def __init__(self, core: _core.Checkpoint, path: str, framework: str) -> None:
        """Called by `tilestone.open`."""
        self._open: _core.Checkpoint | None = core
        self.path = path
        self.framework = framework

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files. Arrays that were read stay valid."""
        self._open = None

    @property
    def _handle(self) -> _core.Checkpoint:
        if self._open is None:
            raise InvalidArgumentError(f"the checkpoint {self.path} is closed")
        return self._open

    def keys(self, *patterns: str) -> list[str]:
        """The keys of all tensors and objects, sorted; with patterns, those that match one of them.

        Args:
            patterns: as the shell's: `*` for any text, `?` for one character, `[ab]` for one of some.
        """
        keys = self._handle.keys()
        if not patterns:
            return keys
        wanted = [valid.word("patterns", pattern) for pattern in patterns]
        return [key for key in keys if any(fnmatch.fnmatchcase(key, one) for one in wanted)]

    def tensor_keys(self) -> list[str]:
        """The keys of tensors, sorted."""
        return self._handle.tensor_keys()

    def object_keys(self) -> list[str]:
        """The keys of objects, sorted."""
        return self._handle.object_keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.tensor_keys()) + len(self.object_keys())

    def __contains__(self, key: object) -> bool:
        if not valid.is_text(key):
            return False
        return self._handle.is_tensor(key) or self._handle.is_object(key)

    def __getitem__(self, key: str) -> Any:
        """A `StoredTensor`, or the object itself.

        Raises:
            NotFoundError (a KeyError): there is no such key; the hint names similar ones.
        """
        if self._handle.is_tensor(valid.word("key", key)):
            return StoredTensor(self._handle, self.read, key)
        return self.object(key)

    def get(self, key: str, default: Any = None) -> Any:
        """ckpt[key], or the default if there is no such key."""
        return self[key] if key in self else default

    def state_dict(
        self, prefix: str = "", *, into: str | None = None, allow_classes: Collection[str] = ()
    ) -> dict[str, Any]:
        """Reads everything whose key begins with a prefix, as a flat dict without the prefix.

            model.load_state_dict(ckpt.state_dict("model.", into="torch"))

        Args:
            prefix: as it stands in the keys, with its dot.
            into: "numpy" or "torch"; by default the framework given to `open`.
            allow_classes: as for `object`.

        Raises:
            NotFoundError: no key begins with the prefix.
        """
        prefix = valid.word("prefix", prefix)
        keys = [key for key in self.keys() if key.startswith(prefix)]
        if not keys:
            raise NotFoundError(f"no key of the checkpoint {self.path} begins with {prefix!r}")
        tensors = [key for key in keys if self._handle.is_tensor(key)]
        read = self.read_many(tensors, framework=into)
        return {
            key[len(prefix) :]: read[key]
            if key in read
            else self.object(key, allow_classes=allow_classes, framework=into)
            for key in keys
        }

    def read(
        self,
        key: str,
        box: BoxLike | None = None,
        *,
        framework: str | None = None,
        out: SupportsDlpack | None = None,
    ) -> Any:
        """Reads a whole tensor, or one box of it.

        Args:
            key: the tensor's key.
            box: a Box, or (start, stop) for each dim, in elements; None for the whole tensor.
            framework: "numpy" or "torch"; by default the one given to `open`.
            out: an array with the box's shape and the stored dtype. It is filled and returned
                instead of a new array. It may have any strides and any byte order. If it is a torch
                tensor, autograd sees it as changed.

        Raises:
            NotFoundError: there is no such tensor; the hint names similar keys.
            InvalidArgumentError: the box is invalid or outside the tensor; or `out` is read-only,
                has no memory, or has several elements that share memory (an expanded tensor).
            CorruptError: a checksum or the file's structure is wrong, or the file is missing.

        torch does not record that memory is read-only. A tensor over a read-only map is recognised
        and refused, but a tensor over an immutable `bytes` object (torch.frombuffer warns of it) is
        written like any other. Use numpy.frombuffer(...), which is read-only, or a bytearray.
        """
        key = valid.word("key", key)
        handle = self._handle
        bridge = self._bridge(framework)
        try:
            part = None if box is None else self._part(key, box)
            if out is None:
                return bridge.make_array(handle.read(key, part), None)
            target = converters.view_to_fill(out)
            handle.read_into(key, part, target)
            binding.written(target, out)
            return out
        except CheckpointError as error:
            error.add_key(key)
            raise

    def read_many(
        self, keys: Collection[str], *, framework: str | None = None
    ) -> dict[str, Any]:
        """Reads whole tensors together, so that many small ones need only a few large reads.

        Args:
            keys: keys of tensors.
            framework: as for `read`.

        Returns:
            A dict in the order of the keys, with the arrays that `read` would return.

        Raises:
            NotFoundError: there is no such tensor; the hint names similar keys. Nothing is read.
            CorruptError: a checksum or the file's structure is wrong.
        """
        valid.names("keys", keys)
        names = [valid.word("key", key) for key in dict.fromkeys(keys)]
        bridge = self._bridge(framework)
        views = self._handle.read_many(names)
        return {
            name: bridge.make_array(view, None) for name, view in zip(names, views, strict=True)
        }

    def _part(self, key: str, box: BoxLike) -> _core.Box | None:
        """The box, checked to be inside the tensor; None if there is no such tensor."""
        if not self._handle.is_tensor(key):
            return None
        shape = self._handle.shape(key)
        try:
            part = to_box(box)
            inside = len(part.offset) == len(shape) and all(
                0 <= begin and 0 <= n and begin + n <= size
                for begin, n, size in zip(part.offset, part.shape, shape, strict=True)
            )
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                f"{error.message}; the tensor has shape {shape}", key=key
            ) from None
        if not inside:
            raise InvalidArgumentError(
                f"the box {box!r} is not inside the tensor of shape {shape}", key=key
            )
        return part

    def object(
        self, key: str, *, allow_classes: Collection[str] = (), framework: str | None = None
    ) -> Any:
        """Reads an object.

        Args:
            key: the object's key.
            allow_classes: names ("argparse.Namespace") of classes whose objects may be created.
                Objects of plain types need no permission (see `load`); an object of any other class
                comes back as `Opaque`.
            framework: "numpy" or "torch", for tensors inside the object.
        """
        key = valid.word("key", key)
        return self._handle.read_object(key, self._bridge(framework, allow_classes))

    def common(
        self, *, allow_classes: Collection[str] = (), framework: str | None = None
    ) -> Any:
        """Reads the common state of a checkpoint in Megatron-Core's dialect: everything that is not
        sharded, as a dict. None for PyTorch's dialect, which has no common state.

        Args:
            allow_classes, framework: as for `object`.

        Raises:
            CorruptError: the common state is damaged or missing.
        """
        return self._handle.common(self._bridge(framework, allow_classes))

    def object_bytes(self, key: str) -> bytes:
        """Reads the stored bytes of an object.

        They are a torch.save archive. In Megatron-Core's dialect the archive contains a list that
        holds the object.
        """
        return self._handle.read_object_bytes(valid.word("key", key))

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yields (key, ckpt[key]) in the order of keys."""
        return ((key, self[key]) for key in self.keys())

    def verify(self, progress: bool | ProgressCallback = False) -> _core.VerifyReport:
        """Reads every byte and checks every checksum, structure and size.

        Damage is reported in the result's `damages` and does not raise an error.
        """
        with reporting(progress, "verify") as sink:
            return self._handle.verify(sink)

    @property
    def files(self) -> list[str]:
        """The data files, relative to the checkpoint's directory."""
        return self._handle.files

    @property
    def writer(self) -> str:
        """The program that wrote the checkpoint, as far as its files say."""
        return self._handle.writer

    @property
    def format(self) -> str:
        """ "torch_dist", "zarr", "safetensors", "torch_checkpointing" or "torch_save" (a file)."""
        return self._handle.format

    @property
    def dialect(self) -> str:
        """ "pytorch" or "megatron": which parts of the state are sharded, and under which keys."""
        return self._handle.dialect

    @property
    def save_id(self) -> str:
        """The unique id of the save; empty if the writer recorded none."""
        return self._handle.save_id

    @property
    def world_size(self) -> int | None:
        """How many ranks saved it.

        None unless a commit manifest or a rank-local save by Tilestone says so.
        """
        return self._handle.world_size

    @property
    def hosts(self) -> list[str]:
        """The name of each rank's host during the save; empty without a commit manifest."""
        return self._handle.hosts

    @property
    def save_timings(self) -> list[dict[str, float]]:
        """The seconds that each rank of the save took to plan, to stage and to write its data.

        By rank, with the names of `SaveResult.timings` as far as a rank can report them before the
        checkpoint exists. Empty without a commit manifest, and for saves by files.
        """
        return self._handle.save_timings

    @property
    def attributes(self) -> dict[str, str]:
        """The `attributes` passed to `save`; empty if another program saved the checkpoint."""
        return self._handle.attributes

    def tensor_attributes(self, key: str) -> dict[str, Any]:
        """The `tensor_attributes` of one tensor that were passed to `save`, by attribute name.

        Empty if there were none, or without a commit manifest.

        Raises:
            NotFoundError: the checkpoint holds no tensor with this key.
        """
        return self._handle.tensor_attributes(valid.word("key", key), self._bridge(None, ()))

    @property
    def rank_local(self) -> bool:
        """Whether each rank wrote its own metadata file (torch's use_collectives=False)."""
        return self._handle.rank_local

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors. Each tensor counts once, with its full size."""
        return self._handle.tensor_bytes

    def path_of(self, key: str) -> tuple[str | int, ...]:
        """The path of the key in the writer's tree; empty if it is not recorded."""
        return tuple(self._handle.path_of(valid.word("key", key)))

    def _bridge(
        self, framework: str | None, allow_classes: Collection[str] = ()
    ) -> binding.Bridge:
        allowed = valid.names("allow_classes", allow_classes)
        chosen = self.framework
        if framework is not None:
            chosen = checked_framework("framework", framework)
        return binding.Bridge(allow=allowed, framework=chosen)

    def __repr__(self) -> str:
        if self._open is None:
            return f"Checkpoint({self.path!r}, closed)"
        tensors, objects = len(self.tensor_keys()), len(self.object_keys())
        return (
            f"Checkpoint({self.path!r}, {tensors} tensors of {self.nbytes:,} bytes, {objects} objects, "
            f"{self.format}, {self.dialect})"
        )


@keywords(OpenOptions)
def open(
    path: str | os.PathLike[str], *, mapped: bool = False, **options: Unpack[OpenKeywords]
) -> Checkpoint:
    """Opens a checkpoint for reading, whichever program wrote it.

    This needs no template, no other ranks and no torch. Pickles are never run.

    Processes that are forked from this one (torch's DataLoader workers) may continue to read from
    the checkpoint: each process gets its own threads, buffers and queues at its first read. Spawned
    processes must open the checkpoint themselves, because an open checkpoint can't be pickled.

    Args:
        path: the checkpoint's directory.
        mapped: `read`, `read_many` and `state_dict` return whole tensors over private mappings of the
            files (copy-on-write) where one item holds a tensor as one run of aligned bytes in a local
            file system, and read all others. Mapped tensors are not checked, and who touches a file
            that was shortened in place is ended by SIGBUS: docs/mapped.md.
        options: framework ("numpy" or "torch"), format, checks (`Checks`), reading (`Reading`) and
            resources (`Resources`): docs/options.md explains them.

    Raises:
        NotFoundError: there is no checkpoint.
        CorruptError, UnsafeError: the checkpoint's metadata is damaged, or looks like an attack.
        UnsupportedError: `mapped`, and the checkpoint is in an object store.
    """
    checkpoint = open_as("", path, **options)
    if valid.flag("mapped", mapped):
        checkpoint._open = checkpoint._handle.mapped()
    return checkpoint


def open_as(
    unmarked: str, path: str | os.PathLike[str], **options: Unpack[OpenKeywords]
) -> Checkpoint:
    """Does the same as `open`.

    Args:
        unmarked: the dialect of a checkpoint of which no file names one; "": PyTorch's.
    """
    given = checked("call of open", OpenOptions, options)
    engine = given.fill(_core.OpenOptions())
    if unmarked:
        engine.unmarked = unmarked
    core = _core.Checkpoint.open(valid.directory(path), engine)
    return Checkpoint(core, os.fsdecode(path), given.framework)
