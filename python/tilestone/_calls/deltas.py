"""Deltas: what has changed in weights from one version to the next."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tilestone import _core
from tilestone._calls.collective import LoadCall, SaveCall, communicator
from tilestone._calls.save_load import load, save
from tilestone._errors import CheckpointError, InvalidArgumentError, MismatchError
from tilestone._objects import host_arrays
from tilestone._options import valid
from tilestone._options.keywords import checked
from tilestone._options.progress import ProgressCallback, reporting
from tilestone._options.values import OpenOptions, Reading, Resources
from tilestone._protocols import CommunicatorLike

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: The attribute of a whole version that has the version's id.
_ID = "tilestone_delta_result"
# Options of `load`, which hints name, that `apply_delta` does not have.
_NO_OPTIONS = dict.fromkeys(
    ("differences.not_in_checkpoint", "differences.other_shape", "allow_shape_mismatch", "cast")
)


@dataclasses.dataclass(eq=False)
class DeltaVersion:
    """A version that `save_delta` has saved, and in memory what this rank writes of it.

    Attributes:
        path: its folder, or the file.
        whole: whether it is a whole checkpoint.
        report: what the delta holds; of a whole version everything is added.
        number: its number in the directory of versions; None: it is in none.
    """

    path: str
    whole: bool
    report: _core.DeltaReport
    number: int | None = None
    _kept: _core.DeltaBase | None = dataclasses.field(default=None, repr=False)


def _within(path: str | os.PathLike[str], name: str) -> str:
    return os.fspath(path).rstrip("/") + "/" + name


def save_delta(
    state: Mapping[Any, Any] | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    base: DeltaVersion | str | os.PathLike[str] | None = None,
    anchor_every: int | None = None,
    group: ProcessGroup | CommunicatorLike | None = None,
    resources: Resources = Resources(),
    timeout: float | None = _core.DEFAULT_TIMEOUT,
    progress: bool | ProgressCallback = False,
) -> DeltaVersion:
    """Saves what has changed in a state since its base. Every rank must call it.

        last = None
        for step in range(steps):
            train(model)
            last = tilestone.save_delta(model.state_dict(), "versions", base=last, anchor_every=20)

    Each rank writes one file with what has changed in its part. The version exists once all have
    written: after a failure on any rank every rank raises the same error, and there is no new
    version. See docs/deltas.md.

    Args:
        state: as for `save`, with any sharding, but only arrays: a delta has no objects. Or the path of a
            checkpoint, whose delta from the checkpoint `base` is written to the file `path`.
        path: the folder of the delta. With `anchor_every`, the directory of all versions: each
            gets a folder version-00000012, with the number after that of the newest.
        base: what `save_delta` returned for the version before, which the rank has kept in memory.
            Or the path of a checkpoint that holds the base. None: the version is saved as a whole;
            only with `anchor_every`.
        anchor_every: every version whose number is a multiple of it is saved as a whole, as by
            `save`.
        group, timeout, resources, progress: as for `save`.

    Returns:
        The version. It holds a copy of what this rank writes, in host memory, for the next call.
        The base that was passed must not be used again: its memory has become that of the new version.

    Raises:
        MismatchError: base and state have other tensors, or a rank has another part of a tensor
            than when the base was saved; `key` is the tensor. Or the base is not the version before
            in the directory. Save a whole version.
        InvalidArgumentError: the state has an object, no base is given, or it was a base before.
        AlreadyExistsError: a version is at `path`.
        CorruptError, StorageError, TimeoutError, RankFailedError, ...: as for `save`.
    """
    if isinstance(state, (str, os.PathLike)):
        return _of_checkpoints(state, path, base, anchor_every, resources, progress)
    options: dict[str, Any] = {
        "resources": resources, "timeout": timeout, "progress": progress,
    }  # fmt: skip
    number, whole = _next(path, base, anchor_every, group, timeout)
    place = os.fspath(path) if number is None else _within(path, _core.version_name(number))
    with _memory_of(base) as kept:
        if whole:
            kept = _core.DeltaBase()
            report = _live(state, place, group, kept, None, False, options)
            save(state, place, group=group, attributes={_ID: report.result}, **options)
        else:
            read = valid.directory(base) if kept is None else None
            kept = kept or _core.DeltaBase()
            report = _live(state, place, group, kept, read, True, options)
    return DeltaVersion(place, whole, report, number, kept)


@contextlib.contextmanager
def _memory_of(base: Any) -> Iterator[_core.DeltaBase | None]:
    """The memory of a version, which it loses unless the call fails."""
    if not isinstance(base, DeltaVersion):
        yield None
        return
    kept, base._kept = base._kept, None
    try:
        yield kept
    except BaseException:
        base._kept = kept
        raise


def _check(path: Any, base: Any, anchor_every: Any) -> None:
    valid.directory(path)
    if anchor_every is not None and valid.whole("anchor_every", anchor_every) < 1:
        raise InvalidArgumentError(f"anchor_every is {anchor_every}; at least 1 is expected")
    if base is None and anchor_every is None:
        raise InvalidArgumentError("base is needed, or anchor_every, which saves a whole version")
    if isinstance(base, DeltaVersion) and base._kept is None:
        raise InvalidArgumentError(
            f"the version {base.path} is not in memory: it was a base before, or made of checkpoints",
            hint="pass the version that the latest call returned, or a checkpoint's path",
        )
    if not isinstance(base, DeltaVersion) and base is not None:
        valid.directory(base, "base")


def _next(
    path: Any, base: Any, anchor_every: int | None, group: Any, timeout: float | None
) -> tuple[int | None, bool]:
    """The number of the new version, if it has one, and whether it is whole, as the ranks agree.

    If a rank refuses its arguments, all ranks raise that.
    """

    def say(_: int, __: bytes) -> bytes:
        _check(path, base, anchor_every)
        before = base.number if isinstance(base, DeltaVersion) else None
        return json.dumps([anchor_every, anchor_every and before, base is None]).encode()

    def decide(_: int, said: list[bytes]) -> tuple[bytes, bool]:
        if len(set(said)) > 1:
            raise MismatchError("ranks pass another base or anchor_every than others")
        every, before, whole = json.loads(said[0])
        if every is None:
            return b"[null, false]", True
        if before is None:
            before = max((each[0] for each in _core.delta_versions(valid.directory(path))), default=-1)
        return json.dumps([before + 1, whole or (before + 1) % every == 0]).encode(), True

    number, whole = json.loads(_agree("save_delta", group, timeout, say, decide))
    return number, whole


def _agree(work: str, group: Any, timeout: float | None, say: Any, decide: Any) -> bytes:
    return _core.agree(work, communicator(group), say, decide, valid.limit_of(timeout))


def _live(
    state: Any, place: str, group: Any, kept: _core.DeltaBase, read: bytes | None, writes: bool,
    options: dict[str, Any],
) -> _core.DeltaReport:  # fmt: skip
    with contextlib.ExitStack() as until_the_end:
        call = SaveCall(state, place, until_the_end, group=group, **options)
        return _core.save_live_delta(
            call.prepare, call.location, call.comm, call.limit, kept, read, writes
        )


def _of_checkpoints(
    state: Any, path: Any, base: Any, anchor_every: Any, resources: Resources, progress: Any
) -> DeltaVersion:
    """Writes the delta of two checkpoints, as `tilestone delta` does."""
    if not isinstance(base, (str, os.PathLike)) or anchor_every is not None:
        raise InvalidArgumentError(
            "the delta to a checkpoint needs the path of another one as its base, and no anchor_every"
        )
    with reporting(valid.sink("progress", progress), "compare") as sink:
        given = checked("save_delta", OpenOptions, {"resources": resources})
        report = _core.make_delta(
            valid.directory(base), valid.directory(state), valid.directory(path),
            given.fill(_core.OpenOptions()), sink,
        )  # fmt: skip
    return DeltaVersion(os.fspath(path), False, report)


def apply_delta(
    target: Mapping[Any, Any] | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    to: str | os.PathLike[str] | None = None,
    group: ProcessGroup | CommunicatorLike | None = None,
    reading: Reading = Reading(),
    resources: Resources = Resources(),
    timeout: float | None = _core.DEFAULT_TIMEOUT,
    progress: bool | ProgressCallback = False,
) -> _core.DeltaReport | None:
    """Applies a delta to arrays in memory, in place, or makes a new checkpoint of an old one.

    Everything is checked before anything is changed: that the tensors of `target` are those of the
    delta's base, bit for bit. What comes out is checked too. See docs/deltas.md.

    Args:
        target: a state as for `load`, whose arrays are changed, on devices too. Every rank must call
            it, with any sharding; a rank reads what concerns its part. Or a checkpoint of any
            format, a folder of safetensors files (Hugging Face's too), or one such file: then one
            process makes a new one.
        path: the delta. For arrays also a directory of versions: `target` becomes the newest one,
            by the deltas that it has missed, or, if it is none of these versions, by the newest
            whole version and those after it.
        to: with a checkpoint as the target: the directory of the new one, or a file:
            NAME.safetensors. It must not exist.
        group, timeout: for arrays, as for `load`.
        reading, resources: as for `open`.
        progress: with a checkpoint: for the check (phase "verify"), then for writing ("write"). True shows a bar on a
            terminal; a function is called with `Progress`.

    Returns:
        What the (newest) delta holds. Nothing is done if the arrays are those of its new version
        already. None: the newest version is a whole one, which was loaded.

    Raises:
        MismatchError: `target` is not the delta's base; `key` is the first tensor that differs, and
            the hint names the chain of versions that leads there. Nothing was changed.
        InvalidArgumentError: arrays overlap, or can't be changed in place. Nothing was changed.
        CorruptError: the delta is damaged (nothing was changed), or something else came out.
        AlreadyExistsError: something is at `to`.
        NotFoundError, UnsafeError, UnsupportedError: as for `open`; also if `path` is no delta.
    """
    if isinstance(target, (str, os.PathLike)):
        if to is None:
            raise InvalidArgumentError("to is needed: the path of the new checkpoint")
        return _to_checkpoint(target, path, to, reading, resources, progress)
    options: dict[str, Any] = {"timeout": timeout, "resources": resources, "reading": reading}

    def say(_: int, __: bytes) -> bytes:
        if to is not None:
            raise InvalidArgumentError("to is only for a checkpoint; arrays are changed in place")
        _opening(options)
        return valid.directory(path)

    def decide(_: int, __: list[bytes]) -> tuple[bytes, bool]:
        return json.dumps(_core.delta_versions(valid.directory(path))).encode(), True

    versions = json.loads(_agree("apply_delta", group, timeout, say, decide))
    try:
        with host_arrays.in_place():
            return _apply(target, path, versions, group, options)
    except CheckpointError as error:
        error.word_options(_NO_OPTIONS)
        raise


def _apply(
    target: Any, path: Any, versions: list[Any], group: Any, options: dict[str, Any]
) -> _core.DeltaReport | None:
    if not versions:
        return _in_place(target, [path], group, options)
    anchor = next((each for each in reversed(versions) if each[2]), None)
    after = anchor[0] if anchor else -1
    deltas = [_within(path, name) for number, name, _ in reversed(versions) if number > after]
    whole = _within(path, anchor[1]) if anchor else None
    leads = anchor is not None and versions[-1][0] - after == len(deltas)
    report = _in_place(target, deltas, group, options, leads) if deltas else None
    if report is None:
        load(target, whole, group=group, **options)
        report = _in_place(target, deltas, group, options) if deltas else None
    return report


def _opening(options: dict[str, Any]) -> OpenOptions:
    given = {name: options[name] for name in ("reading", "resources")}
    return checked("apply_delta", OpenOptions, given)


def _in_place(
    target: Any, deltas: list[Any], group: Any, options: dict[str, Any], may_be_other: bool = False
) -> _core.DeltaReport | None:
    """Applies deltas, the newest first: what the newest holds. None: the target is the base of none."""
    with contextlib.ExitStack() as until_the_end:
        call = LoadCall(target, deltas[0], until_the_end, group=group, **options)
        applied = _core.apply_live_deltas(
            call.prepare, [valid.location(each) for each in deltas], call.comm, call.limit,
            _opening(options).fill(_core.OpenOptions()), may_be_other,
        )  # fmt: skip
        call.give_back()
    return applied


def _to_checkpoint(
    target: Any, path: Any, to: Any, reading: Reading, resources: Resources, progress: Any
) -> _core.DeltaReport:
    with reporting(valid.sink("progress", progress), "write") as sink:
        given = checked("apply_delta", OpenOptions, {"reading": reading, "resources": resources})
        return _core.apply_delta(
            valid.directory(target),
            valid.directory(path),
            valid.directory(to),
            given.fill(_core.OpenOptions()),
            sink,
        )
