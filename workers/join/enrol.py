"""A rank enters a run: it finds or makes `run.json` and writes its own session.

The training process writes down who it is when it first saves (`intend`), and asks the store
nothing. Its uploader enters the run for it (`enter`), or whoever sends its spool, however late; it
can be repeated. A rank that does not save (`saves`) never enters and writes nothing. In order:

1. read `run.json`, and of `sessions/` the few that decide (`worth_reading`), however many ranks;
2. decide, purely: may this rank join (`may_join`), and as which attempt (`choose_attempt`);
3. make `run.json` if there is none. Of ranks that arrive together one wins by a conditional put and
   the others read the winner's. Where the store ignores conditions the last writer wins: everybody
   reads until it stays as it is, so all end with the same run;
4. put the session under a key that is this rank's and this attempt's; should somebody else be there,
   start over.

Other files in the directory are left alone: only our own keys make it a run. A `run.json` that is
not ours, or manifests without any `run.json` or session, are an error, since mixing would lose data.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from smdist.errors import (
    ConfigurationError,
    CorruptObject,
    ObjectExists,
    ObjectNotFound,
    RunExists,
    StoreError,
)
from smdist.format.manifest import RUN_KEY, Run, Session, session_key
from smdist.format.stored_json import encode, read
from smdist.identity import worker_name
from smdist.storage import loop_thread as sync
from smdist.storage.run_objects import RunObjects
from smdist.storage.store import Store
from smdist.workers.join.attempt import Newcomer, choose_attempt, may_join
from smdist.workers.join.launcher_identity import (
    is_running,
    launch_identity,
    machine,
    parent_process,
    process_started,
)
from smdist.workers.join.rank import Identity
from smdist.workers.spool.spool import UNKNOWN_ATTEMPT, Entry

__all__ = [
    "Enrolment",
    "check_watch_url",
    "enrol_async",
    "enter",
    "intend",
    "newcomer",
    "saves",
    "worth_reading",
]

SETTLE_S = 1.0  # longer than a put takes, for stores that ignore conditions
_SESSION_KEY = re.compile(r"sessions/worker_(\d+)/(\d+)\.json")
_MANIFEST_KEY = re.compile(r"manifests/worker_\d+/\d+-\d+\.json")
_NEIGHBOURS = 8
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Enrolment:
    run: Run
    session: Session


def saves(rank: int, include_workers: str | Sequence[int]) -> bool:
    """Whether a rank saves anything, and so enrols."""
    if isinstance(include_workers, str):
        return include_workers == "all" or rank == 0
    return rank in include_workers


def intend(
    identity: Identity,
    *,
    include_workers: str | Sequence[int],
    resume: bool,
    framework: str,
    explicit_attempt: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[Session, Entry]:
    """This process's session, but for its attempt, and what decides on that. Touches no store."""
    me = newcomer(identity, environ)
    explicit = _explicit_attempt(explicit_attempt, environ)
    session = _session(me, UNKNOWN_ATTEMPT, include_workers, time.time(), uuid.uuid4().hex)
    return session, Entry(me.began, resume, framework, explicit)


async def enter(store: Store, session: Session, entry: Entry) -> Enrolment:
    """As `intend` had it. RunExists, or another ConfigurationError, when that cannot be."""
    me = Newcomer(
        rank=session.rank,
        world_size=session.world_size,
        host=session.host,
        pid=session.pid,
        launch=session.launch,
        restart=session.restart,
        began=entry.began,
    )
    return await enrol_async(
        store,
        me,
        include_workers=session.include_workers,
        resume=entry.resume,
        framework=entry.framework,
        explicit_attempt=entry.attempt,
        session_id=session.session,
        started=session.started,
    )


def check_watch_url(
    store: Store,
    identity: Identity,
    *,
    resume: bool,
    explicit_attempt: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Raise now what `enrol` would raise of the run that is there; writes nothing.

    While the identity is not settled, only a run of which every session has ended on this machine
    is held against it, or one that this very process wrote: other sessions that live may be of its
    own start.
    """

    async def check() -> None:
        me = newcomer(identity, environ)
        await _read_run(store)
        sessions = await _read_sessions(store, me.rank)
        living = [s for s in sessions if s.host != me.host or is_running(s.pid, s.started)]
        mine = any((s.host, s.pid, s.rank) == (me.host, me.pid, me.rank) for s in living)
        if identity.settled or not living or mine:
            _decide(store, me, sessions, resume, _explicit_attempt(explicit_attempt, environ))

    sync.run(check())


def newcomer(identity: Identity, environ: Mapping[str, str] = os.environ) -> Newcomer:
    """This process, as the others will know it."""
    host = machine()
    launch = launch_identity(environ, parent_process(), host)
    return Newcomer(
        rank=identity.rank,
        world_size=identity.world_size,
        host=host,
        pid=os.getpid(),
        launch=launch.id,
        restart=launch.restart,
        began=process_started(os.getpid()),
    )


async def enrol_async(
    store: Store,
    me: Newcomer,
    *,
    include_workers: str | Sequence[int],
    resume: bool,
    framework: str,
    explicit_attempt: int | None = None,
    now: Callable[[], float] = time.time,
    settle_s: float = SETTLE_S,
    session_id: str = "",
    started: float | None = None,
) -> Enrolment:
    """A session with `session_id` that is there already is ours: whoever put it was killed then."""
    session_id = session_id or uuid.uuid4().hex
    for _ in range(_TRIES):
        # Side by side: every request takes its time on the way.
        run, sessions = await asyncio.gather(_read_run(store), _read_sessions(store, me.rank))
        if run is None and not sessions:
            await _refuse_remains(store)
        session = next((s for s in sessions if s.session == session_id), None)
        if session is None:
            attempt = _decide(store, me, sessions, resume, explicit_attempt)
            begun = now() if started is None else started
            session = _session(me, attempt, include_workers, begun, session_id)
        run = await _claim_run(store, run, framework, now, settle_s)
        session = msgspec.structs.replace(session, run_id=run.run_id)
        if await _put_session(store, session):
            return Enrolment(run, session)
    raise StoreError(
        store.url,
        f"sessions/{worker_name(me.rank)}/",
        "enrol",
        "another process keeps taking this place: does it have the same rank?",
    )


def worth_reading(keys: Sequence[str], rank: int) -> list[str]:
    """The sessions that decide: the rank's own last one, and of the two newest attempts some.

    Ranks next to it, as they are likely on its machine and have most to tell, and the lowest.
    """
    found = [(int(m[2]), int(m[1]), key) for key in keys if (m := _SESSION_KEY.fullmatch(key))]
    own = max((item for item in found if item[1] == rank), default=None)
    chosen = {own[2]} if own else set()
    newest = sorted({attempt for attempt, _, _ in found}, reverse=True)[:2]
    for attempt in newest:
        group = sorted((abs(r - rank), r, key) for a, r, key in found if a == attempt)
        chosen.update(key for _, _, key in group[:_NEIGHBOURS])
        chosen.add(min(group, key=lambda item: item[1])[2])
    return sorted(chosen)


def _explicit_attempt(given: int | None, environ: Mapping[str, str]) -> int | None:
    text = environ.get("SMDIST_ATTEMPT", "").strip()
    if given is None and text:
        if not text.isdecimal():
            raise ConfigurationError(f"SMDIST_ATTEMPT={text!r} is not a whole number from 0 on")
        return int(text)
    if given is not None and given < 0:
        raise ConfigurationError(f"attempt={given} is not a whole number from 0 on")
    return given


def _decide(
    store: Store, me: Newcomer, sessions: Sequence[Session], resume: bool, explicit: int | None
) -> int:
    if explicit is not None:
        last = max((s.attempt for s in sessions if s.rank == me.rank), default=-1)
        if explicit <= last:
            raise ConfigurationError(
                f"{worker_name(me.rank)}: {store.url} already holds attempt {last} of this rank, "
                f"and attempt {explicit} was asked for; ask for {last + 1} or for none, or choose "
                "another out_dir"
            )
        return explicit
    # `me` may be of another machine: a spool is sent from wherever it is.
    here = me.host if me.host == machine() else None
    gone = frozenset(
        s.session for s in sessions if s.host == here and not is_running(s.pid, s.started)
    )
    if not may_join(me, sessions, gone, resume=resume):
        raise RunExists(store.url, worker_name(me.rank))
    return choose_attempt(me, sessions, gone)


def _session(
    me: Newcomer,
    attempt: int,
    include_workers: str | Sequence[int],
    started: float,
    session_id: str,
) -> Session:
    return Session(
        session=session_id,
        rank=me.rank,
        world_size=me.world_size,
        attempt=attempt,
        include_workers=(
            include_workers if isinstance(include_workers, str) else tuple(include_workers)
        ),
        started=started,
        host=me.host,
        pid=me.pid,
        launch=me.launch,
        restart=me.restart,
    )


async def _read_run(store: Store) -> Run | None:
    try:
        return await RunObjects(store).run()
    except ObjectNotFound:
        return None
    except CorruptObject as error:
        raise ConfigurationError(
            f"{store.url} holds a {RUN_KEY} that smdist did not write ({error.detail}); choose another "
            "out_dir"
        ) from error


async def _read_sessions(store: Store, rank: int) -> list[Session]:
    keys = worth_reading(await store.list("sessions/"), rank)
    return list(await asyncio.gather(*(_read_session(store, key) for key in keys)))


async def _read_session(store: Store, key: str) -> Session:
    return await read(store, key, Session)


async def _refuse_remains(store: Store) -> None:
    found = any(_MANIFEST_KEY.fullmatch(key) for key in await store.list("manifests/"))
    if found and await _read_run(store) is None:  # else: of a rank that entered just now
        raise ConfigurationError(
            f"{store.url} holds manifests of a run whose {RUN_KEY} and sessions are gone; empty it "
            "or choose another out_dir"
        )


async def _claim_run(
    store: Store, run: Run | None, framework: str, now: Callable[[], float], settle_s: float
) -> Run:
    if run is None:
        run = Run(run_id=uuid.uuid4().hex, created=now(), framework=framework)
        await _put_if_absent(store, RUN_KEY, run)
    elif abs(now() - run.created) > 10 * settle_s:
        return run
    # A store that honours conditions refuses this, and what is there now stays. One that ignores
    # them takes it, and then a slower rank may still overwrite the run.
    if not await _put_if_absent(store, RUN_KEY, run):
        return await _must_read_run(store)
    while True:
        await asyncio.sleep(settle_s)
        seen = await _must_read_run(store)
        if seen == run:
            return run
        run = seen


async def _must_read_run(store: Store) -> Run:
    run = await _read_run(store)
    if run is None:
        raise StoreError(store.url, RUN_KEY, "read", "it was there a moment ago")
    return run


async def _put_session(store: Store, session: Session) -> bool:
    key = session_key(worker_name(session.rank), session.attempt)
    await _put_if_absent(store, key, session)
    # Read back either way: a repeated put whose first answer was lost says "exists" of our own,
    # and a store that ignores conditions says nothing when two processes have the same rank.
    return (await _read_session(store, key)).session == session.session


async def _put_if_absent(store: Store, key: str, value: Run | Session) -> bool:
    try:
        await store.put(key, [encode(value, key)], if_absent=True)
    except ObjectExists:
        return False
    return True
