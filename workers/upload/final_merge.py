"""After a rank's last word: the uploader that ends last merges the run for those who will read it.

Without it a finished run is opened with a request per rank, with it by a handful. Nobody needs it:
the rank is released before, a failure is a note, and who is killed here has lost nothing.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Iterable
from typing import NamedTuple

from smdist.errors import AlreadyCoordinated, SmdistError, Superseded
from smdist.format.intervals import Members
from smdist.format.manifest import Session
from smdist.storage.store import Store

__all__ = ["Rank", "await_merge", "merge_if_last"]

# What a snapshot saves whoever opens the run: a request for each summary and each layout. It takes
# some thirty to write one.
_WORTH = 5
_MOST_BYTES = 256 << 20  # of all summaries together; beyond it, a coordinator or `smdist merge`
_IN_FLIGHT = 64 << 20
_AT_ONCE = 32
_MERGE_S, _GIVE_BACK_S = 60.0, 5.0
_OWNER = re.compile(r"(?:sessions|summaries)/worker_(\d+)/(\d+)\.json")


class Rank(NamedTuple):
    """What is known here of how much there is to merge: by the one rank, as ranks resemble."""

    session: Session
    layouts: int
    summary_bytes: int


async def merge_if_last(store: Store, rank: Rank) -> str:
    """Merge the run in `store` if all its sessions have ended; what is to be said of that, if anything."""
    try:
        sessions = await _ended_sessions(store, rank)
    except (SmdistError, OSError):
        return ""  # nobody knows whether it was for us to do
    if not sessions or sessions + rank.layouts < _WORTH:
        return ""
    if sessions * rank.summary_bytes > _MOST_BYTES:
        return _not_merged(store, f"{sessions} summaries are too much for an uploader to read")
    # Of all uploaders one needs it.
    from smdist.coordination.service.merge_once import merge_once

    at_once = min(_AT_ONCE, _IN_FLIGHT // max(rank.summary_bytes, 1) + 1)
    try:
        await merge_once(store, concurrency=at_once)
    except (AlreadyCoordinated, Superseded):
        return ""  # somebody else does it
    except (SmdistError, OSError, ValueError) as error:
        return _not_merged(store, str(error))
    return ""


async def await_merge(task: asyncio.Task[str], store: Store) -> str:
    """Wait for `merge_if_last`, but not for ever; what is to be said of it, if anything."""
    try:
        in_time, _ = await asyncio.wait([task], timeout=_MERGE_S)
    finally:
        task.cancel()
    # Time to give back the right to write, should it hold it.
    await asyncio.wait([task], timeout=_GIVE_BACK_S)
    if not in_time:
        return _not_merged(store, f"that took longer than {_MERGE_S:.0f} s")
    if task.cancelled():
        return ""
    error = task.exception()
    return task.result() if error is None else _not_merged(store, repr(error))


async def _ended_sessions(store: Store, rank: Rank) -> int:
    """How many sessions the run has, if it is worth asking and all of them have a summary; else 0."""
    session = rank.session
    expected = {(session.attempt, number) for number in Members(session.expected_ranks())}
    if session.attempt == 0 and len(expected) + rank.layouts < _WORTH:
        return 0
    ended = _owners(await store.list("summaries/"))
    if not expected <= ended:
        return 0
    begun = _owners(await store.list("sessions/"))
    return len(begun) if begun <= ended else 0


def _owners(keys: Iterable[str]) -> set[tuple[int, int]]:
    """Attempt and rank."""
    return {(int(match[2]), int(match[1])) for key in keys if (match := _OWNER.fullmatch(key))}


def _not_merged(store: Store, why: str) -> str:
    return (
        f"the run was not merged: {why}. Nothing is lost by that, only that opening it takes a request "
        f"per rank; `smdist merge {shlex.quote(store.url)}` merges it"
    )
