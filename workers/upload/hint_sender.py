"""Notify a coordinator, if there is one, that the rank has stored something.

Used on the uploader's event loop: `stored` after each manifest, `close` at the end. Hints are optional:
they save the coordinator from polling. Nothing waits for them and nothing fails because of them. Where the
coordinator listens is in `merged/inbox.json`, which is read rarely, and not before something was
stored; a dead address is tried once a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import msgspec

from smdist.coordination.service.hint_server import INBOX_KEY, Hint, InboxRecord
from smdist.errors import ObjectNotFound
from smdist.format.manifest import Session
from smdist.format.stored_json import read
from smdist.identity import worker_name
from smdist.storage.store import Store

__all__ = ["Announcer"]

_LOOK_S, _MOST_LOOK_S = 30.0, 120.0  # between two looks at where the inbox is
_REST_S = 60.0  # after an address that did not answer
_CONNECT_S = 1.0
_SPACING_S = 0.2  # between two hints: the newest one says it all
_FAREWELL_S = 0.5


class Announcer:
    def __init__(
        self,
        store: Store,
        run_id: Callable[[], str],
        session: Session,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._run_id, self._session, self._clock = store, run_id, session, clock
        self._newest = self._sent = -1
        self._post: InboxRecord | None = None
        self._look_at = self._send_at = float("-inf")
        self._look_s = _LOOK_S
        self._task: asyncio.Task[None] | None = None

    def stored(self, seq: int) -> None:
        """Send a hint that manifest `seq` is in the store, in the background. Never raises."""
        self._newest = max(self._newest, seq)
        if self._task is None or self._task.done():
            now = self._clock()
            if now >= self._send_at and (self._post is not None or now >= self._look_at):
                self._task = asyncio.get_running_loop().create_task(self._tell())

    async def close(self) -> None:
        """Wait a moment for a hint that is being sent, then cancel it."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_FAREWELL_S)
            self._task.cancel()

    async def _tell(self) -> None:
        try:
            while self._sent < self._newest:
                seq = self._newest
                if self._clock() >= self._look_at:
                    await self._look()
                if self._post is None:
                    return
                await asyncio.wait_for(self._send(self._post, seq), _CONNECT_S)
                self._sent = seq
                await asyncio.sleep(_SPACING_S)
        except Exception:  # noqa: BLE001 - whatever it is, the coordinator finds out by asking
            self._send_at = self._clock() + _REST_S

    async def _look(self) -> None:
        self._look_at = self._clock() + self._look_s
        self._look_s = min(2 * self._look_s, _MOST_LOOK_S)
        self._post = None
        with contextlib.suppress(ObjectNotFound):
            self._post = await read(self._store, INBOX_KEY, InboxRecord)
            self._look_s = _LOOK_S
            self._look_at = self._clock() + _LOOK_S

    async def _send(self, post: InboxRecord, seq: int) -> None:
        session = self._session
        hint = Hint(post.token, self._run_id(), worker_name(session.rank), session.attempt, seq)
        _, writer = await asyncio.open_connection(post.host, post.port)
        try:
            writer.write(msgspec.json.encode(hint) + b"\n")
            await writer.drain()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
