"""Watch all runs at or below a directory, as they appear.

A coordinator makes one `DirectoryWatcher` and runs it on its event loop: `run` until stopped, `close`
last, queries at any time. Each run has its own task and `RunWatcher`; an error in one run does not end
the others.
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

from smdist.concurrency import bounded_gather
from smdist.coordination.service.hint_server import Hint, HintServer
from smdist.coordination.service.run_follower import MakePoller
from smdist.coordination.service.run_watcher import RunWatcher
from smdist.coordination.service.store_poller import StorePoller
from smdist.coordination.view.membership import DEFAULT_TIMEOUTS, LivenessTimeouts
from smdist.coordination.view.status import RunState, RunStatus
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

__all__ = ["DirectoryWatcher"]

_CONCURRENCY = 64  # requests at a time
_REQUEST_S = 10.0
_SCAN_S = 10.0  # between two scans for new runs, once there are some
_SCAN_CONCURRENCY = 16
_MAX_DEPTH = 3  # folders below the directory in which runs are looked for
_RETRY_S = 5.0
_RECHECK_S = 60.0  # between two checks whether a finished run was continued
_RUN_FOLDERS = frozenset(
    [
        "collections",
        "heartbeats",
        "layouts",
        "manifests",
        "merged",
        "segments",
        "sessions",
        "spans",
        "summaries",
        "thinned",
    ]
)


@dataclass
class _Entry:
    watcher: RunWatcher
    task: asyncio.Task[None] | None = None


class DirectoryWatcher:
    """The runs at or below `url`, found by their `run.json`; `url` may be a run itself."""

    def __init__(
        self,
        url: str,
        *,
        store: Store | None = None,
        interval_s: float = 1.0,
        timeouts: LivenessTimeouts = DEFAULT_TIMEOUTS,
        now: Callable[[], float] = time.time,
        writer: str | None = None,
        take_over: bool = False,
        lease_s: float = 30.0,
        hint_host: str | None = None,
        make_poller: Callable[[str], MakePoller] = lambda _: StorePoller,
    ) -> None:
        """Create a watcher; nothing is read before `run`.

        `hint_host`: how uploaders reach this machine with hints; None for no hints. `make_poller`
        returns the factory of a run's pollers from the run's name below the directory.
        """
        self.url, self._owns_store = url, store is None
        self._store = store or open_store(url, deadline_s=_REQUEST_S, concurrency=_CONCURRENCY)
        self._interval_s, self._timeouts, self._now = interval_s, timeouts, now
        # The same for all watchers here: a second watcher of a run need not wait for the lease.
        self._writer = writer or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._take_over, self._lease_s, self._make_poller = take_over, lease_s, make_poller
        self._hint_server = HintServer(self._on_hint, host=hint_host) if hint_host else None
        self._receives_hints = False
        self._entries: dict[str, _Entry] = {}  # by name below the directory, "" for itself
        self.trouble = ""
        self.scanned = False  # at least once

    # -- running ---------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Watch the runs that are there and those that come, until stopped."""
        await self._start_hint_server()
        while not stop.is_set():
            pause_s = min(_SCAN_S, 10 * self._interval_s) if self._entries else self._interval_s
            try:
                for name in await self._scan():
                    self._start_watching(name, stop)
                self.trouble, self.scanned = "", True
            except (SmdistError, OSError) as error:
                self.trouble = f"runs cannot be listed: {error}"
                pause_s = max(pause_s, _RETRY_S)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stop.wait(), pause_s)
        tasks = [entry.task for entry in self._entries.values() if entry.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    async def _start_hint_server(self) -> None:
        if self._hint_server is None or self._receives_hints:
            return
        try:
            await self._hint_server.start()
            self._receives_hints = True
        except OSError as error:  # this machine has no such address: runs are polled without hints
            self.trouble = f"hints cannot be received: {error}"

    async def _scan(self) -> list[str]:
        """Return the names of new runs."""
        if "" in self._entries:
            return []
        if await self._is_run(""):
            return [""]
        found, level = [], [""]
        for _ in range(_MAX_DEPTH):
            inside = await bounded_gather(self._subfolders, level, _SCAN_CONCURRENCY)
            names = [name for some in inside for name in some]
            prefixes = [f"{name}/" for name in names]
            are_runs = await bounded_gather(self._is_run, prefixes, _SCAN_CONCURRENCY)
            found += [name for name, is_run in zip(names, are_runs, strict=True) if is_run]
            level = [
                prefix for prefix, is_run in zip(prefixes, are_runs, strict=True) if not is_run
            ]
        return found

    async def _subfolders(self, prefix: str) -> list[str]:
        inside = await folders(self._store, prefix)
        names = [f"{prefix}{folder}" for folder in inside if folder not in _RUN_FOLDERS]
        return [name for name in names if name not in self._entries]

    async def _is_run(self, prefix: str) -> bool:
        try:
            await self._store.get(f"{prefix}{RUN_KEY}")
        except ObjectNotFound:
            return False
        return True

    def _start_watching(self, name: str, stop: asyncio.Event) -> None:
        entry = self._entries[name] = _Entry(self._new_watcher(name))
        entry.task = asyncio.get_running_loop().create_task(self._watch(entry, name, stop))

    def _new_watcher(self, name: str) -> RunWatcher:
        store = StoreSubtree(self._store, name) if name else self._store
        server = self._hint_server if self._receives_hints else None
        return RunWatcher(
            store.url,
            store=store,
            interval_s=self._interval_s,
            timeouts=self._timeouts,
            now=self._now,
            writer=self._writer,
            take_over=self._take_over,
            lease_s=self._lease_s,
            inbox=server.address if server is not None else None,
            make_poller=self._make_poller(name),
        )

    async def _watch(self, entry: _Entry, name: str, stop: asyncio.Event) -> None:
        """Watch one run until stopped. Superseded: stop watching it."""
        while not stop.is_set():
            pause_s = _RETRY_S
            try:
                await entry.watcher.open()
                await entry.watcher.run(stop)
                pause_s = max(_RECHECK_S, len(self._entries) / 2)
                if entry.watcher.state is RunState.WAITING:  # it was removed, or replaced
                    pause_s = self._interval_s
            except Superseded:
                return
            except AlreadyCoordinated as error:
                entry.watcher.mark_unavailable(RunState.REFUSED, str(error))
                pause_s = min(max(error.free_in_s, 1.0), _RETRY_S)
            except (SmdistError, OSError) as error:
                entry.watcher.mark_unavailable(RunState.WAITING, str(error))
            except Exception as error:  # noqa: BLE001 - one run must not end the others
                detail = f"{type(error).__name__}: {error}"
                entry.watcher.mark_unavailable(RunState.FAILED, detail)
            await self._wait_for_more(entry, stop, pause_s)
            if entry.watcher.state in (RunState.FINISHED, RunState.FAILED) and not stop.is_set():
                await entry.watcher.close()
                entry.watcher = self._new_watcher(name)
        await entry.watcher.close()

    async def _wait_for_more(self, entry: _Entry, stop: asyncio.Event, pause_s: float) -> None:
        """Wait; for a finished run, until it is continued."""
        await entry.watcher.wait(stop, pause_s)
        while entry.watcher.state is RunState.FINISHED and not stop.is_set():
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
        if self._hint_server is not None:
            await self._hint_server.close()
        if self._owns_store:
            await self._store.close()

    # -- queries ---------------------------------------------------------------------------------

    def runs(self) -> dict[str, RunStatus]:
        """Return the status of each run by URL."""
        watchers = [entry.watcher for _, entry in sorted(self._entries.items())]
        return {watcher.url: watcher.queries.status() for watcher in watchers}

    def watcher(self, run: str = "") -> RunWatcher:
        """Return the watcher of a run, by URL, run id or name below the directory.

        "" names the only run. Raise NoSuchRun.
        """
        if not run and len(self._entries) == 1:
            return next(iter(self._entries.values())).watcher
        for name, entry in self._entries.items():
            if run and run.rstrip("/") in (name, entry.watcher.url, entry.watcher.run_id):
                return entry.watcher
        raise NoSuchRun(run or self.url)

    async def refreshed(self, run: str = "") -> RunWatcher:
        """Return the watcher of a run; check first whether a finished run was continued."""
        watcher = self.watcher(run)
        if watcher.state is RunState.FINISHED:
            with contextlib.suppress(SmdistError, OSError):
                if await watcher.refresh_if_finished():
                    watcher = await self._reopened(run, watcher)
        return watcher

    async def _reopened(self, run: str, watcher: RunWatcher) -> RunWatcher:
        """Wait until the run's task, which was woken up, opens the run again."""
        for _ in range(500):
            if self.watcher(run) is not watcher or watcher.state is not RunState.FINISHED:
                break
            await asyncio.sleep(0.01)
        return self.watcher(run)

    def _on_hint(self, hint: Hint) -> None:
        for entry in self._entries.values():
            if entry.watcher.run_id == hint.run_id:
                entry.watcher.hint(hint.worker, hint.attempt, hint.seq)
