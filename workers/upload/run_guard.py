"""Join the run for this rank, and make sure that the run stays where readers look for it.

The uploader calls `join` first, once per start. The committer runs `RunCheck` once a minute, after
failures, and before the end. Without `run.json` and the session readers do not find what a rank stores.

- A shell may name another server for the same URL; `smdist recover` must not write there.
- A bucket or folder can be removed and made again while a job writes to it.
- On servers that ignore conditional puts a slow rank may replace `run.json` after this rank has joined
  (`workers/join/enrolment.py`). `follow_run` then stores the session again with the id that is there.
  Where our own session is, the run is ours, whatever its id.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable

from msgspec.structs import replace

from smdist.errors import (
    ConfigurationError,
    CorruptObject,
    ObjectExists,
    ObjectNotFound,
    StoreForbidden,
)
from smdist.format.manifest import RUN_KEY, Run, Session, session_key
from smdist.format.stored_json import encode, read
from smdist.identity import worker_name
from smdist.processes import is_alive
from smdist.storage.store import MayIgnoreConditions, Store
from smdist.workers.join.enrolment import correct_summary, join_run
from smdist.workers.spool.ack_page import AckPage
from smdist.workers.spool.spool import Spool
from smdist.workers.upload.retry import ForeignObject, Retrier

__all__ = ["RankRejected", "RunCheck", "RunGuard", "RunNotAtThisLocation", "join"]

# Longer than the longest pause between two tries of the uploader that we wait for.
_EARLIER_SPOOLS_S, _POLL_S = 15.0, 0.05
_LOOK_S = 60.0  # between two looks whether the run is still there, if nothing fails
_FOLLOW_AFTER_S = tuple(2.0**n for n in range(-1, 6))  # between looks at a run that may be replaced


class RankRejected(ForeignObject):
    """The run at this location does not accept this rank."""


class RunNotAtThisLocation(RankRejected):
    """The run that this rank joined is not here."""


class RunGuard:
    """Checks the run and the session of one rank. Used on the uploader's event loop.

    `renamed` is called after the session was stored with another run id.
    """

    def __init__(
        self,
        store: Store,
        run: Run,
        session: Session,
        renamed: Callable[[Run, Session], None] = lambda _run, _session: None,
    ) -> None:
        self._store, self._renamed = store, renamed
        self.run, self.session = run, session
        self._storing = asyncio.Lock()  # one put at a time: of two, the older id may land last
        self._session_key = session_key(worker_name(session.rank), session.attempt)

    @property
    def contested(self) -> bool:
        """Return whether another rank may replace `run.json`, as the server may ignore conditions."""
        return isinstance(self._store, MayIgnoreConditions) and self._store.ignores_conditions

    async def is_present(self) -> bool:
        """Return whether `run.json` and our session are there; False if they were removed.

        Raises RunNotAtThisLocation if another run, or another process of this rank, is there.
        """
        try:
            run = await self._read(RUN_KEY, Run)
            session = await self._read(self._session_key, Session)
        except StoreForbidden:  # credentials may allow to write and not to read
            return True
        if isinstance(session, Session):
            self._verify("session", session.session, self.session.session)
        elif session is not None:
            self._verify("session", "not readable", self.session.session)
        elif isinstance(run, Run):
            self._verify("run_id", run.run_id, self.run.run_id)
        elif run is not None:
            self._verify("run_id", "not readable", self.run.run_id)
        if (
            isinstance(run, Run)
            and isinstance(session, Session)
            and not run.run_id == session.run_id == self.session.run_id
        ):
            async with self._storing:
                await self._adopt(run)
            await self.follow_run()
        return run is not None and session is not None

    async def follow_run(self) -> None:
        """Store the session again if `run.json` names another run by now.

        Reads `run.json` again after each put: the last of several writers has seen the last `run.json`.
        """
        async with self._storing:
            while True:
                run = await self._read(RUN_KEY, Run)
                if not isinstance(run, Run) or run.run_id == self.session.run_id:
                    return
                session = await self._read(self._session_key, Session)
                if not isinstance(session, Session) or session.session != self.session.session:
                    return  # the run was removed, or is another one: see `is_present`
                await self._adopt(run)

    async def follow_run_with_summary(self, stored: Session | None) -> None:
        """Store session and summary again if another rank has replaced `run.json`.

        `stored` is the session in the summary, None if that is not known.
        """
        while self.contested:
            await self.follow_run()
            session = self.session
            if session == stored:
                return
            await correct_summary(self._store, session)
            stored = session

    async def follow_contested_run(self, stopping: asyncio.Event) -> None:
        """Look at `run.json` several times within the first minute, if another rank may replace it."""
        for pause_s in _FOLLOW_AFTER_S if self.contested else ():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stopping.wait(), pause_s)
            if stopping.is_set():
                return
            with contextlib.suppress(Exception):  # the next look, or the last one, finds it
                await self.follow_run()

    async def restore(self) -> None:
        """Store `run.json` and the session again after they were removed."""
        with contextlib.suppress(ObjectExists):  # another rank was faster, or another run
            await self._store.put(RUN_KEY, (encode(self.run, RUN_KEY),), if_absent=True)
        async with self._storing:
            await self._put_session(self.session)

    def not_found_error(self) -> RunNotAtThisLocation:
        return RunNotAtThisLocation(
            f"Run {self.run.run_id} of this rank is not at {self._store.url}. Either the job used another "
            "endpoint or profile (check AWS_ENDPOINT_URL, AWS_PROFILE) or the run was deleted. Use --force "
            "to recreate it here from the remaining data"
        )

    async def _adopt(self, run: Run) -> None:
        session = replace(self.session, run_id=run.run_id)
        await self._put_session(session)
        self.run, self.session = run, session  # not before: a put that failed must be repeated
        self._renamed(run, session)

    async def _put_session(self, session: Session) -> None:
        await self._store.put(self._session_key, (encode(session, self._session_key),))

    async def _read(
        self, key: str, kind: type[Run | Session]
    ) -> Run | Session | CorruptObject | None:
        """Return what is stored at `key`, None if nothing is; the error if it cannot be read."""
        try:
            return await read(self._store, key, kind)
        except ObjectNotFound:
            return None
        except CorruptObject as error:
            return error

    def _verify(self, field: str, found: str, own: str) -> None:
        if found != own:
            raise RunNotAtThisLocation(
                f"{self._store.url} holds another run, or another process of this rank ({field} {found}, "
                f"not {own}). Check that the job wrote to this location"
            )


class RunCheck:
    """Looks whether the run is still there, and stores it again if it was removed.

    Add to `needed` what later manifests refer to: layouts, what was described.
    """

    def __init__(self, store: Store, guard: RunGuard | None, retrier: Retrier) -> None:
        self._store, self._guard, self._retrier = store, guard, retrier
        self._failures, self._seen_at = retrier.failures, time.monotonic()
        self._troubles: list[str] = []
        self.needed: dict[str, bytes] = {}
        self.removals = 0  # how often the run was found to be removed

    @property
    def due(self) -> bool:
        unseen_s = time.monotonic() - self._seen_at
        return self._retrier.failures != self._failures or unseen_s >= _LOOK_S

    async def run(self) -> None:
        await self._retrier.run("reading the store", self._run_once)

    async def _run_once(self) -> None:
        failures = self._retrier.failures
        if self._guard is not None and not await self._guard.is_present():
            await self._guard.restore()
            for key, data in list(self.needed.items()):
                await self._store.put(key, (data,))
            self.removals += 1
            message = (
                f"{self._store.url} was emptied while the job ran: what was stored there before is "
                "gone. The run is begun anew there; what is stored from now on can be read"
            )
            self._troubles.append(message)
            self._retrier.say(message)
        self._failures, self._seen_at = failures, time.monotonic()

    def take_troubles(self) -> list[str]:
        """Return what is to be told in the next manifest."""
        troubles, self._troubles = self._troubles, []
        return troubles


async def join(
    store: Store, spool: Spool, retrier: Retrier, *, is_right_location: bool
) -> RunGuard | None:
    """Join the run for the rank of `spool`, or check that the run it joined before is still there.

    `is_right_location`: recreate the run if it is gone. Returns None for a spool without the facts needed
    to join. Raises RankRejected, RetryDeadlineExceeded.
    """
    joined_before = spool.info.entered
    if not joined_before:
        if spool.info.entry is None:
            return None
        await retrier.run("joining the run", lambda: _join(store, spool))
    guard = RunGuard(store, spool.info.run, spool.info.session, spool.enter)
    if joined_before:
        check = functools.partial(_check_present, guard, store, retrier.say, is_right_location)
        await retrier.run("reading the store", check)
    return guard


async def _check_present(
    guard: RunGuard, store: Store, say: Callable[[str], None], is_right_location: bool
) -> None:
    if await guard.is_present():
        return
    if not is_right_location:
        raise guard.not_found_error()
    await guard.restore()
    say(f"{store.url} was emptied while the job ran. The run was created there again")


async def _join(store: Store, spool: Spool) -> None:
    await _wait_for_earlier_spools(store, spool)
    assert spool.info.entry is not None
    try:
        joined = await join_run(store, spool.info.session, spool.info.entry)
    except ConfigurationError as error:
        raise RankRejected(f"{type(error).__name__}: {error}") from error
    spool.enter(joined.run, joined.session)


async def _wait_for_earlier_spools(store: Store, spool: Spool) -> None:
    """Let the uploaders of earlier processes of this rank join first: attempts are numbered in order."""
    if not _has_earlier_uploader(spool):
        return
    with contextlib.suppress(ObjectNotFound):  # while the store is down, it is down for all of them
        await store.get(RUN_KEY)
    deadline = time.monotonic() + _EARLIER_SPOOLS_S
    while _has_earlier_uploader(spool) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)


def _has_earlier_uploader(spool: Spool) -> bool:
    return any(_has_live_uploader(earlier) for earlier in spool.earlier_spools())


def _has_live_uploader(spool: Spool) -> bool:
    """Return whether an uploader works on `spool`, or its training process may start one."""
    try:
        with contextlib.closing(AckPage(spool.path / "ack_page")) as ack_page:
            uploader = ack_page.uploader_pid
    except OSError:  # it is gone
        return False
    trainer = spool.info.trainer_pid, spool.info.trainer_start
    return bool(uploader and is_alive(uploader)) or is_alive(*trainer)
