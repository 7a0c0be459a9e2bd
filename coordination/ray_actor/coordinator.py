"""The coordinator as a Ray actor: a thin shell over `DirectoryWatcher`, which does the work.

The actor is detached, named, and restarted without limit. Its constructor runs again after its process
or node has died and starts watching without any call of a driver: the store holds all there is to know.
Ray repeats calls that were running then, so every method may be repeated.

Text, numbers and JSON of `smdist.coordination.view.status` cross process borders, so that a driver and
an actor of different versions understand each other. Errors are those of `smdist.errors`. `launcher`
makes an actor of the class.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import msgspec

import smdist
from smdist.coordination.service.directory_watcher import DirectoryWatcher
from smdist.coordination.service.run_follower import MakePoller
from smdist.coordination.service.run_queries import RunQueries
from smdist.coordination.service.run_watcher import RunWatcher
from smdist.coordination.service.sharding import Shard, ShardedPoller
from smdist.coordination.service.store_poller import StorePoller
from smdist.coordination.view.membership import DEFAULT_TIMEOUTS, LivenessTimeouts
from smdist.errors import ConfigurationError, CoordinationError, NoSuchRun
from smdist.identity import ModeKeys
from smdist.storage.s3.options import parse_s3_url
from smdist.storage.urls import is_remote, open_store

__all__ = [
    "NAMESPACE",
    "Coordinator",
    "CoordinatorInfo",
    "Settings",
    "ShardActor",
    "actor_name",
    "canonical_url",
    "check_watch_url",
]

NAMESPACE = "smdist"
# Increase it when methods or their arguments change in a way that older callers do not know.
PROTOCOL = 1
_REQUEST_S = 10.0
_FIRST_READ_S = 30.0  # how long a query waits for a run that was not read yet


class Settings(msgspec.Struct, frozen=True):
    """What a coordinator is started with."""

    watch: str
    interval_s: float = 1.0
    lost_after_s: float = DEFAULT_TIMEOUTS.lost_after_s
    lagging_after_s: float = DEFAULT_TIMEOUTS.lagging_after_s
    take_over: bool = False
    inbox: bool = True  # uploaders that can reach the actor's node send hints
    shards: int = 1  # processes that read ranks; with 1 the actor reads them itself
    lease_s: float = 30.0  # after it died with its Ray, another one may write after so long

    def __post_init__(self) -> None:
        for name in ("interval_s", "lost_after_s", "lagging_after_s", "lease_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} must be greater than 0")
        if self.shards < 1:
            raise ConfigurationError("shards must be at least 1")


class CoordinatorInfo(msgspec.Struct, frozen=True):
    """The process that answers; another one after a restart."""

    name: str
    settings: Settings
    version: str
    host: str
    pid: int
    node: str
    since: float
    stopped: bool
    trouble: str = ""  # why it does not watch, or finds no runs
    looked: bool = True  # runs were listed at least once


def canonical_url(url: str) -> str:
    """Return the one spelling of a URL; a path becomes absolute, because an actor runs elsewhere.

    Raise ConfigurationError if it is no URL.
    """
    if not is_remote(url):
        return open_store(url).url
    location, (_, mark, query) = parse_s3_url(url), url.partition("?")
    place = "/".join(part for part in (location.bucket, location.prefix) if part)
    return f"s3://{place}{mark}{query}"


def check_watch_url(url: str) -> str:
    """Return `canonical_url(url)`. Raise ConfigurationError if no run can be there."""
    found = canonical_url(url)
    if not is_remote(found) and os.path.exists(found) and not os.path.isdir(found):
        raise ConfigurationError(f"{found} is a file. Watch a run, or a directory of runs.")
    return found


def actor_name(url: str) -> str:
    """Return the actor's name: one coordinator per URL and protocol."""
    digest = hashlib.sha256(canonical_url(url).encode()).hexdigest()
    return f"coordinator-v{PROTOCOL}-{digest[:12]}"


class ShardActor:
    """A share of the ranks, read in a process of its own that belongs to the coordinator's."""

    def __init__(self, index: int, of: int, watch: str) -> None:
        self._shard = Shard(index, of, open_store(watch, deadline_s=_REQUEST_S, concurrency=64))

    async def poll(self, request: bytes) -> bytes:
        return await self._shard.poll(request)


class Coordinator:
    """Methods take a run as URL, id or name below the watched URL; "" is the only run."""

    def __init__(self, settings: bytes) -> None:
        """Start watching. Runs on the actor's event loop, once in each of its processes."""
        ray: Any = import_module("ray")  # not needed to name the class or to check settings
        context = ray.get_runtime_context()
        chosen = self._settings = msgspec.json.decode(settings, type=Settings)
        self._node = context.get_node_id()
        self._since = time.time()
        self._trouble = ""
        self._stop = asyncio.Event()
        self._watcher = DirectoryWatcher(
            chosen.watch,
            interval_s=chosen.interval_s,
            timeouts=LivenessTimeouts(chosen.lost_after_s, chosen.lagging_after_s),
            writer=f"actor {context.get_actor_id()}",  # the same after a restart
            # Only at the first start: a coordinator that took over since did so on purpose.
            take_over=chosen.take_over and not context.was_current_actor_reconstructed,
            lease_s=chosen.lease_s,
            make_poller=self._poller_factory(ray, chosen),
            hint_host=ray.util.get_node_ip_address() if chosen.inbox else None,
        )
        self._running = asyncio.get_running_loop().create_task(self._run())

    def _poller_factory(self, ray: Any, chosen: Settings) -> Callable[[str], MakePoller]:
        """Return what reads runs: this process, or shard actors that live and die with it."""
        if chosen.shards == 1:
            return lambda _: StorePoller
        make = ray.remote(ShardActor).options(
            num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy="SPREAD"
        )
        self._shards = [make.remote(i, chosen.shards, chosen.watch) for i in range(chosen.shards)]
        calls = [shard.poll.remote for shard in self._shards]
        return lambda run: partial(ShardedPoller, run=run, calls=calls)

    async def _run(self) -> None:
        try:
            await self._watcher.run(self._stop)
        except Exception as error:
            self._trouble = f"{type(error).__name__}: {error}"
            raise
        finally:
            await self._watcher.close()

    async def info(self) -> bytes:
        """Return JSON of a CoordinatorInfo."""
        return msgspec.json.encode(
            CoordinatorInfo(
                actor_name(self._settings.watch),
                self._settings,
                smdist.__version__,
                socket.gethostname(),
                os.getpid(),
                self._node,
                self._since,
                self._stop.is_set(),
                self._trouble or self._watcher.trouble,
                self._watcher.scanned,
            )
        )

    async def runs(self) -> bytes:
        """Return JSON: URL -> RunStatus."""
        return msgspec.json.encode(self._watcher.runs())

    async def status(self, run: str = "") -> bytes:
        """Return JSON of a RunStatus."""
        return msgspec.json.encode((await self._find(run)).queries.status())

    async def latest_complete_step(self, run: str = "", mode: str = "GLOBAL") -> int:
        return (await self._queries(run)).latest_complete_step(ModeKeys[mode])

    async def missing(self, step: int, run: str = "", mode: str = "GLOBAL") -> dict[int, str]:
        return (await self._queries(run)).missing(step, ModeKeys[mode])

    async def wait_for_step(
        self, step: int, run: str = "", mode: str = "GLOBAL", timeout_s: float = 60.0
    ) -> bytes:
        """Return JSON of a StepReport. Raise WaitTimeout."""
        watcher = await self._find(run)  # a coordinator that stands by may take over meanwhile
        report = await watcher.queries.wait_for_step(step, ModeKeys[mode], timeout_s=timeout_s)
        return msgspec.json.encode(report)

    async def stop(self) -> None:
        """Stop watching; return when the lease is released. The caller ends the process."""
        self._stop.set()
        with contextlib.suppress(Exception):  # info() reports it
            await asyncio.shield(self._running)

    async def _queries(self, run: str) -> RunQueries:
        """Return the queries of a run. Raise if another coordinator has it: ours would be stale."""
        watcher = await self._find(run)
        if not watcher.state.serves_queries:
            detail = watcher.queries.status().detail
            raise CoordinationError(f"{watcher.url}: {detail}. Ask that one, or open a trial.")
        return watcher.queries

    async def _find(self, run: str) -> RunWatcher:
        """Return the watcher of a run, after waiting until a new run was read once."""
        deadline = time.monotonic() + _FIRST_READ_S
        while True:
            may_wait = time.monotonic() < deadline and not self._running.done()
            try:
                watcher = await self._watcher.refreshed(run)
                status = watcher.queries.status()
                if not may_wait or not watcher.state.is_starting or status.detail:
                    return watcher
            except NoSuchRun:
                if self._watcher.scanned or not may_wait:
                    raise
            await asyncio.sleep(0.02)
