"""The uploader's first errand: into the run for its rank, with all the patience that takes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from smdist.errors import ConfigurationError, ObjectNotFound
from smdist.format.manifest import RUN_KEY
from smdist.processes import is_alive
from smdist.storage.store import Store
from smdist.workers.join.enrol import enter
from smdist.workers.spool.ack_page import AckPage
from smdist.workers.spool.spool import Spool
from smdist.workers.upload.retry import Patience
from smdist.workers.upload.run_guard import Place, Refused

__all__ = ["enter_run"]

_ELDERS_S, _LOOK_S = 15.0, 0.05  # the first is more than the longest pause between two tries


async def enter_run(
    store: Store, spool: Spool, patience: Patience, say: Callable[[str], None], *, trusts: bool
) -> Place | None:
    """Into the run, if nobody did that for this rank yet; else, see that it is the same run.

    `trusts`: the place is the right one even if the run is gone. None for a spool that says nothing
    of how its rank got into the run. Raises Refused, GaveUp.
    """
    info = spool.info
    if info.entered:
        place = Place(store, info.run, info.session)
        await patience.insist("reading the store", lambda: _find(place, store, say, trusts=trusts))
        return place
    if info.entry is None:
        return None
    await patience.insist("entering the run", lambda: _enrol(store, spool))
    return Place(store, spool.info.run, spool.info.session)


async def _find(place: Place, store: Store, say: Callable[[str], None], *, trusts: bool) -> None:
    if await place.is_whole():
        return
    if not trusts:
        raise place.absent()
    await place.restore()
    say(f"{store.url} was emptied while the job ran: the run is begun anew there")


async def _enrol(store: Store, spool: Spool) -> None:
    await _let_elders_pass(store, spool)
    assert spool.info.entry is not None
    try:
        enrolment = await enter(store, spool.info.session, spool.info.entry)
    except ConfigurationError as error:
        raise Refused(f"{type(error).__name__}: {error}") from error
    spool.enter(enrolment.run, enrolment.session)


async def _let_elders_pass(store: Store, spool: Spool) -> None:
    """Attempts go by number: earlier processes of this rank, if their uploaders work, come first."""
    if not _elders(spool):
        return
    with contextlib.suppress(ObjectNotFound):  # as long as the store is closed, it is to all of us
        await store.get(RUN_KEY)
    deadline = time.monotonic() + _ELDERS_S
    while _elders(spool) and time.monotonic() < deadline:  # noqa: ASYNC110 - of other processes
        await asyncio.sleep(_LOOK_S)


def _elders(spool: Spool) -> bool:
    return any(_has_live_uploader(earlier) for earlier in spool.earlier_spools())


def _has_live_uploader(spool: Spool) -> bool:
    """Whether an uploader works on it, or will soon."""
    try:
        ack_page = AckPage(spool.path / "ack_page")
    except OSError:  # it is gone
        return False
    try:
        uploader = ack_page.uploader_pid
    finally:
        ack_page.close()
    trainer = spool.info.trainer_pid, spool.info.trainer_start
    return bool(uploader and is_alive(uploader)) or is_alive(*trainer)
