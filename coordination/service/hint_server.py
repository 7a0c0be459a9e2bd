"""Receive hints of uploaders that they have stored something, so that it is read sooner.

A hint is one line of JSON (`Hint`) and carries no data. The store holds the truth: a hint that is lost,
late, repeated or forged costs a request or nothing. The address is in the store of the run, in
`merged/inbox.json`, with a token that only readers of the run know. One server receives the hints for
all runs of a coordinator, on its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
from collections.abc import Callable

import msgspec

from smdist.errors import CorruptObject, ObjectNotFound
from smdist.format.stored_json import encode, read
from smdist.storage.store import Store

__all__ = ["INBOX_KEY", "Hint", "HintServer", "InboxAddress", "InboxRecord"]

INBOX_KEY = "merged/inbox.json"

_MAX_LINE_BYTES = 1024
_MAX_CONNECTIONS = 512
_MAX_LINES = 1000  # of one connection
_IDLE_S = 10.0


class Hint(msgspec.Struct, frozen=True):
    """The manifest `seq` of a rank was stored."""

    token: str
    run_id: str
    worker: str
    attempt: int
    seq: int


class InboxRecord(msgspec.Struct, frozen=True):
    """The content of `merged/inbox.json`."""

    host: str
    port: int
    token: str
    epoch: int
    time: float


class InboxAddress(msgspec.Struct, frozen=True):
    """Where a HintServer listens, and the token that it expects."""

    host: str
    port: int
    token: str

    async def publish(self, store: Store, epoch: int, now: float) -> None:
        record = InboxRecord(self.host, self.port, self.token, epoch, now)
        await store.put(INBOX_KEY, [encode(record, INBOX_KEY)])

    async def withdraw(self, store: Store) -> None:
        """Remove the address, unless another server has published its own since."""
        with contextlib.suppress(ObjectNotFound, CorruptObject):
            record = await read(store, INBOX_KEY, InboxRecord)
            if record.token == self.token:
                await store.delete(INBOX_KEY)


class HintServer:
    """A TCP server for hints: `start`, publish its `address`, `close`.

    `host` is how others reach this machine. `on_hint` is called on the loop for each hint with the
    right token; it must not block.
    """

    def __init__(self, on_hint: Callable[[Hint], None], *, host: str, port: int = 0) -> None:
        self._on_hint, self._host, self._port = on_hint, host, port
        self._token = secrets.token_urlsafe(16)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.refused = 0

    @property
    def address(self) -> InboxAddress:
        assert self._server is not None, "the server was not started"
        port: int = self._server.sockets[0].getsockname()[1]
        return InboxAddress(self._host, port, self._token)

    async def start(self) -> None:
        """Listen. Raise OSError if this machine has no such address."""
        bind = self._host if self._host in ("127.0.0.1", "::1", "localhost") else None
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._server = await asyncio.start_server(
            self._serve, bind, self._port, limit=_MAX_LINE_BYTES, family=family
        )

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
            for writer in tuple(self._open):
                writer.close()
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= _MAX_CONNECTIONS:
            writer.close()
            return
        self._open.add(writer)
        try:
            for _ in range(_MAX_LINES):
                line = await asyncio.wait_for(reader.readline(), _IDLE_S)
                if not line or not self._accept(line):
                    break
        except (OSError, ValueError, asyncio.TimeoutError):  # closed, line too long, or idle
            self.refused += 1
        finally:
            self._open.discard(writer)
            writer.close()

    def _accept(self, line: bytes) -> bool:
        try:
            hint = msgspec.json.decode(line, type=Hint)
        except msgspec.DecodeError:
            self.refused += 1
            return False
        if not hmac.compare_digest(hint.token.encode(), self._token.encode()):
            self.refused += 1
            return False
        self._on_hint(hint)
        return True
