"""CheckpointManager: the checkpoints of a training run in one directory."""

from __future__ import annotations

import dataclasses
import errno
import functools
import logging
import os
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from tilestone import _core
from tilestone._calls import opening
from tilestone._calls.async_save import AsyncSave
from tilestone._calls.collective import check_options, prepared
from tilestone._calls.session import Session
from tilestone._errors import (
    CheckpointError,
    CorruptError,
    CoverageError,
    InvalidArgumentError,
    MismatchError,
    StorageError,
    UnsafeError,
)
from tilestone._options import valid
from tilestone._options.keywords import checked
from tilestone._options.values import AsyncSaveOptions, Keep, SaveOptions
from tilestone._protocols import CommunicatorLike
from tilestone._training_run.arguments import Refused, numbers_of, refuse
from tilestone._training_run.export import Export, Exported, Exporter
from tilestone._training_run.fast import Fast, HostSave, Tier
from tilestone._training_run.in_flight import InFlight
from tilestone._training_run.preemption import WORK, Preemption

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from tilestone._options.values import AsyncSaveKeywords, LoadKeywords

#: The work with which the engine's ManagedRun::expect_same_steps and ManagedRun::restore begin.
_COMPARISON, _CHOICE = "comparison of a run's directory", "choice of a checkpoint"

logger = logging.getLogger("tilestone")


class CheckpointManager:
    """Saves the checkpoints of a run, keeps those that are wanted, and finds the newest one.

        with tilestone.CheckpointManager("run", every=100, keep=tilestone.Keep(last=3)) as manager:
            state, step = manager.restore(state)
            for step in range((step or 0) + 1, last + 1):
                loss = train(state)
                manager.save(step, state, metrics={"loss": loss})
                if manager.preempted(step):
                    manager.save(step, state, force=True)
                    break

    Each step has a folder of its own in the run's directory. Which step is the newest is found from
    the checkpoints themselves: no file names it. They say which run saved them and which step they
    continue; `restore`, `latest`, `best` and `keep` follow the line that was saved last, whatever
    the numbers of other runs' steps. A manager that saves and has restored nothing begins a new
    run. Folders of Megatron-LM ("iter_0000100") and of
    torchtitan ("step-100") count as steps too. See docs/run_directories.md.

    All ranks make the manager, and call `save`, `restore` and `preempted`, together; the other
    methods communicate with nobody. One thread may use it at a time.

    Args:
        run_dir: the run's directory, on a file system that all ranks see, or a place in a store;
            made by the first save.
        every: `save` saves at steps that are multiples of it.
        keep: a `Keep`: the checkpoints that it does not keep are removed, in the background, once a
            newer one is durable. None: no checkpoint is removed.
        name: names of the steps' folders, with one "{step}", or padded "{step:08}".
        group: the ranks, as for `tilestone.save`.
        async_save: `save` returns as soon as the state may change, as `tilestone.async_save` does,
            and the checkpoint is written in the background. A failure is then raised by the next
            `save`, on every rank, or by `wait` and the end of the with block; with on_error="warn"
            it is logged, and only `wait` raises it. The next save and `restore` wait for a save that
            is in flight, and so does the end of the with block.
        export: an `Export`: the steps that are also made into models for others, by rank 0, in the
            background, once they are durable. A failed export is tried again once, then logged, and
            in `exports`. Needs a directory of a file system.
        fast: a `Fast`: steps are saved to a directory of each host first, and copied to run_dir in
            the background (docs/fast_tier.md). Needs a torch process group, or one rank.
        drain_every: with `fast`: the steps that are multiples of it are copied, and those that are
            saved by force; the others stay on the hosts.
        strict: a save that lacks something that the step before has raises MismatchError, before
            the checkpoint exists. Otherwise it is logged. It lacks something if a key is missing, a
            tensor has fewer bytes, or a tensor that all ranks wrote parts of comes from one rank.
        reuse: what the step before has is not written again, as with `reuse` of `tilestone.save`:
            each save shares files with the step that was saved or restored last.
        options: the options of all saves: those of `tilestone.save`, except `group` and `by_files`,
            and with async_save also stage, on_error and max_staged_bytes. `overwrite=True` permits
            to save a durable step again; one of a branch that the run has left needs none.

    Raises:
        InvalidArgumentError: an argument is out of range or can't be used, on any rank.
        MismatchError: the ranks don't agree on an argument other than `options`, or see different
            steps in the run's directory.
        TimeoutError, RankFailedError: not all ranks of the group made the manager.
    """

    def __init__(  # type: ignore[misc]  # reuse is a path in the options of one save
        self,
        run_dir: str | os.PathLike[str],
        *,
        every: int = 1,
        keep: Keep | None = None,
        name: str = "step-{step:08}",
        group: ProcessGroup | CommunicatorLike | None = None,
        async_save: bool = True,
        fast: Fast | None = None,
        drain_every: int = 1,
        strict: bool = False,
        export: Export | None = None,
        reuse: bool = False,
        **options: Unpack[AsyncSaveKeywords],
    ) -> None:
        self._timeout = options.get("timeout", _core.DEFAULT_TIMEOUT)
        self._session = Session(group, timeout=self._timeout)
        self._comm = self._session._comm
        self._is_closed = False
        try:
            given = self._set_fast(fast, drain_every)
            given += self._set_arguments(run_dir, every, keep, name, async_save, strict, reuse, options)
            self._exporter = self._make_exporter(export)
        except CheckpointError as error:
            refuse(_COMPARISON, self._comm, error, self._timeout)
        self._run.expect_same_steps(self._comm, given, valid.limit_of(self._timeout))
        self._preemption = Preemption(self._comm)
        self._in_flight: InFlight | None = None
        weakref.finalize(self, self._run.end)  # also at the program's end
        self._last_save: AsyncSave | None = None
        self._tier: Tier | None = None
        if self._fast is not None:
            self._tier = Tier(
                self._fast, self._drain_every, reuse, self._run, self._comm,
                valid.limit_of(self._timeout),
            )  # fmt: skip
            weakref.finalize(self, self._tier.end_with_program)  # runs before the run's

    def _set_arguments(
        self,
        run_dir: Any,
        every: Any,
        keep: Any,
        name: Any,
        async_save: Any,
        strict: Any,
        reuse: Any,
        options: Any,
    ) -> list[tuple[str, str]]:
        """Checks and keeps the arguments. Returns those that ranks must agree on."""
        if keep is not None and not isinstance(keep, Keep):
            raise InvalidArgumentError(f"keep must be a tilestone.Keep, not {keep!r}")
        self._in_background = valid.flag("async_save", async_save)
        if "in_flight" in options:
            raise InvalidArgumentError("in_flight is fixed by the manager: a save waits for the last")
        kind = AsyncSaveOptions if self._in_background else SaveOptions
        check_options(checked("manager's save", kind, options))
        self._keep = keep
        directory = self._directory_at(run_dir)
        self._run = _core.ManagedRun(
            os.fsencode(self._directory),
            valid.whole("every", every, 64),
            None if keep is None else keep.made(),
            valid.word("name", name),
            valid.flag("strict", strict),
            valid.flag("reuse", reuse),
            self._fast is not None,
        )
        self._options: AsyncSaveKeywords = options
        place = _core.identity_of(directory).encode("utf-8", "backslashreplace").decode()
        return [
            ("run_dir", place), ("every", str(int(every))), ("keep", repr(keep)),
            ("name", name), ("strict", str(strict)), ("async_save", str(async_save)),
        ]  # fmt: skip

    def _directory_at(self, run_dir: Any) -> bytes:
        """Checks and keeps the run's directory."""
        directory = valid.directory(run_dir)
        if not directory or b"\0" in directory:
            raise InvalidArgumentError(
                f"run_dir can't be {run_dir!r}", hint='"." is the working directory'
            )
        _core.refuse_url(directory)
        found = os.fsdecode(directory)
        self._directory = found if _core.is_url(directory) else valid.absolute(found)
        return directory

    def _make_exporter(self, export: Any) -> Exporter:
        if export is not None and not isinstance(export, Export):
            raise InvalidArgumentError(f"export must be a tilestone.Export, not {export!r}")
        if export is not None:
            valid.refuse_any_url(self._directory, "an export")
        run = self._run
        own = export if self._comm.rank == 0 else None
        if own is not None:
            own.check_config()
        return Exporter(own, self._directory, run.name_of, run.prune_after)

    def _set_fast(self, fast: Any, drain_every: Any) -> list[tuple[str, str]]:
        """Checks and keeps those of the fast tier. Returns what ranks must agree on."""
        if fast is not None and not isinstance(fast, Fast):
            raise InvalidArgumentError(f"fast must be a tilestone.Fast, not {fast!r}")
        self._drain_every = valid.whole("drain_every", drain_every, 64)
        if self._drain_every == 0 or (fast is None and self._drain_every != 1):
            raise InvalidArgumentError(
                f"drain_every={drain_every} is at least 1, and needs fast=tilestone.Fast(path)"
            )
        self._fast: Fast | None = None if fast is None else fast.checked()
        if self._fast is None:
            return [("fast", "None")]
        equal = dataclasses.replace(self._fast, path="")  # which may differ between hosts
        return [("fast", repr(equal)), ("drain_every", str(drain_every))]

    @property
    def last_save(self) -> AsyncSave | None:
        """The last save: its `staged`, with a fast tier `local`, and `durable`.

        None before the first one, and for saves to run_dir that are not in the background.
        """
        return self._last_save

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidArgumentError("the manager is closed")

    def should_save(self, step: int) -> bool:
        """Whether `save` would save this step without `force`: for a state that is costly to make.

        False for the step that was just saved, unless its save has failed. If that one is still in
        flight, this waits for it.
        """
        step = valid.whole("step", step, 64)
        if not self._run.is_due(step) or not self._run.is_saved(step):
            return self._run.is_due(step)
        if self._in_flight is None or self._in_flight.step != step:
            return False
        self._in_flight.wait()
        if self._tier is not None:
            return self._in_flight.written.exception() is not None
        folder = os.path.join(self._directory, self._run.new_name_of(step))
        try:
            with opening.open(folder) as found:  # perhaps an older one
                return found.save_id != self._in_flight.saving.save_id
        except CheckpointError:
            return True

    def save(
        self,
        step: int,
        state: Mapping[Any, Any],
        metrics: Mapping[str, float] | None = None,
        *,
        force: bool = False,
    ) -> bool:
        """Saves the state as the checkpoint of a step, if a save is due. Every rank calls.

        With async_save the checkpoint becomes durable later; the state may change once this
        returns. The step that this manager has saved or restored last may be saved once more, with
        `force` after the loop for example: the call waits for a save in flight, and if that step is
        durable and holds this state, by its checksums, nothing is written, and the metrics given
        now are added to it. With `fast`, one that is on the hosts alone is saved again, with both
        saves' metrics. If it holds another state, it is replaced with `overwrite`, and otherwise that
        is an error. If its save has failed, it is saved.

        Args:
            step: the step, 0 or more; the same on every rank.
            state: as for `tilestone.save`.
            metrics: numbers by name ("loss"), for `Keep.best`. Rank 0's are stored with the
                checkpoint; those of other ranks are ignored.
            force: save although no save is due; the same on every rank.

        Returns:
            False if no save is due, else True.

        Raises:
            InvalidArgumentError: the step or a metric is not a number, on any rank.
            UnsupportedError: in a forked child; the save in flight belongs to the parent.
            AlreadyExistsError: the step is durable already, with another state or of another run
                of the program, and `overwrite` was not given.
            MismatchError: with strict=True, the state lacks something that the step before has.
            Also everything that `tilestone.save` raises; with async_save, what the save before has
            failed with, also because of `strict`, and then nothing is saved.
        """
        self._check_open()
        try:
            step = valid.whole("step", step, 64)
            forced = valid.flag("force", force)
            if not (forced or self._run.is_due(step)):
                return False
            numbers = numbers_of(metrics)
        except InvalidArgumentError as error:
            self._refuse_save(error)
        self._wait_for_last()
        seconds = valid.limit_of(self._timeout)

        def difference(folder: str) -> str:
            path = os.path.join(self._directory, folder)
            if self._tier is not None:
                path = self._tier.core.path_of(self._comm, step, seconds) or path
            return self._session._difference(state, path, **self._options)

        def once_more() -> Mapping[str, float] | None:
            if self._tier is None or not (forced or numbers):
                return None
            return self._tier.core.undrained(step, bool(numbers))

        self._run.save(
            self._comm, step, numbers, bool(self._options.get("overwrite")), seconds, difference,
            functools.partial(self._write_step, step, state, forced), once_more,
        )  # fmt: skip
        return True

    def _write_step(
        self, step: int, state: Any, forced: bool, folder: str, begun: _core.RunStep
    ) -> None:
        given: Any = prepared(state)
        given.engine = {**given.engine, "step": begun}
        hosts = None
        if self._tier is not None:
            drains = forced or step % self._drain_every == 0
            hosts = self._tier.core.begin(step, forced, begun), drains
        self._write(step, given, os.path.join(self._directory, folder), hosts)

    def _refuse_save(self, error: InvalidArgumentError) -> NoReturn:
        """Raises why this rank refuses the arguments of a save, in a save that every rank makes."""
        self._wait_for_last()
        try:
            self._write(0, Refused(error), "")
        finally:
            self._run.failed()
        raise error

    def _wait_for_last(self) -> None:
        if self._in_flight is not None:
            self._in_flight.wait()

    def _write(
        self,
        step: int,
        given: Any,
        path: str,
        hosts: tuple[_core.Pending, bool] | None = None,
        straight: bool = False,
    ) -> None:
        """Saves, or begins to. `hosts`: of a save to these, when it is drained, and whether."""
        options: Any = self._options
        try:
            if hosts is not None:
                self._write_to_hosts(step, given, path, *hosts)
            elif self._in_background or (self._goes_to_hosts() and not straight):
                saving = self._session.async_save(given, path, **options)
                self._in_flight = InFlight(saving, step, self._exporter.after)
                self._last_save = saving
            else:
                saved = self._session.save(given, path, **options)
                self._exporter.after(step, saved.save_id)
        except MismatchError as error:
            if error.reason == "different_calls":
                error.add_hint("step and force of a save must be the same on every rank")
            raise

    def _goes_to_hosts(self) -> bool:
        """Whether the next save goes to the hosts, so that it is one in the background."""
        return self._tier is not None and not self._tier.core.is_full()

    def _write_to_hosts(
        self, step: int, given: Any, path: str, drained: _core.Pending, drains: bool
    ) -> None:
        assert self._tier is not None
        options: Any = self._options
        if not self._in_background:  # nothing is staged, so the tensors are written in the call
            options = {**options, "max_staged_bytes": 0}
        if not self._goes_to_hosts():
            self._write_straight(step, given, path, "the last save has failed, and says why")
            return
        try:
            begun = self._session.async_save(given, path, **options)
            saving = HostSave(begun._core, drained)
            self._last_save = saving
            if not self._in_background:
                saving.local.result()
        except StorageError as error:  # of what was not staged, or of the hosts; on all ranks
            is_of_hosts = self._tier.core.has_begun(given.engine["step"])  # not of an earlier save
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not is_of_hosts:
                raise
            self._write_straight(step, given, path, error)
            return
        if drains:
            after, save_id = self._exporter.after, saving.save_id
            saving.durable.add_done_callback(lambda _: after(step, save_id))
        if self._in_background:
            self._in_flight = self._tier.in_flight = InFlight(saving, step, lambda *_: None)

    def _write_straight(self, step: int, given: Any, path: str, why: object) -> None:
        """Saves to the run's directory, because a host's disk is full."""
        assert self._tier is not None
        self._tier.core.leave(given.engine["step"], str(why))
        self._last_save = None
        self._write(step, given, path, straight=True)
        self._tier.core.went_straight()

    def restore(
        self,
        state: Mapping[Any, Any],
        step: int | None = None,
        *,
        fallback: bool = False,
        **options: Unpack[LoadKeywords],
    ) -> tuple[Mapping[Any, Any], int | None]:
        """Loads the newest durable step, or a given one, which the run then continues.

        Every rank calls. The newest step is that of the line that was saved last.

        Rank 0 chooses the newest step for all ranks; `step` and `fallback` must be the same on all of
        them (MismatchError). Steps whose saves have not ended are skipped, and the
        log names them. If the chosen step is removed by another process before it is loaded, the
        newest of the others is chosen.

        Args:
            state: the template, as for `tilestone.load`.
            step: the step to load; None: the newest durable one.
            fallback: if the newest step is damaged, load the one before, and log how much is lost.
                Without it, a damaged newest step raises. The damage may show only while the step is
                loaded, so arrays may have been filled from it, which the load of the older step
                fills again. A step that was lost so is removed when it is saved again.
            options: the other options of `tilestone.load`.

        Returns:
            (what `tilestone.load` returns, the step); (state, None) if there is no step yet.

        Raises:
            NotFoundError, CorruptError: `step` is not durable; the newest step is damaged, and
                `fallback` is False, or there is no other one.
            MismatchError: the ranks see different steps in the run's directory.
            Also everything that `tilestone.load` raises.
        """
        self._check_open()
        self._wait_for_last()
        timeout = options.get("timeout", _core.DEFAULT_TIMEOUT)
        seconds = valid.limit_of(timeout)
        try:
            if "group" in options:
                raise InvalidArgumentError("group is fixed by the manager")
            wanted = None if step is None else valid.whole("step", step, 64)
            fallback = valid.flag("fallback", fallback)
        except InvalidArgumentError as error:
            refuse(_CHOICE, self._comm, error, timeout)
        loaded, on_hosts = state, ""

        def load(chosen: int, folder: str, url: str = "") -> None:
            nonlocal loaded, on_hosts
            on_hosts = folder if url else ""
            path = url or os.path.join(self._directory, folder)
            try:
                loaded = self._session.load(state, path, **options)
            except (CorruptError, CoverageError, UnsafeError) as error:
                error.add_hint(f"this is step {chosen}: {path}")
                if wanted is None and not fallback:
                    error.add_hint(
                        "restore(fallback=True) continues from the newest step that is intact"
                    )
                raise

        run = self._run if self._tier is None else self._tier.core
        step = run.restore(self._comm, wanted, fallback, seconds, load)
        if step is not None:
            self._exporter.restored(step, on_hosts)
        return loaded, step

    def latest(self) -> int | None:
        """The newest durable step, as this rank sees the directory now; None: there is none."""
        return self._run.latest()

    def best(self) -> int | None:
        """The best durable step by the metric of `Keep.best`; None: no step has it.

        Raises:
            InvalidArgumentError: the manager has no rule `Keep.best`.
        """
        if self._keep is None or self._keep.best is None:
            raise InvalidArgumentError("the manager has no rule that says what is best (Keep.best)")
        return self._run.best(self._keep.best)

    @property
    def exports(self) -> list[Exported]:
        """The exports of this manager that have ended, the failed ones too; on rank 0."""
        return list(self._exporter.ended)

    def steps(self) -> list[_core.StepInfo]:
        """All steps that have a folder, in ascending order, as this rank sees them now.

        Unfinished, damaged and foreign ones are listed too: `StepInfo.state` says so. Every
        checkpoint's metadata is read, but not its arrays: `tilestone.open(path).verify()` checks
        those.
        """
        return self._run.steps()

    def path(self, step: int) -> str:
        """The folder of a step, whether or not it exists."""
        return os.path.join(
            self._directory, self._run.name_of(valid.whole("step", step, 64))
        )

    def preempted(self, step: int) -> bool:
        """Whether the job is about to be ended: any rank has received SIGTERM.

        Every rank calls this after each step. The ranks agree after each step, so all get True after
        the same one, and can save it; while steps are so short that this would take more than a
        hundredth of the time, they agree after every few, at most five. True stays True. The first
        call begins to listen for SIGTERM; a handler that was there before is called too. A handler
        that the program installs later is called too from the next call on, which warns: a SIGTERM
        in between was not noticed. The handler is removed when the manager is closed.

        Args:
            step: the step that was done; the same on every rank.

        Raises:
            InvalidArgumentError: the first call is not in the main thread, or the first one after
                the program has installed a handler.
            TimeoutError, RankFailedError: a rank did not call.
        """
        try:
            self._preemption.install()
            valid.whole("step", step, 64)
        except InvalidArgumentError as error:
            if not self._preemption.has_agreed:  # afterwards the others don't wait for this rank
                refuse(WORK, self._comm, error, self._timeout)
            raise
        return self._preemption.agreed(valid.limit_of(self._timeout))

    def wait(self) -> None:
        """Waits until the last save is durable, and nothing is being exported or removed any more.

        With a fast tier, also until the run's directory has the steps that are to be copied there.
        If it can't be written, the steps wait on the hosts, which the log has said, and this
        returns.

        Raises:
            The error with which the last save has failed in the background.
        """
        if self._in_flight is not None:
            self._in_flight.wait()
            in_flight, self._in_flight = self._in_flight, None
            try:
                in_flight.written.result()
            except CheckpointError:
                self._run.failed()
                raise
        if self._tier is not None:
            self._tier.core.wait()
        self._exporter.wait()
        self._run.wait()

    def close(self) -> None:
        """Waits as `wait` does, and puts the handler of SIGTERM back. A second call does nothing.

        In a forked child it does not wait for a save of the parent.

        Raises:
            The error with which the last save has failed in the background; with on_error="warn" it
            is logged.
        """
        self._preemption.remove()
        if self._in_flight is not None and self._in_flight.is_of_parent:
            return
        self._is_closed = True
        try:
            self.wait()
        except CheckpointError as error:
            if self._options.get("on_error") != "warn":
                raise
            logger.warning("The last save has failed: %s", error)
        finally:
            if self._tier is not None:
                self._tier.end()
            self._exporter.wait()
            self._run.end()
            self._session.close()

    def __repr__(self) -> str:
        return f"CheckpointManager({self._directory!r}{', closed' * self._is_closed})"

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except CheckpointError as error:
            if kind is None:
                raise
            logger.error("The last save has failed: %s", error)
