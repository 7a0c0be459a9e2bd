"""Where the captures of this process go. Decided as late as possible, as ranks are known late.

    nowhere      this rank does not save: nothing is started, nothing is written
    dry          `dry_run`: plans are made, values are dropped
    a session    with a spool, a capture and an uploader process, which enters the run for it

Used on the training thread by one hook: `probe()` whenever it helps to know early, `open()` once
something is to be saved, `close()` at the end.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

import msgspec

from smdist.config import HookConfig
from smdist.errors import CaptureError
from smdist.format.manifest import Run, Session, rank_saves
from smdist.identity import StepRef, worker_name
from smdist.processes import start_ticks
from smdist.storage import Store, check_writable, is_remote, open_store, pin_url
from smdist.storage import loop_thread as sync
from smdist.workers.capture.capture import Capture, CaptureLimits, Usage
from smdist.workers.capture.part_plan import PartPlan
from smdist.workers.capture.tensor_access import TensorAccess
from smdist.workers.hook.buffer_location import (
    Placement,
    check_spool,
    choose_spool,
    default_buffer_bytes,
    read_memory,
)
from smdist.workers.hook.drain_progress import DrainProgress, left
from smdist.workers.hook.error_policy import raised_by_signal_handler
from smdist.workers.hook.process_settings import ProcessSettings
from smdist.workers.join.enrolment import check_location, new_session
from smdist.workers.join.rank import Identity, resolve_rank
from smdist.workers.spool.spool import Spool, SpoolInfo, UploadOptions
from smdist.workers.upload.process import Supervisor

__all__ = ["CaptureSession", "DrySink", "Sink"]

_ATTACH_BYTES = 256 << 10
_EXIT_S, _POLL_S = 5.0, 0.01
_MERGE_S = 2.0
_CHECK_S = 5.0  # of one request and its retries, over a network

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Sink(Protocol[T_contra]):
    """What of a `Capture` a hook uses while it records."""

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


class _UploaderGoneError(Exception):
    pass


class CaptureSession(Generic[T]):
    def __init__(
        self,
        config: HookConfig,
        where: ProcessSettings,
        access: TensorAccess[T],
        log: logging.Logger,
        trouble: Callable[[str], None],
    ) -> None:
        """`trouble` is told what the uploader's watcher has to report, on a thread of its own."""
        self._trouble = trouble
        self._config, self._where, self._access, self._log = config, where, access, log
        self._state: Literal["waiting", "disabled", "open", "closed"] = "waiting"
        self._identity: Identity | None = None
        self._sink: Sink[T] | None = None
        self._capture: Capture[T] | None = None
        self._supervisor: Supervisor | None = None
        self._parents: object = None
        self.record: Session | None = None
        self._place: Placement | None = None
        self._spool: Path | None = None
        self._starting = threading.Lock()
        self._starter = 0  # the thread that starts
        self._unfinished_spool: Spool | None = None  # of a session that has not begun yet

    # -- who ----------------------------------------------------------------------------------

    @property
    def identity(self) -> Identity:
        """As well as it is known; fixed once something was saved."""
        if self._identity is not None:
            return self._identity
        return resolve_rank(self._where.rank, self._where.world_size)

    def assign_rank(self, rank: int, world_size: int) -> None:
        """This process turned out to hold several ranks, and this session is that one's."""
        if self._state == "waiting":
            self._where = msgspec.structs.replace(self._where, rank=rank, world_size=world_size)

    @property
    def _worker(self) -> str:
        return worker_name(self.identity.rank)

    def saves_on_this_rank(self) -> bool:
        """May this rank save anything? False is final."""
        if self._state == "waiting":
            identity = self.identity
            if identity.settled and not rank_saves(identity.rank, self._config.include_workers):
                self._disable(identity)
        return self._state not in ("disabled", "closed")

    def _disable(self, identity: Identity) -> None:
        self._identity, self._state = identity, "disabled"
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
        return self._state == "open"

    @property
    def capture(self) -> Capture[T] | None:
        return self._capture

    @property
    def is_reentrant_call(self) -> bool:
        """Whether who asks is a signal handler in the middle of a save of this very thread."""
        return self._capture is not None and self._capture.is_reentrant_call

    def check(self) -> None:
        """Raise now, leaving nothing behind, what `open` would raise of the places that were given."""
        config, identity = self._config, self.identity
        if config.dry_run or not rank_saves(identity.rank, config.include_workers):
            return
        check_spool(self._where.spool_dir)
        remote = is_remote(config.out_dir)
        if remote:
            # First, as it knows best what is wrong with bucket or credentials. It leaves nothing
            # behind, so a rank that may yet turn out not to save does it too.
            check_writable(config.out_dir)
        with self._store(_CHECK_S) as store:
            check_location(
                store, identity, resume=config.resume, explicit_attempt=self._where.attempt
            )
        if not remote:
            check_writable(config.out_dir)

    @contextmanager
    def _store(self, deadline_s: float | None = None) -> Iterator[Store]:
        """For an errand of this process. It stays on the loop of `sync`, which closes it again."""
        store = open_store(self._config.out_dir, deadline_s=deadline_s)
        try:
            yield store
        finally:
            sync.run(store.close())

    # -- life ---------------------------------------------------------------------------------

    def open(self) -> Sink[T] | None:
        """Where to save; None on a rank that does not."""
        if self._state == "waiting":
            self._start_once()
        elif self._supervisor is not None and self._supervisor.refused:
            self._stop(self._supervisor.refused)
        if self._supervisor is not None:
            self._supervisor.start()
        return self._sink

    def _stop(self, refused: str) -> None:
        """The store holds a run that this rank has no part in, which was told when it was found."""
        capture, self._capture, self._sink = self._capture, None, None
        self._state = "closed"
        if capture is not None:
            capture.end(refused)
            capture.close()
        if self._config.on_error == "raise":
            raise CaptureError(self._refusal(refused))

    def _start_once(self) -> None:
        """Start, unless another thread does: then wait for it. A signal handler within it does not."""
        if self._starter == threading.get_ident():
            return
        with self._starting:
            if self._state == "waiting":
                self._starter = threading.get_ident()
                try:
                    self._start()
                finally:
                    self._starter = 0

    def _start(self) -> None:
        identity = self._identity = self.identity
        if not rank_saves(identity.rank, self._config.include_workers):
            self._disable(identity)
            return
        if self._config.dry_run:
            self._sink, self._state = DrySink(), "open"
            return
        try:
            self._begin_session(identity)
        except BaseException as error:
            self._remove_unfinished_spool()
            # A handler's exception ends the try, not the session: the next step that is due has another.
            if isinstance(error, Exception) and not raised_by_signal_handler(error):
                self._state = "closed"
            raise

    def _begin_session(self, identity: Identity) -> None:
        self._remove_unfinished_spool()
        config = self._config
        buffer_bytes = config.buffer_bytes or default_buffer_bytes(
            read_memory(), identity.local_world_size, identity.world_size, os.cpu_count() or 1
        )
        place = self._choose_place(identity, buffer_bytes)
        info = self._spool_info(identity)
        limits = CaptureLimits(
            buffer_bytes=buffer_bytes,
            on_full=cast("Literal['block', 'drop']", config.on_full),
        )
        # A rank that has no place to buffer in saves nothing, ever, and once there is a spool, whoever
        # sends it enters the run for this rank, and others wait for it: so there is room before.
        self._unfinished_spool = Spool.at(info, place.root, place.overflow)
        with Spool.creating(info, place.root, place.overflow) as spool:
            capture = Capture(spool, self._access, limits, self._say)
        supervisor = Supervisor(spool, trouble=self._trouble)
        capture.set_uploader_alive(lambda: supervisor.running)
        # No call from here on: the session has begun, or it has not.
        self.record, self._spool, self._supervisor = info.session, spool.path, supervisor
        self._sink = self._capture = capture
        self._state, self._unfinished_spool = "open", None

    def _remove_unfinished_spool(self) -> None:
        """What an interrupted try to begin left behind; nobody has seen it."""
        if self._unfinished_spool is not None:
            self._unfinished_spool.remove()
            self._unfinished_spool = None

    def _choose_place(self, identity: Identity, buffer_bytes: int) -> Placement:
        if self._place is None:  # once, as it may have something to say
            self._place = choose_spool(
                buffer_bytes,
                local_world_size=identity.local_world_size,
                spool_dir=self._where.spool_dir,
            )
            if self._place.message:
                self._say(self._place.message)
        return self._place

    def _spool_info(self, identity: Identity) -> SpoolInfo:
        config = self._config
        session, entry = new_session(
            identity,
            include_workers=config.include_workers,
            resume=config.resume,
            framework=config.framework.name,
            explicit_attempt=self._where.attempt,
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

    def _say(self, message: str) -> None:
        self._log.warning("%s: %s", self._worker, message)

    # -- end ----------------------------------------------------------------------------------

    def close(self, reason: str, timeout_s: float) -> str:
        """Drain and let go. What is left to say: empty if everything reached the store."""
        capture, supervisor = self._capture, self._supervisor
        if capture is None:
            self._remove_unfinished_spool()
            self._state, self._sink = "closed", None
            return ""
        capture.end(reason)  # first: if this is interrupted there is another try
        self._state, self._sink, self._capture = "closed", None, None
        try:
            drained, trouble = self._drain(capture, supervisor, timeout_s)
            usage, unwritten = capture.usage(), capture.unwritten_reason
        finally:
            capture.close()
        if unwritten:
            self._say(
                f"what was dropped at last, and that this rank ended, could not be written: {unwritten}. "
                "The run will show it as lost"
            )
        if drained:
            if supervisor is not None:
                self._wait_for_uploader_exit(supervisor)
            return ""
        text = f"{self._worker}: {left(usage)}"
        send = f"smdist recover {shlex.quote(str(self._spool))}"
        if supervisor is not None and supervisor.refused:
            return f"{text} are not stored. {self._refusal(supervisor.refused)}"
        if supervisor is not None and not supervisor.running:
            return (
                f"{text} wait in the spool, as no uploader could be kept running; "
                f"store them with: {send}"
            )
        why = f" ({trouble})" if trouble else ""
        return (
            f"{text} were not in {self._config.out_dir} after {timeout_s:.0f} s{why}; the uploader "
            f"goes on by itself. Should it end before all is stored: {send}"
        )

    def _refusal(self, refused: str) -> str:
        return (
            f"{refused}. What was captured is kept; to store it as another attempt of the run that is "
            f"there, once that has ended: smdist recover --force {shlex.quote(str(self._spool))}"
        )

    def _wait_for_uploader_exit(self, supervisor: Supervisor) -> None:
        """All is stored: the uploader writes a summary, removes the spool, and ends. If its rank was
        the last one it merges the run before it ends, and goes on alone if that takes longer: a
        moment for it, as where a job's container ends with this process nobody goes on."""
        deadline = time.monotonic() + _EXIT_S
        while self._spool is not None and self._spool.exists() and time.monotonic() < deadline:
            if supervisor.join(_POLL_S):
                return
        supervisor.join(_MERGE_S)

    def _drain(
        self, capture: Capture[T], supervisor: Supervisor | None, timeout_s: float
    ) -> tuple[bool, str]:
        """Whether all is stored, and what last held the uploader up."""
        with closing(DrainProgress(self._worker, self._log)) as progress:

            def watch(usage: Usage, trouble: str) -> None:
                if supervisor is not None and not supervisor.running:
                    raise _UploaderGoneError
                progress(usage, trouble)

            try:
                return capture.drain(timeout_s, watch), progress.trouble
            except _UploaderGoneError:  # or it finished while we looked
                return capture.usage().pending_records == 0, progress.trouble

    def abandon(self) -> None:
        """In a forked child: the session is the parent's. Nothing of it is touched."""
        self._parents = (self._capture, self._supervisor)  # kept: their end would be felt there
        self._state, self._sink, self._capture, self._supervisor = "closed", None, None, None
