"""The functions save and load."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tilestone import _core
from tilestone._calls.collective import LoadCall, SaveCall
from tilestone._options.keywords import keywords
from tilestone._options.values import ByFiles, LoadOptions, SaveOptions
from tilestone._protocols import CommunicatorLike

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from tilestone._options.values import LoadKeywords, SaveKeywords


@keywords(SaveOptions)
def save(
    state: Mapping[Any, Any],
    path: str | os.PathLike[str],
    *,
    group: ProcessGroup | CommunicatorLike | None = None,
    by_files: ByFiles | None = None,
    **options: Unpack[SaveKeywords],
) -> _core.SaveResult:
    """Saves the state that all ranks hold together. Every rank must call it.

    On return the checkpoint is complete and durable, and stock PyTorch can load it. If anything
    fails on any rank, every rank raises the same error and `path` holds what it held before. This
    includes errors in the options, the path and the state. Some errors are raised on their own rank
    only: a `group` or `by_files` that can't be used, a rank outside the group, and values like
    `Checks` that can't be made. The other ranks then wait for that rank until the timeout.

    Args:
        state: a nested dict. Mappings of any class are split into their entries. So are lists of
            any class, if they hold an array, a Mapping or one of the objects named below.
            `ShardedTensor` and `ShardedObject` carry their own keys; the key of anything else is
            its dotted path. A DTensor, and any object that itself says where it stands, is sharded
            (docs/placements.md). Any other array (torch, numpy, DLPack) must be the same on every rank and is written once. Any other
            leaf is stored as one object. Objects with state_dict() and load_state_dict() (modules,
            optimizers) are replaced by their state dict, as in torch's Stateful protocol.
            Megatron-Core's entities have the meaning that they have there. Objects that are not
            plain data are pickled. Stock PyTorch reads a numpy array as a torch tensor, so its
            template there is torch.from_numpy(array).
        path: the checkpoint's directory, on a file system that all ranks see. A leading "~" means
            the home directory. Or a place in a store, "s3://bucket/prefix"; other URLs are refused.
            Must be the same on every rank.
        group: the ranks that save: a torch process group, or a communicator (`tilestone.solo()`,
            `tilestone.mpi_world()`, or any object with rank, size, describe, gather, scatter,
            broadcast and all_to_all). The default is torch.distributed's default group if it is
            initialised, otherwise this process alone.
        by_files: a `ByFiles`: save without a group, through files only.
        options: format, dialect, overwrite, checks (`Checks`), copies (`LocalCopies`), reuse,
            attributes, tensor_attributes, resources (`Resources`), timeout and progress: docs/options.md
            explains them. Where ranks must give the same value, MismatchError names the option that
            differs.

    Raises:
        AlreadyExistsError: there is a checkpoint at `path`, and overwrite is False.
        UnsupportedError: `path` is a URL that no store takes; the format or dialect is unknown; or a directory can't be
            replaced as a whole because it holds files that belong to no checkpoint, or is a mount
            point or the working directory.
        InvalidArgumentError, MismatchError, CoverageError: the ranks' states contradict each other,
            or some part can't be saved: sharded or device data inside a tuple or another object,
            an element type or a kind of tensor that no checkpoint can hold, a container that a
            load could not recreate, or attributes of a tensor that this rank does not hold. The
            error names the key, and nothing is written. MismatchError is also raised if ranks give
            the same attribute of a tensor different values.
        StorageError, TimeoutError, RankFailedError: the checkpoint could not be written. By files,
            TimeoutError names the ranks of the first incomplete group that are missing when the
            time is over, and `unpublished` all of them; what was written is kept for them.
            RankFailedError also means that the save was abandoned.
    """
    return run_save(state, path, group=group, by_files=by_files, **options)


def run_save(state: Any, path: str | os.PathLike[str], **given: Any) -> _core.SaveResult:
    """Saves with the arguments of SaveCall."""
    with contextlib.ExitStack() as until_the_end:
        call = SaveCall(state, path, until_the_end, **given)
        return _core.save(call.prepare, call.location, call.comm, call.limit, call.bare())


@keywords(LoadOptions)
def load(
    wanted: Mapping[Any, Any] | str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    *,
    group: ProcessGroup | CommunicatorLike | None = None,
    **options: Unpack[LoadKeywords],
) -> dict[Any, Any]:
    """Loads what `wanted` asks for, however the checkpoint was sharded. Every rank must call it.

    `load(path)`, without a template, gives each rank everything that the checkpoint holds, in new
    arrays (of torch if torch is loaded, otherwise of numpy), nested as it was saved. The keys of
    dicts are what they were if they were strings, 64-bit ints, None, bools, floats, bytes or tuples
    of these; any other key (an Enum's member) is its str(). Stock PyTorch stores all keys as strings,
    and so they come back from its checkpoints; the log says so once. Keys have the order of the state
    that was saved, and empty dicts stay, but stock PyTorch does not store them. If an element of a
    list left nothing in the checkpoint (a sharded entity with a key of its own), the list comes back
    as a dict by index, or as a shorter list if only its end is missing. Items without a recorded path (sharded entities with their own keys, and
    everything in zarr) appear at the top level under their keys. Next to them is Megatron-Core's
    common state, with its original keys.

    Args:
        wanted: a state dict as for `save`. Arrays in it are filled in place; arrays without memory
            (on torch's meta device) and read-only numpy arrays are allocated. Other leaves only say
            that their key is wanted. A dict or list that is empty on every rank asks for what the
            checkpoint holds there (a fresh optimizer's "state"), in new arrays of the stored shapes.
            The root is no such dict. Arrays that are stored sharded are MismatchError then,
            unless the load has one rank, because nothing says which part a rank needs. The groups
            of an optimizer's state dict also receive what a scheduler has added to them.
            For an object with state_dict() and load_state_dict(): each
            key that the checkpoint holds below the object's key must be in the state dict of the
            object on at least one rank, unless `Differences.not_requested` says otherwise. What
            other dicts and lists leave out is loaded by nobody, and a warning names it. A torch
            optimizer without state receives the state of plain parameters all the same, in the
            stored shapes, because nothing says which shapes it needs; the state of DTensors must
            exist before the load. To load only a part, pass a dict in place of the object:
            {"model": model.state_dict()}.
        path: the checkpoint's directory, as for `save`.
        group: as for `save`. With group=tilestone.solo() a rank loads alone, also if there is a
            process group: no other rank needs to call, and "every rank" below means this one.
        options: format, cast, differences (`Differences`), checks (`Checks`), reading (`Reading`),
            own_rank, allow_classes, resources (`Resources`), timeout and progress: docs/options.md
            explains them. Where ranks must give the same value, MismatchError names the option that
            differs.

    Returns:
        A new dict with the structure of `wanted` and the loaded values. Arrays that were filled in
        place are the same objects (autograd sees them as changed). A ShardedTensor is replaced by
        its local array, and a DTensor on the meta device by one with memory. A Stateful object is
        the same object, after its load_state_dict() was called (with assign=True for a module on
        the meta device). From a checkpoint in Megatron-Core's dialect the result also has the rest
        of the common state.

    Raises:
        NotFoundError: there is no checkpoint (if an unpublished save by files is there, the hint
            says what it lacks), or the checkpoint doesn't hold a wanted key (the hint names similar
            ones).
        UnsupportedError: two items of the checkpoint have the same place in its tree (without a
            template); a cast from the stored to the wanted dtype does not exist (complex to real;
            the error names the key); or the process group was inherited by a forked process.
        InvalidArgumentError: an array of the template can't be filled, because several of its
            elements share memory or its memory is a read-only map. The error names the key. A torch
            tensor over an immutable `bytes` object (torch.frombuffer warns of it) can't be
            recognised: its memory is written.
        MismatchError: the dtype or the global shape differs from the stored one; or the checkpoint
            holds state of a Stateful object that no rank asks for; or, with
            Differences(not_requested="error"), any key that no rank asks for.
        CoverageError: the checkpoint lacks wanted elements.
        CorruptError, UnsafeError: the files are damaged, a data file is missing, or they look like
            an attack.
        StorageError, TimeoutError, RankFailedError: the checkpoint could not be read.
    """
    with contextlib.ExitStack() as until_the_end:
        call = LoadCall(wanted, path, until_the_end, group=group, **options)
        call.note(*_core.load(call.prepare, call.finish, call.location, call.comm, call.limit))
    return call.result
