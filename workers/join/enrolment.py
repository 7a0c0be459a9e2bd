"""Join a rank to a run: find or create `run.json`, and store the session of this process.

The training process describes itself when it first saves (`new_session`) and does no I/O for it. Its
uploader, or `smdist recover`, joins the run with that description (`join_run`), however late. Joining can
be repeated. A rank that does not save never joins. In order:

1. Read `run.json`, and the few sessions that decide (`sessions_to_read`), however many ranks there are.
2. Decide, without I/O: may this rank join (`may_join`), and as which attempt (`choose_attempt`).
3. Create `run.json` if there is none. Of ranks that arrive together one succeeds with its conditional put,
   and the others read what it wrote.
4. Put the session under the key of this rank and attempt. If another process is there, start over.

Some servers ignore conditions. There a slow rank may replace `run.json` after others have joined. What
the last put leaves there is the run, and `run.json` is not written again:

- Each rank that is still at work stores its session again, with the id that it finds (`run_guard.py`).
- The rank whose put was the last one does that for ranks that have ended (`_correct_sessions`). The id of a
  run follows from the session that created it, so a restarted uploader knows that it was the one.
- Whatever a rank stores with a run id, it reads `run.json` afterwards, and corrects what it stored. An
  uploader that was killed in between does so after its restart.

Other files in the directory are ignored. A `run.json` of something else, or manifests without `run.json`
and sessions, are an error: mixing would lose data.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from smdist.concurrency import bounded_gather
from smdist.errors import (
    ConfigurationError,
    CorruptObject,
    ObjectExists,
    ObjectNotFound,
    RunExists,
    StoreError,
)
from smdist.format.manifest import (
    RUN_KEY,
    Owner,
    RankSummary,
    Run,
    Session,
    parse_manifest_key,
    parse_session_key,
    session_key,
    summary_key,
)
from smdist.format.stored_json import encode, read
from smdist.identity import worker_name
from smdist.storage import loop_thread as sync
from smdist.storage.run_objects import RunObjects
from smdist.storage.store import MayIgnoreConditions, Store
from smdist.workers.join.attempt import SameLaunch, StartingRank, choose_attempt, may_join, relation
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
    "JoinedRun",
    "check_location",
    "correct_summary",
    "current_process",
    "join_run",
    "new_session",
    "sessions_to_read",
]

_NEIGHBOURS = 8
_MAX_TRIES = 5
_MAX_CORRECTED = 64  # in larger jobs, only sessions of ranks that have ended are looked at
_CONCURRENCY = 16


class JoinedRun(NamedTuple):
    run: Run
    session: Session


def new_session(
    identity: Identity,
    *,
    include_workers: str | Sequence[int],
    resume: bool,
    framework: str,
    explicit_attempt: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[Session, Entry]:
    """Describe this process without its attempt, which `join_run` assigns. Does no I/O."""
    me = current_process(identity, environ)
    session = Session(
        session=uuid.uuid4().hex,
        rank=me.rank,
        world_size=me.world_size,
        attempt=UNKNOWN_ATTEMPT,
        include_workers=(
            include_workers if isinstance(include_workers, str) else tuple(include_workers)
        ),
        started=time.time(),
        host=me.host,
        pid=me.pid,
        launch=me.launch,
        restart=me.restart,
    )
    return session, Entry(me.began, resume, framework, _attempt(explicit_attempt, environ))


async def join_run(
    store: Store, session: Session, entry: Entry, now: Callable[[], float] = time.time
) -> JoinedRun:
    """Join the run in `store` as `new_session` described it.

    A session of the same id that is there already is ours: its uploader was killed afterwards. Raises
    RunExists, or another ConfigurationError, if this rank cannot join.
    """
    me = _starting_rank(session, entry)
    for _ in range(_MAX_TRIES):
        # Side by side: each request takes a while.
        run, sessions = await asyncio.gather(_read_run(store), _read_sessions(store, me.rank))
        if run is None and not sessions:
            await _reject_remains(store)
        own = next((s for s in sessions if s.session == session.session), None)
        restarted = (
            own is not None
        )  # its predecessor may have been killed while it corrected others
        if own is None:
            own = replace(
                session, attempt=_decide(store, me, sessions, entry.resume, entry.attempt)
            )
        if run is None:
            run = await _create_run(store, Run(_run_id(own), now(), entry.framework))
        own = replace(own, run_id=run.run_id)
        if await _put_session(store, own):
            contested = isinstance(store, MayIgnoreConditions) and store.ignores_conditions
            if contested and (restarted or run.run_id == _run_id(own)):
                await _correct_sessions(store, me, own)
            return JoinedRun(run, own)
    raise StoreError(
        store.url,
        f"sessions/{worker_name(me.rank)}/",
        "join",
        "another process keeps taking this place: does it have the same rank?",
    )


def check_location(
    store: Store,
    identity: Identity,
    *,
    resume: bool,
    explicit_attempt: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Raise now what `join_run` would raise because of the run in `store`; writes nothing.

    While the identity is not settled, other live sessions may be of the same start. Then it only objects
    to a run whose sessions have all ended on this machine, or that this very process wrote.
    """

    async def check() -> None:
        me = current_process(identity, environ)
        await _read_run(store)
        sessions = await _read_sessions(store, me.rank)
        live = [s for s in sessions if s.host != me.host or is_running(s.pid, s.started)]
        mine = any((s.host, s.pid, s.rank) == (me.host, me.pid, me.rank) for s in live)
        if identity.settled or not live or mine:
            _decide(store, me, sessions, resume, _attempt(explicit_attempt, environ))

    sync.run(check())


def current_process(identity: Identity, environ: Mapping[str, str] = os.environ) -> StartingRank:
    """Describe this process as other ranks will know it."""
    host = machine()
    launch = launch_identity(environ, parent_process(), host)
    return StartingRank(
        rank=identity.rank,
        world_size=identity.world_size,
        host=host,
        pid=os.getpid(),
        launch=launch.id,
        restart=launch.restart,
        began=process_started(os.getpid()),
    )


def sessions_to_read(keys: Sequence[str], rank: int) -> list[str]:
    """Return the keys that decide: the rank's own last session, and some of the two newest attempts.

    Of those the nearest ranks, as they are likely to be on this machine, and the lowest. For any number of
    ranks these are a few requests.
    """
    found = [(*owner, key) for key in keys if (owner := parse_session_key(key))]
    own = max((item for item in found if item[1] == rank), default=None)
    chosen = {own[2]} if own else set()
    for attempt in sorted({attempt for attempt, _, _ in found})[-2:]:
        group = sorted((abs(r - rank), r, key) for a, r, key in found if a == attempt)
        chosen.update(key for _, _, key in group[:_NEIGHBOURS])
        chosen.add(min(group, key=lambda item: item[1])[2])
    return sorted(chosen)


async def correct_summary(store: Store, session: Session) -> None:
    """Store the summary of `session` again if there is one and it names another run."""
    key = summary_key(worker_name(session.rank), session.attempt)
    try:
        summary = await read(store, key, RankSummary)
    except (ObjectNotFound, CorruptObject):
        return
    if summary.session.session == session.session and summary.session != session:
        await store.put(key, [encode(replace(summary, session=session), key)])


# -- deciding ------------------------------------------------------------------------------------


def _starting_rank(session: Session, entry: Entry) -> StartingRank:
    return StartingRank(
        rank=session.rank,
        world_size=session.world_size,
        host=session.host,
        pid=session.pid,
        launch=session.launch,
        restart=session.restart,
        began=entry.began,
    )


def _attempt(given: int | None, environ: Mapping[str, str]) -> int | None:
    text = environ.get("SMDIST_ATTEMPT", "").strip()
    if given is None and text:
        if not text.isdecimal():
            raise ConfigurationError(f"SMDIST_ATTEMPT={text!r} is not a whole number from 0 on")
        return int(text)
    if given is not None and given < 0:
        raise ConfigurationError(f"attempt={given} is not a whole number from 0 on")
    return given


def _decide(
    store: Store, me: StartingRank, sessions: Sequence[Session], resume: bool, explicit: int | None
) -> int:
    """Return the attempt of `me`. Raise ConfigurationError or RunExists if it may not join."""
    if explicit is not None:
        last = max((s.attempt for s in sessions if s.rank == me.rank), default=-1)
        if explicit <= last:
            raise ConfigurationError(
                f"{worker_name(me.rank)}: {store.url} already holds attempt {last} of this rank; "
                f"attempt={explicit} is taken. Use attempt={last + 1}, none, or another out_dir"
            )
        return explicit
    # `me` may be on another machine: `smdist recover` runs anywhere.
    here = me.host if me.host == machine() else None
    gone = frozenset(
        s.session for s in sessions if s.host == here and not is_running(s.pid, s.started)
    )
    if not may_join(me, sessions, gone, resume=resume):
        raise RunExists(store.url, worker_name(me.rank))
    return choose_attempt(me, sessions, gone)


def _run_id(creator: Session) -> str:
    return hashlib.sha256(f"run of {creator.session}".encode()).hexdigest()[:32]


# -- reading and writing -------------------------------------------------------------------------


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
    keys = sessions_to_read(await store.list("sessions/"), rank)
    return list(await asyncio.gather(*(read(store, key, Session) for key in keys)))


async def _reject_remains(store: Store) -> None:
    found = any(parse_manifest_key(key) for key in await store.list("manifests/"))
    if found and await _read_run(store) is None:  # else a rank joined just now
        raise ConfigurationError(
            f"{store.url} holds manifests of a run whose {RUN_KEY} and sessions are gone; empty it "
            "or choose another out_dir"
        )


async def _create_run(store: Store, run: Run) -> Run:
    """Put `run` unless there is one; return the run that is there now."""
    await _put_if_absent(store, RUN_KEY, run)
    there = await _read_run(store)
    if there is None:
        raise StoreError(store.url, RUN_KEY, "read", "it was there a moment ago")
    return there


async def _put_session(store: Store, session: Session) -> bool:
    """Put `session`; return whether it is the one that is there now."""
    key = session_key(worker_name(session.rank), session.attempt)
    await _put_if_absent(store, key, session)
    # Read in any case. A repeated put whose first answer was lost says "exists" of our own session, and
    # a store that ignores conditions says nothing when two processes have the same rank.
    there = await read(store, key, Session)
    if there.session == session.session and there != session:
        await store.put(key, [encode(session, key)])  # our own, from before `run.json` was replaced
    return there.session == session.session


async def _put_if_absent(store: Store, key: str, value: Run | Session) -> bool:
    try:
        await store.put(key, [encode(value, key)], if_absent=True)
    except ObjectExists:
        return False
    return True


async def _correct_sessions(store: Store, me: StartingRank, own: Session) -> None:
    """Store the run id in sessions and summaries of this start that name a run which is replaced.

    Ends once `run.json` names the id that was stored. So whichever rank writes last, it has seen the last
    `run.json`, or the rank that replaced `run.json` after that sees what was written.
    """
    objects, run_id = RunObjects(store), own.run_id

    async def correct(owner: Owner) -> None:
        try:
            session = await objects.session(owner)
        except (ObjectNotFound, CorruptObject):
            return
        if not session.run_id or relation(me, session, ()) is SameLaunch.OTHER:
            return
        corrected = replace(session, run_id=run_id)
        if corrected != session:
            key = session_key(worker_name(session.rank), session.attempt)
            await store.put(key, [encode(corrected, key)])
        # Also if the session is right: its rank may have corrected it, and we stored the summary since.
        if owner in ended:
            await correct_summary(store, corrected)

    while True:
        begun, ended = await asyncio.gather(objects.list_sessions(), objects.list_summaries())
        owners = begun if len(begun) <= _MAX_CORRECTED else ended
        others = [o for o in owners if o[0] == own.attempt and o[1] != own.rank]
        await bounded_gather(correct, others, _CONCURRENCY)
        run = await _read_run(store)
        if run is None or run.run_id == run_id:
            return
        run_id = run.run_id
