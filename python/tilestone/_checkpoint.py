"""Reading a checkpoint without a template, without ranks and without torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias


from tilestone import _bridge, _converters, _core, _options
from tilestone._dtypes import DType
from tilestone._entities import to_box
from tilestone._errors import CheckpointError, InvalidArgumentError
from tilestone._progress import ProgressCallback, reporting
from tilestone._protocols import SupportsDlpack

BoxLike: TypeAlias = _core.Box | Sequence[tuple[int, int] | slice]


class StoredTensor:
    """A tensor of an open checkpoint. Nothing is read until `read` is called.

    Attributes:
        key: its name in the checkpoint.
        shape: of the whole tensor, in elements.
        dtype: a DType, equal to its name.
    """

    __slots__ = ("_checkpoint", "dtype", "key", "shape")

    def __init__(self, checkpoint: Checkpoint, key: str) -> None:
        self._checkpoint = checkpoint
        self.key = key
        self.shape: tuple[int, ...] = checkpoint._handle.shape(key)
        self.dtype = DType(checkpoint._handle.dtype(key))

    @property
    def boxes(self) -> list[_core.Box]:
        """Where the stored chunks lie; they may overlap in rank-local checkpoints."""
        return self._checkpoint._handle.boxes(self.key)

    @property
    def files(self) -> list[str]:
        """The file of each of the boxes."""
        return self._checkpoint._handle.files_of(self.key)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        count = 1
        for n in self.shape:
            count *= n
        return count * self.dtype.itemsize

    def read(
        self,
        box: BoxLike | None = None,
        *,
        framework: str | None = None,
        out: SupportsDlpack | None = None,
    ) -> Any:
        """As `Checkpoint.read`."""
        return self._checkpoint.read(self.key, box, framework=framework, out=out)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Any:
        """A box by basic slicing with step 1: tensor[:128, 64:]; fewer bytes are read."""
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) > len(self.shape) or not all(isinstance(part, slice) for part in parts):
            raise InvalidArgumentError(
                f"only slices, one for each dim of {self.shape}, index a stored tensor: {index!r}",
                key=self.key,
            )
        ends = []
        for part, n in zip(parts + (slice(None),) * (len(self.shape) - len(parts)), self.shape,
                           strict=True):  # fmt: skip
            try:
                start, stop, step = part.indices(n)
            except (TypeError, ValueError) as error:
                raise InvalidArgumentError(f"{part}: {error}", key=self.key) from None
            if step != 1:
                raise InvalidArgumentError(f"a slice's step is 1, not {step}", key=self.key)
            ends.append((start, max(start, stop)))
        return self.read(ends)

    def __repr__(self) -> str:
        return f"StoredTensor({self.key!r}, dtype={str(self.dtype)!r}, shape={self.shape})"


class Checkpoint:
    """An open checkpoint; made by `tilestone.open`. A context manager; safe to use from threads.

    Attributes:
        path: its directory.
        framework: "numpy" or "torch": what `read` gives.
    """

    def __init__(self, core: _core.Checkpoint, path: str, framework: str) -> None:
        """Used by `tilestone.open`."""
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

    def keys(self) -> list[str]:
        """All keys, of tensors and objects, sorted."""
        return self._handle.keys()

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
        return _options.is_text(key) and (self._handle.is_tensor(key) or self._handle.is_object(key))

    def __getitem__(self, key: str) -> Any:
        """A `StoredTensor`, or the object itself.

        Raises:
            NotFoundError (a KeyError): no such key; the hint names similar ones.
        """
        if self._handle.is_tensor(_options.word("key", key)):
            return StoredTensor(self, key)
        return self.object(key)

    def read(
        self,
        key: str,
        box: BoxLike | None = None,
        *,
        framework: str | None = None,
        out: SupportsDlpack | None = None,
    ) -> Any:
        """A whole tensor, or one box of it.

        Args:
            key: the tensor's.
            box: a Box, or (start, stop) for each dim, in elements; None for the whole tensor.
            framework: "numpy" or "torch"; by default the one given to `open`.
            out: an array of the box's shape and the stored dtype that is filled and returned
                instead of a new one, whatever its strides and byte order. autograd sees a torch
                tensor as changed.

        Raises:
            NotFoundError: no such tensor; the hint names similar keys.
            InvalidArgumentError: the box is none, or lies outside the tensor; `out` is read-only,
                has no memory, or has several elements in one place (an expanded tensor).
            CorruptError: a checksum or the file's structure is wrong.

        torch does not say that memory must not be written: a tensor over a read-only map is found
        out and refused, but one over an immutable `bytes` object (torch.frombuffer warns of it) is
        written like any other. Give numpy.frombuffer(...), which is read-only, or a bytearray.
        """
        key = _options.word("key", key)
        handle = self._handle
        bridge = self._bridge(framework)
        try:
            part = None if box is None else self._part(key, box)
            if out is None:
                return bridge.make_array(handle.read(key, part), None)
            target = _converters.view_to_fill(out)
            handle.read_into(key, part, target)
            _bridge.written(target, out)
            return out
        except CheckpointError as error:
            error.add_key(key)
            raise

    def read_many(
        self, keys: Collection[str], *, framework: str | None = None
    ) -> dict[str, Any]:
        """Whole tensors, all read together: many small ones cost a few large reads.

        Args:
            keys: of tensors.
            framework: as for `read`.

        Returns:
            A dict in the order of the keys; each array as `read` gives it.

        Raises:
            NotFoundError: no such tensor; the hint names similar keys. Nothing is read then.
            CorruptError: a checksum or the file's structure is wrong.
        """
        _options.names("keys", keys)
        names = [_options.word("key", key) for key in dict.fromkeys(keys)]
        bridge = self._bridge(framework)
        views = self._handle.read_many(names)
        return {
            name: bridge.make_array(view, None) for name, view in zip(names, views, strict=True)
        }

    def _part(self, key: str, box: BoxLike) -> _core.Box | None:
        """A box that lies in the tensor; nothing where there is no such tensor."""
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
                f"the box {box!r} does not lie in the tensor of shape {shape}", key=key
            )
        return part

    def object(
        self, key: str, *, allow_classes: Collection[str] = (), framework: str | None = None
    ) -> Any:
        """An object's value.

        Args:
            key: the object's.
            allow_classes: names ("argparse.Namespace") of classes of which objects may be made;
                one of another class comes back as `Opaque`, but for plain types, as `load` says.
            framework: of tensors inside the object.
        """
        key = _options.word("key", key)
        return self._handle.read_object(key, self._bridge(framework, allow_classes))

    def common(
        self, *, allow_classes: Collection[str] = (), framework: str | None = None
    ) -> Any:
        """What is not sharded, in Megatron-Core's dialect: a dict. None in PyTorch's.

        Args:
            allow_classes, framework: as for `object`.

        Raises:
            CorruptError: the common state is damaged or missing.
        """
        return self._handle.common(self._bridge(framework, allow_classes))

    def object_bytes(self, key: str) -> bytes:
        """The stored bytes of an object (a torch.save archive; of a list that holds the object in
        Megatron-Core's dialect).
        """
        return self._handle.read_object_bytes(_options.word("key", key))

    def items(self) -> Iterator[tuple[str, Any]]:
        """(key, what ckpt[key] gives), in the order of keys."""
        return ((key, self[key]) for key in self.keys())

    def verify(self, progress: bool | ProgressCallback = False) -> _core.VerifyReport:
        """Reads every byte and checks every checksum, structure and size.

        Damage is reported in `damages`, not raised.
        """
        with reporting(progress, "verify") as sink:
            return self._handle.verify(sink)

    @property
    def files(self) -> list[str]:
        """The data files, relative to the checkpoint."""
        return self._handle.files

    @property
    def writer(self) -> str:
        """Who wrote it, as far as its files say."""
        return self._handle.writer

    @property
    def format(self) -> str:
        """ "torch_dist" or "zarr"."""
        return self._handle.format

    @property
    def dialect(self) -> str:
        """ "pytorch" or "megatron": what of its state the writer sharded, and under which keys."""
        return self._handle.dialect

    @property
    def save_id(self) -> str:
        """The writer's unique name of the save; empty when it recorded none."""
        return self._handle.save_id

    @property
    def world_size(self) -> int | None:
        """Ranks that saved it, where a manifest or a rank-local save of ours says so."""
        return self._handle.world_size

    @property
    def hosts(self) -> list[str]:
        """The names of the hosts that saved it, by rank; empty without a commit manifest."""
        return self._handle.hosts

    @property
    def attributes(self) -> dict[str, str]:
        """The `attributes` that `save` was given; empty where another program has saved it."""
        return self._handle.attributes

    def tensor_attributes(self, key: str) -> dict[str, Any]:
        """What `save` was told of a tensor (`tensor_attributes`), by name.

        Empty where it was told nothing, or without a commit manifest.

        Raises:
            NotFoundError: no tensor of this key is in the checkpoint.
        """
        return self._handle.tensor_attributes(_options.word("key", key), self._bridge(None, ()))

    @property
    def rank_local(self) -> bool:
        """Whether each rank wrote metadata of its own (torch's use_collectives=False)."""
        return self._handle.rank_local

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each counted whole and once."""
        return self._handle.tensor_bytes

    def path_of(self, key: str) -> tuple[str | int, ...]:
        """Where the writer's tree had the key; empty when that is not recorded."""
        return tuple(self._handle.path_of(_options.word("key", key)))

    def _bridge(
        self, framework: str | None, allow_classes: Collection[str] = ()
    ) -> _bridge.Bridge:
        allowed = _options.names("allow_classes", allow_classes)
        chosen = self.framework if framework is None else _framework(framework)
        return _bridge.Bridge(allow=allowed, framework=chosen)

    def __repr__(self) -> str:
        if self._open is None:
            return f"Checkpoint({self.path!r}, closed)"
        return f"Checkpoint({self.path!r}, {len(self)} keys)"


def _framework(name: str) -> str:
    if isinstance(name, str) and name in ("numpy", "torch"):
        return name
    raise InvalidArgumentError(f'framework is "numpy" or "torch", not {name!r}')


def open(
    path: str | os.PathLike[str],
    *,
    framework: str = "numpy",
    verify_checksums: bool = True,
    cache: str = "bypass",
    buffer_bytes: int = _core.DEFAULT_BUFFER_BYTES,
    threads: int = 0,
    follow_links: bool = False,
) -> Checkpoint:
    """Opens a checkpoint for reading, by whomever it was written.

    No template, no ranks and no torch are needed; no pickle is ever run.

    Processes that are forked from this one (torch's DataLoader workers) may go on reading from what
    was opened here: each gets threads, buffers and queues of its own at its first read. Where
    processes are spawned, open it in each: an open checkpoint can't be pickled.

    Args:
        path: the checkpoint's directory.
        framework: "numpy" or "torch": the arrays that `read` gives.
        verify_checksums: check every item that is read whole.
        cache: "keep" leaves what is read in the page cache, "bypass" reads large tensors past it,
            as for `load`.
        buffer_bytes: pooled memory, bytes.
        threads: that read; 0: as many as the machine has, at most 8.
        follow_links: read files through any symbolic link that leads out of the directory. Without
            it only links into a directory "blobs" beside it or beside one above it are followed,
            as the Hugging Face hub's cache has them, and others are UnsafeError: a checkpoint of
            somebody else could name any file that you may read (docs/links.md).

    Raises:
        NotFoundError: no checkpoint is there.
        CorruptError, UnsafeError: its metadata is damaged, or looks like an attack.
    """
    framework = _framework(framework)
    core = _core.Checkpoint.open(
        _options.directory(path),
        _options.flag("verify_checksums", verify_checksums),
        _options.word("cache", cache),
        _options.whole("buffer_bytes", buffer_bytes, 64),
        _options.whole("threads", threads),
        _options.flag("follow_links", follow_links),
    )
    return Checkpoint(core, os.fsdecode(path), framework)


def gc(
    path: str | os.PathLike[str],
    *,
    delete: bool = False,
    force: bool = False,
    follow_links: bool = False,
) -> list[_core.Leftover]:
    """The files that failed or interrupted saves have left at a location.

    Such a file has a name that only Tilestone gives (it holds the id of its save), a note in
    `.tilestone` says that a save made it there, and the checkpoint that stands there, if one does,
    does not need it. The next save to the location removes them too. Files of which no note speaks
    may have been copied there: they stay, and the log names their save.

    Saves that replace a checkpoint as a whole (`format="zarr"`, or over Megatron-Core's) work in a
    directory beside the location, `.NAME.tilestone-SAVE_ID`; one whose save is dead is listed as
    `../.NAME.tilestone-SAVE_ID`.

    Args:
        path: the directory that was saved to.
        delete: remove them; nothing else is touched, and no save can begin there meanwhile.
            Without it nothing is changed, nor locked: saves go on beside it.
        force: take files of which no note speaks, and those of a checkpoint that has only lost
            its hidden files (`cp dir/*` leaves them behind), for leftovers too.
        follow_links: read what describes the checkpoint through links, as for `open`. Removing
            takes the links themselves, never what they lead to.

    Returns:
        Each with its name, size in bytes, what it is and why it is not needed.

    Raises:
        NotFoundError: there is no file at all.
        AlreadyExistsError: a save is under way there.
        CorruptError, UnsafeError: a checkpoint stands there and can't be read, so that what it
            needs is not known; or one that has only lost its hidden files, and force is False.
        StorageError: a file could not be removed; the others are gone.
    """
    return _core.leftovers(
        _options.directory(path),
        _options.flag("delete", delete),
        _options.flag("force", force),
        _options.flag("follow_links", follow_links),
    )


def repair(
    path: str | os.PathLike[str],
    *,
    cache: str = "bypass",
    buffer_bytes: int = _core.DEFAULT_BUFFER_BYTES,
    threads: int = 0,
    follow_links: bool = False,
    progress: bool | ProgressCallback = False,
) -> _core.RepairReport:
    """Writes what is damaged in a checkpoint anew, where another of its files has it intact.

    What `tilestone verify --repair` does. Local copies (`save` with replicate="local") are such
    files, and a damaged copy is mended from the shard's own item. A file is replaced as a whole, in
    one step, by one with the checksums that its save recorded, so at any moment it is what it was
    or mended; bytes between its items are zeros again, and bytes behind its end go. A file that is
    missing or too short is written anew if all that it should hold is intact, in it or elsewhere;
    otherwise it stays as it is, and its damage in `now` names the keys that are intact nowhere.
    Where nothing is damaged nothing is written.

    Args:
        path: the checkpoint's directory. One process repairs it, and loads may go on meanwhile.
        cache, buffer_bytes, threads, follow_links: as for `open`.
        progress: of the two verifications, before and after: True for a bar on a terminal, or a
            function that gets `Progress`.

    Returns:
        `mended`: the damages that are no more, as `Checkpoint.verify` found them. `now`: what it
        finds afterwards; `now.ok` is True where nothing is left to mend.

    Raises:
        NotFoundError, CorruptError, UnsafeError: as `open`.
        AlreadyExistsError: something is damaged, and a save or another repair is under way there.
        StorageError: a file could not be written, or bytes for it differed when they were read a
            second time; files that were replaced before are mended.
    """
    with reporting(_options.sink("progress", progress), "verify") as sink:
        return _core.repair(
            _options.directory(path),
            _options.word("cache", cache),
            _options.whole("buffer_bytes", buffer_bytes, 64),
            _options.whole("threads", threads),
            _options.flag("follow_links", follow_links),
            sink,
        )
