"""Many runs, watched: those at or below a place, as they appear.

A coordinator makes one `DirectoryWatcher` and runs it on its event loop; `RunWatcher` does the work for a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from smdist.coordination.service.hint_server import Hint, HintServer
from smdist.coordination.service.run_watcher import MakePoller, RunWatcher
from smdist.coordination.service.store_poller import StorePoller
from smdist.coordination.view.membership import DEFAULT_TIMEOUTS, LivenessTimeouts
from smdist.coordination.view.status import RunStatus
from smdist.errors import (
    AlreadyCoordinated,
    NoSuchRun,
    ObjectNotFound,
    SmdistError,
    Superseded,
)
from smdist.format.manifest import RUN_KEY
from smdist.storage import open_store
from smdist.storage.store import Store
from smdist.storage.subtree import StoreSubtree, folders

__all__ = ["DirectoryWatcher", "RunWatcher"]

_AT_ONCE = 64  # requests: as many ranks are asked at once
_REQUEST_S = 10.0
_SCAN_S = 10.0  # between two looks for more runs, once there are some
_DEPTH = 3  # folders below the place in which a run is looked for
_RETRY_S = 5.0
_AGAIN_S = 60.0  # between two looks whether a finished run was resumed
_OWN = {"collections", "heartbeats", "layouts", "manifests", "merged", "segments", "sessions"}
_OWN |= {"spans", "summaries", "thinned"}


@dataclass
class _Entry:
    watcher: RunWatcher
    task: asyncio.Task[None] | None = None


class DirectoryWatcher:
    """The runs at or below a place: `url` is one, or holds some, found by their `run.json`."""

    def __init__(
        self,
        url: str,
        *,
        store: Store | None = None,
        interval_s: float = 1.0,
        patience: LivenessTimeouts = DEFAULT_TIMEOUTS,
        now: Callable[[], float] = time.time,
        writer: str | None = None,
        take_over: bool = False,
        lease_s: float = 30.0,
        inbox_host: str | None = None,
        follow: Callable[[str], MakePoller] = lambda _: StorePoller,
    ) -> None:
        """`inbox_host`: how uploaders reach this machine; None: they are not asked to.

        `follow`: by a run's name below the place, what makes that which reads for its watcher.
        """
        self._follow = follow
        self.url, self._own = url, store is None
        self._store = (
            store
            if store is not None
            else open_store(url, deadline_s=_REQUEST_S, concurrency=_AT_ONCE)
        )
        self._interval_s, self._patience, self._now = interval_s, patience, now
        # Watchers of one run follow each other here; none waits for the lease of the one before.
        self._writer = writer or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._take_over, self._lease_s = take_over, lease_s
        self._inbox = HintServer(self._hint, host=inbox_host) if inbox_host else None
        self._receiving = False
        self._entries: dict[str, _Entry] = {}  # by name below the place, "" for the place itself
        self._scanning = asyncio.Semaphore(16)
        self.trouble = ""
        self.looked = False  # for runs, at least once

    # -- running ---------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Watch what is there and what comes, until stopped."""
        await self._open_inbox()
        while not stop.is_set():
            pause_s = min(_SCAN_S, 10 * self._interval_s) if self._entries else self._interval_s
            try:
                for name in await self._scan():
                    self._begin(name, stop)
                self.trouble, self.looked = "", True
            except (SmdistError, OSError) as error:
                self.trouble = f"runs cannot be looked for: {error}"
                pause_s = max(pause_s, _RETRY_S)
            await _wait(stop, pause_s)
        tasks = [entry.task for entry in self._entries.values() if entry.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    async def _open_inbox(self) -> None:
        if self._inbox is None or self._receiving:
            return
        try:
            await self._inbox.start()
            self._receiving = True
        except OSError as error:  # no such address here: runs are followed by asking alone
            self.trouble = f"no inbox for hints: {error}"

    async def _scan(self) -> list[str]:
        """Names of runs that were not there before."""
        if "" in self._entries:
            return []
        if await self._is_run(""):
            return [""]
        return await self._scan_below("", 1)

    async def _scan_below(self, prefix: str, depth: int) -> list[str]:
        async def look(name: str) -> list[str]:
            async with self._scanning:
                is_run = await self._is_run(f"{name}/")
            if is_run:
                return [name]
            return await self._scan_below(f"{name}/", depth + 1) if depth < _DEPTH else []

        async with self._scanning:
            inside = [f"{prefix}{folder}" for folder in await folders(self._store, prefix)]
        fresh = [name for name in inside if name not in self._entries]
        tasks = [
            asyncio.ensure_future(look(name))
            for name in fresh
            if name.rpartition("/")[2] not in _OWN
        ]
        try:
            return [name for names in await asyncio.gather(*tasks) for name in names]
        finally:
            for task in tasks:
                task.cancel()

    async def _is_run(self, prefix: str) -> bool:
        try:
            await self._store.get(f"{prefix}{RUN_KEY}")
        except ObjectNotFound:
            return False
        return True

    def _begin(self, name: str, stop: asyncio.Event) -> None:
        entry = self._entries[name] = _Entry(self._make(name))
        entry.task = asyncio.get_running_loop().create_task(self._attend(entry, name, stop))

    def _make(self, name: str) -> RunWatcher:
        store = StoreSubtree(self._store, name) if name else self._store
        return RunWatcher(
            store.url,
            store=store,
            interval_s=self._interval_s,
            patience=self._patience,
            now=self._now,
            writer=self._writer,
            take_over=self._take_over,
            lease_s=self._lease_s,
            inbox=self._inbox.address if self._inbox is not None and self._receiving else None,
            follow=self._follow(name),
        )

    async def _attend(self, entry: _Entry, name: str, stop: asyncio.Event) -> None:
        """One run, for as long as we are to watch it."""
        while not stop.is_set():
            pause_s = _RETRY_S
            try:
                await entry.watcher.open()
                await entry.watcher.run(stop)
                pause_s = max(_AGAIN_S, len(self._entries) / 2)
                if entry.watcher.state == "waiting":  # it was removed, or replaced
                    pause_s = self._interval_s
            except Superseded:
                return
            except AlreadyCoordinated as error:
                entry.watcher.mark_unavailable("refused", str(error))
                pause_s = min(max(error.free_in_s, 1.0), _RETRY_S)
            except (SmdistError, OSError) as error:
                entry.watcher.mark_unavailable("waiting", str(error))
            except Exception as error:  # noqa: BLE001 - one run must not end the others
                entry.watcher.mark_unavailable("failed", f"{type(error).__name__}: {error}")
            await self._until_more(entry, stop, pause_s)
            if entry.watcher.state in ("finished", "failed") and not stop.is_set():
                await entry.watcher.close()
                entry.watcher = self._make(name)
        await entry.watcher.close()

    async def _until_more(self, entry: _Entry, stop: asyncio.Event, pause_s: float) -> None:
        """Wait; when the run has finished, until it is resumed."""
        await entry.watcher.wait(stop, pause_s)
        while entry.watcher.state == "finished" and not stop.is_set():
            with contextlib.suppress(SmdistError, OSError):
                if await entry.watcher.has_new_data():
                    return
            await entry.watcher.wait(stop, pause_s)

    async def close(self) -> None:
        tasks = [entry.task for entry in self._entries.values() if entry.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for entry in self._entries.values():
            await entry.watcher.close()
        if self._inbox is not None:
            await self._inbox.close()
        if self._own:
            await self._store.close()

    # -- questions -------------------------------------------------------------------------------

    def runs(self) -> dict[str, RunStatus]:
        """By URL."""
        watchers = [entry.watcher for _, entry in sorted(self._entries.items())]
        return {watcher.url: watcher.status() for watcher in watchers}

    def watcher(self, run: str = "") -> RunWatcher:
        """The one of a run, by URL, run id or name below the prefix; "" when there is only one.

        NoSuchRun.
        """
        if not run and len(self._entries) == 1:
            return next(iter(self._entries.values())).watcher
        for name, entry in self._entries.items():
            if run and run.rstrip("/") in (name, entry.watcher.url, entry.watcher.run_id):
                return entry.watcher
        raise NoSuchRun(run or self.url)

    async def refreshed(self, run: str = "") -> RunWatcher:
        """As `watcher`; one of a run that has finished looks first whether it was resumed."""
        watcher = self.watcher(run)
        if watcher.state == "finished":
            with contextlib.suppress(SmdistError, OSError):  # then it knows no better
                if await watcher.refresh_if_finished():
                    watcher = await self._successor(run, watcher)
        return watcher

    async def _successor(self, run: str, watcher: RunWatcher) -> RunWatcher:
        """Its task, just woken, takes it up again or makes another one."""
        for _ in range(500):
            if self.watcher(run) is not watcher or watcher.state != "finished":
                break
            await asyncio.sleep(0.01)
        return self.watcher(run)

    def _hint(self, hint: Hint) -> None:
        for entry in self._entries.values():
            if entry.watcher.run_id == hint.run_id:
                entry.watcher.hint(hint.worker, hint.attempt, hint.seq)


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
