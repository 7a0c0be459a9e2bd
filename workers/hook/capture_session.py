"""Where the captures of one rank go, decided as late as possible: ranks are known late.

    disabled     this rank does not save: nothing is started, nothing is written
    dry run      plans are made, values are dropped
    open         there are a spool, a capture and an uploader process, which joins the run for the rank

One hook uses it on the training thread: `saves_on_this_rank()` at any time, `open()` once something is to
be saved, `close()` at the end. Failures to open raise; the hook's error policy decides what follows.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

import msgspec

from smdist.config import HookConfig
from smdist.errors import CaptureError
from smdist.format.manifest import Run, Session, rank_saves
from smdist.identity import StepRef, worker_name
from smdist.processes import start_ticks
from smdist.storage import check_writable, is_remote, open_store, pin_url
from smdist.storage import loop_thread as sync
from smdist.workers.capture.capture import Capture, CaptureLimits
from smdist.workers.capture.part_plan import PartPlan
from smdist.workers.capture.tensor_access import TensorAccess
from smdist.workers.hook.buffer_location import (
    Placement,
    check_spool,
    choose_spool,
    default_buffer_bytes,
    read_memory,
)
from smdist.workers.hook.drain_progress import Drained, drain
from smdist.workers.hook.error_policy import raised_by_signal_handler
from smdist.workers.hook.process_settings import ProcessSettings
from smdist.workers.join.enrolment import check_location, new_session
from smdist.workers.join.rank import Identity, resolve_rank
from smdist.workers.spool.spool import Spool, SpoolInfo, UploadOptions
from smdist.workers.upload.process import Supervisor

__all__ = ["CaptureSession", "DrySink", "Sink"]

_ATTACH_BYTES = 256 << 10
_EXIT_S, _POLL_S = 5.0, 0.01  # to wait for an uploader that has stored everything
_MERGE_S = 2.0  # to wait further, as it may merge the run
_CHECK_S = 5.0  # for one request and its retries, over a network

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Sink(Protocol[T_contra]):
    """The part of a `Capture` that a hook uses while it records."""

    def begin(self, ref: StepRef, *, planned: bool = True) -> bool: ...
    def save(self, plan: PartPlan, tensors: Sequence[T_contra]) -> bool: ...
    def mark_incomplete(self, ref: StepRef, reason: str) -> None: ...
    def close_step(self) -> None: ...
    def describe(self, key: str, data: bytes) -> None: ...
    def record_error(self, message: str) -> None: ...


class DrySink(Generic[T]):
    """Counts what would have been saved."""

    def __init__(self) -> None:
        self.steps = self.tensors = self.nbytes = 0

    def begin(self, ref: StepRef, *, planned: bool = True) -> bool:
        self.steps += 1
        return True

    def save(self, plan: PartPlan, tensors: Sequence[T]) -> bool:
        self.tensors += len(plan.names)
        self.nbytes += plan.nbytes
        return True

    def mark_incomplete(self, ref: StepRef, reason: str) -> None:
        pass

    def close_step(self) -> None:
        pass

    def describe(self, key: str, data: bytes) -> None:
        pass

    def record_error(self, message: str) -> None:
        pass


class _State(Enum):
    WAITING = "waiting"
    DISABLED = "disabled"
    OPEN = "open"
    CLOSED = "closed"


class CaptureSession(Generic[T]):
    """`record` describes the session in the run; None before it is open."""

    def __init__(
        self,
        config: HookConfig,
        process: ProcessSettings,
        access: TensorAccess[T],
        log: logging.Logger,
        on_uploader_error: Callable[[str], None],
    ) -> None:
        """`on_uploader_error` is called on the thread that supervises the uploader."""
        self._config, self._process, self._access, self._log = config, process, access, log
        self._on_uploader_error = on_uploader_error
        self._state = _State.WAITING
        self._identity: Identity | None = None
        self._sink: Sink[T] | None = None
        self._capture: Capture[T] | None = None
        self._supervisor: Supervisor | None = None
        self._parents: object = None
        self.record: Session | None = None
        self._placement: Placement | None = None
        self._spool: Path | None = None
        self._starting = threading.Lock()
        self._starting_thread = 0
        self._unfinished_spool: Spool | None = None  # of a session that has not begun yet

    # -- who ----------------------------------------------------------------------------------

    @property
    def identity(self) -> Identity:
        """Return rank and world size as far as they are known; they are fixed once something is saved."""
        if self._identity is not None:
            return self._identity
        return resolve_rank(self._process.rank, self._process.world_size)

    def assign_rank(self, rank: int, world_size: int) -> None:
        """Become the session of one of several ranks of this process."""
        if self._state == _State.WAITING:
            self._process = msgspec.structs.replace(self._process, rank=rank, world_size=world_size)

    @property
    def _worker(self) -> str:
        return worker_name(self.identity.rank)

    def saves_on_this_rank(self) -> bool:
        """Check whether this rank may save anything; False is final."""
        if self._state == _State.WAITING:
            identity = self.identity
            if identity.settled and not rank_saves(identity.rank, self._config.include_workers):
                self._disable(identity)
        return self._state not in (_State.DISABLED, _State.CLOSED)

    def _disable(self, identity: Identity) -> None:
        self._identity, self._state = identity, _State.DISABLED
        wanted, world = self._config.include_workers, identity.world_size
        if identity.rank == 0 and not any(rank_saves(rank, wanted) for rank in range(world)):
            self._log.warning(
                "include_workers=%s names no rank of this job, which has %d (0 to %d): nothing is "
                "saved at all",
                list(wanted),
                world,
                world - 1,
            )

    @property
    def is_open(self) -> bool:
        return self._state == _State.OPEN

    @property
    def capture(self) -> Capture[T] | None:
        return self._capture

    @property
    def is_reentrant_call(self) -> bool:
        """Check whether the caller is a signal handler that interrupted a save of this thread."""
        return self._capture is not None and self._capture.is_reentrant_call

    def check(self) -> None:
        """Raise what `open` would raise because of the places that were given; leave nothing behind."""
        config, identity = self._config, self.identity
        if config.dry_run or not rank_saves(identity.rank, config.include_workers):
            return
        check_spool(self._process.spool_dir)
        remote = is_remote(config.out_dir)
        if remote:
            # First, as it reports best what is wrong with bucket or credentials. It leaves nothing
            # behind, so a rank that may turn out not to save does it too.
            check_writable(config.out_dir)
        store = open_store(config.out_dir, deadline_s=_CHECK_S)
        try:
            check_location(
                store, identity, resume=config.resume, explicit_attempt=self._process.attempt
            )
        finally:
            sync.run(store.close())
        if not remote:
            check_writable(config.out_dir)

    # -- life ---------------------------------------------------------------------------------

    def open(self) -> Sink[T] | None:
        """Start the session if needed; return where to save, or None on a rank that does not."""
        if self._state == _State.WAITING:
            self._start_once()
        elif self._supervisor is not None and self._supervisor.refused:
            self._stop_rejected(self._supervisor.refused)
        if self._supervisor is not None:
            self._supervisor.start()
        return self._sink

    def _stop_rejected(self, refused: str) -> None:
        """Save nothing more: the store holds a run that this rank cannot join, as was reported."""
        capture, self._capture, self._sink = self._capture, None, None
        self._state = _State.CLOSED
        if capture is not None:
            capture.end(refused)
            capture.close()
        if self._config.on_error == "raise":
            raise CaptureError(self._refusal(refused))

    def _start_once(self) -> None:
        """Start, or wait for the thread that does. Return at once in a signal handler of that thread."""
        if self._starting_thread == threading.get_ident():
            return
        with self._starting:
            if self._state == _State.WAITING:
                self._starting_thread = threading.get_ident()
                try:
                    self._start()
                finally:
                    self._starting_thread = 0

    def _start(self) -> None:
        identity = self._identity = self.identity
        if not rank_saves(identity.rank, self._config.include_workers):
            self._disable(identity)
            return
        if self._config.dry_run:
            self._sink, self._state = DrySink(), _State.OPEN
            return
        try:
            self._begin_session(identity)
        except BaseException as error:
            self._remove_unfinished_spool()
            # An exception of a signal handler ends this attempt only: the next due step tries again.
            if isinstance(error, Exception) and not raised_by_signal_handler(error):
                self._state = _State.CLOSED
            raise

    def _begin_session(self, identity: Identity) -> None:
        self._remove_unfinished_spool()
        config = self._config
        buffer_bytes = config.buffer_bytes or default_buffer_bytes(
            read_memory(), identity.local_world_size, identity.world_size, os.cpu_count() or 1
        )
        place = self._choose_placement(identity, buffer_bytes)
        info = self._spool_info(identity)
        limits = CaptureLimits(
            buffer_bytes=buffer_bytes,
            on_full=cast("Literal['block', 'drop']", config.on_full),
        )
        # The buffer is reserved before the spool is complete. Once there is a spool, its uploader joins
        # the run for this rank and others wait for the rank, so it must be able to save.
        self._unfinished_spool = Spool.at(info, place.root, place.overflow)
        with Spool.creating(info, place.root, place.overflow) as spool:
            capture = Capture(spool, self._access, limits, self._warn)
        supervisor = Supervisor(spool, trouble=self._on_uploader_error)
        capture.set_uploader_alive(lambda: supervisor.running)
        # No call from here on, so that a signal cannot leave the session half open.
        self.record, self._spool, self._supervisor = info.session, spool.path, supervisor
        self._sink = self._capture = capture
        self._state, self._unfinished_spool = _State.OPEN, None

    def _remove_unfinished_spool(self) -> None:
        """Remove what an interrupted attempt to start left behind; no other process has seen it."""
        if self._unfinished_spool is not None:
            self._unfinished_spool.remove()
            self._unfinished_spool = None

    def _choose_placement(self, identity: Identity, buffer_bytes: int) -> Placement:
        if self._placement is None:  # once, as it may warn
            self._placement = choose_spool(
                buffer_bytes,
                local_world_size=identity.local_world_size,
                spool_dir=self._process.spool_dir,
            )
            if self._placement.message:
                self._warn(self._placement.message)
        return self._placement

    def _spool_info(self, identity: Identity) -> SpoolInfo:
        config = self._config
        session, entry = new_session(
            identity,
            include_workers=config.include_workers,
            resume=config.resume,
            framework=config.framework.name,
            explicit_attempt=self._process.attempt,
        )
        remote, where = is_remote(config.out_dir), pin_url(config.out_dir)
        name = hashlib.blake2s(where.encode(), digest_size=8).hexdigest()
        return SpoolInfo(
            run=Run(run_id=name, created=session.started, framework=entry.framework),
            session=session,
            out_dir=config.out_dir if remote else where,
            upload=self._upload_options(),
            trainer_pid=os.getpid(),
            trainer_start=start_ticks(os.getpid()),
            entry=entry,
            place=where,
            profile=os.environ.get("AWS_PROFILE", "") if remote else "",
        )

    def _upload_options(self) -> UploadOptions:
        given: dict[str, Any] = {
            key: value
            for key in ("linger_s", "segment_bytes", "drain_deadline_s")
            if (value := getattr(self._config, key)) is not None
        }
        if is_remote(self._config.out_dir):  # where every object is a request
            given["attach_bytes"] = _ATTACH_BYTES
        return UploadOptions(**given)

    def _warn(self, message: str) -> None:
        self._log.warning("%s: %s", self._worker, message)

    # -- end ----------------------------------------------------------------------------------

    def close(self, reason: str, timeout_s: float) -> str:
        """Wait until all is stored, and release everything.

        Returns what is not stored and how to store it; empty if everything is. `reason` says why the
        job failed, if it did.
        """
        capture, supervisor = self._capture, self._supervisor
        if capture is None:
            self._remove_unfinished_spool()
            self._state, self._sink = _State.CLOSED, None
            return ""
        capture.end(reason)  # first: if this is interrupted, `close` can be called again
        self._state, self._sink, self._capture = _State.CLOSED, None, None
        try:
            drained = drain(capture, supervisor, timeout_s, self._worker, self._log)
            unwritten = capture.unwritten_reason
        finally:
            capture.close()
        if unwritten:
            self._warn(
                f"the final journal records could not be written: {unwritten}. The run will show this "
                "rank as lost, without its last dropped tensors."
            )
        if not drained.is_complete:
            return f"{self._worker}: {self._describe_pending(drained, timeout_s)}"
        if supervisor is not None:
            self._wait_for_uploader_exit(supervisor)
        return ""

    def _describe_pending(self, drained: Drained, timeout_s: float) -> str:
        supervisor, recover = self._supervisor, f"smdist recover {shlex.quote(str(self._spool))}"
        if supervisor is not None and supervisor.refused:
            return f"{drained.pending} are not stored. {self._refusal(supervisor.refused)}"
        if supervisor is not None and not supervisor.running:
            return (
                f"{drained.pending} are still in the spool: no uploader could be kept running. "
                f"Store them with: {recover}"
            )
        cause = f" Cause: {drained.last_error}." if drained.last_error else ""
        return (
            f"upload to {self._config.out_dir} not finished after {timeout_s:.0f} s: {drained.pending} "
            f"pending.{cause} The uploader keeps running. If it stops early: {recover}"
        )

    def _refusal(self, refused: str) -> str:
        return (
            f"{refused}. What was captured is kept. To store it as another attempt after that run has "
            f"ended: smdist recover --force {shlex.quote(str(self._spool))}"
        )

    def _wait_for_uploader_exit(self, supervisor: Supervisor) -> None:
        """Wait a moment for an uploader that has stored everything.

        It writes a summary and removes the spool. The uploader of the last rank also merges the run; it
        continues alone if that takes longer. But a container may end together with this process.
        """
        deadline = time.monotonic() + _EXIT_S
        while self._spool is not None and self._spool.exists() and time.monotonic() < deadline:
            if supervisor.join(_POLL_S):
                return
        supervisor.join(_MERGE_S)

    def abandon(self) -> None:
        """Leave the session without touching it: in a forked child it is the parent's."""
        # Kept alive: their finalizers would act on the parent's session.
        self._parents = (self._capture, self._supervisor)
        self._state = _State.CLOSED
        self._sink = self._capture = self._supervisor = None
