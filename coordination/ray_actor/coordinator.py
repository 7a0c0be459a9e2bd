"""The coordinator as a Ray actor: a thin shell over `DirectoryWatcher`, which does the work.

Detached, named, restarted for ever. Its constructor runs again after its process, or its node, has
died, and starts watching by itself: no call of a driver is needed for that, and the store holds
all there is to know. Ray repeats calls that were under way then, so every method may be repeated.

What crosses process borders is text, numbers and JSON of `smdist.coordination.view.status`, so that a
driver and an actor of different versions understand each other; errors are those of
`smdist.errors`. `launcher` makes an actor of the class.
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
from typing import TYPE_CHECKING, Any

import msgspec

import smdist
from smdist.coordination.service.directory_watcher import DirectoryWatcher
from smdist.coordination.service.run_watcher import MakePoller
from smdist.coordination.service.sharding import Shard, ShardedPoller
from smdist.coordination.service.store_poller import StorePoller
from smdist.coordination.view.membership import DEFAULT_TIMEOUTS, LivenessTimeouts
from smdist.errors import ConfigurationError, CoordinationError, NoSuchRun
from smdist.identity import ModeKeys
from smdist.storage.s3.options import parse_s3_url
from smdist.storage.urls import is_remote, open_store

if TYPE_CHECKING:
    from smdist.coordination.service.directory_watcher import RunWatcher

__all__ = [
    "NAMESPACE",
    "Coordinator",
    "CoordinatorInfo",
    "Settings",
    "ShardActor",
    "actor_name",
    "canonical_url",
    "check_place",
]

NAMESPACE = "smdist"
# Grows when methods or what they take change in a way that an older caller cannot know.
PROTOCOL = 1
_REQUEST_S = 10.0
_SETTLE_S = 30.0  # how long a question waits for a run that was not read yet


class Settings(msgspec.Struct, frozen=True):
    watch: str
    interval_s: float = 1.0
    lost_after_s: float = DEFAULT_TIMEOUTS.lost_after_s
    lagging_after_s: float = DEFAULT_TIMEOUTS.lagging_after_s
    take_over: bool = False
    inbox: bool = True  # uploaders that can reach the actor's node tell it what they have written
    shards: int = 1  # processes that read for it; one: it reads itself
    lease_s: float = 30.0  # so long after it died with its Ray, another one may write

    def __post_init__(self) -> None:
        for name in ("interval_s", "lost_after_s", "lagging_after_s", "lease_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} must be greater than 0")
        if self.shards < 1:
            raise ConfigurationError("shards must be at least 1")


class CoordinatorInfo(msgspec.Struct, frozen=True):
    """Of the process that answers; another one after a restart."""

    name: str
    settings: Settings
    version: str
    host: str
    pid: int
    node: str
    since: float
    stopped: bool
    trouble: str = ""  # why it does not watch, or finds no runs
    looked: bool = True  # for runs, at least once


def canonical_url(url: str) -> str:
    """One spelling for a place; a path becomes absolute, as an actor has another current folder.

    ConfigurationError when it is none.
    """
    if not is_remote(url):
        return open_store(url).url
    location, (_, mark, query) = parse_s3_url(url), url.partition("?")
    place = "/".join(part for part in (location.bucket, location.prefix) if part)
    return f"s3://{place}{mark}{query}"


def check_place(url: str) -> str:
    """Its one spelling; ConfigurationError when no run can be there, as far as is seen from here."""
    found = canonical_url(url)
    if not is_remote(found) and os.path.exists(found) and not os.path.isdir(found):
        raise ConfigurationError(f"{found} is a file: watch a run, or a directory that holds some")
    return found


def actor_name(url: str) -> str:
    """One coordinator per place and protocol."""
    summed = hashlib.sha256(canonical_url(url).encode()).hexdigest()
    return f"coordinator-v{PROTOCOL}-{summed[:12]}"


class ShardActor:
    """A share of the ranks, in a process of its own; owned by the coordinator's."""

    def __init__(self, index: int, of: int, watch: str) -> None:
        self._shard = Shard(index, of, open_store(watch, deadline_s=_REQUEST_S, concurrency=64))

    async def poll(self, asked: bytes) -> bytes:
        return await self._shard.poll(asked)


class Coordinator:
    """Methods take a run as URL, id or name below the watched place; "" is the only one."""

    def __init__(self, settings: bytes) -> None:
        """Runs on the actor's event loop, once in each of its processes."""
        ray: Any = import_module("ray")  # not needed to name the class or to check settings
        context = ray.get_runtime_context()
        chosen = self._settings = msgspec.json.decode(settings, type=Settings)
        self._node = context.get_node_id()
        self._since = time.time()
        self._trouble = ""
        self._stop = asyncio.Event()
        self._watch = DirectoryWatcher(
            chosen.watch,
            interval_s=chosen.interval_s,
            patience=LivenessTimeouts(chosen.lost_after_s, chosen.lagging_after_s),
            writer=f"actor {context.get_actor_id()}",  # the same after a restart
            # Once: whoever has taken over from us in the meantime was told to.
            take_over=chosen.take_over and not context.was_current_actor_reconstructed,
            lease_s=chosen.lease_s,
            follow=self._share(ray, chosen),
            inbox_host=ray.util.get_node_ip_address() if chosen.inbox else None,
        )
        self._running = asyncio.get_running_loop().create_task(self._run())

    def _share(self, ray: Any, chosen: Settings) -> Callable[[str], MakePoller]:
        """What reads for the watchers: this process, or others that live and die with it."""
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
            await self._watch.run(self._stop)
        except Exception as error:
            self._trouble = f"{type(error).__name__}: {error}"
            raise
        finally:
            await self._watch.close()

    async def info(self) -> bytes:
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
                self._trouble or self._watch.trouble,
                self._watch.looked,
            )
        )

    async def runs(self) -> bytes:
        """JSON: URL -> RunStatus."""
        return msgspec.json.encode(self._watch.runs())

    async def status(self, run: str = "") -> bytes:
        return msgspec.json.encode((await self._watcher(run)).status())

    async def latest_complete_step(self, run: str = "", mode: str = "GLOBAL") -> int:
        return (await self._answering(run)).latest_complete_step(ModeKeys[mode])

    async def missing(self, step: int, run: str = "", mode: str = "GLOBAL") -> dict[int, str]:
        return (await self._answering(run)).missing(step, ModeKeys[mode])

    async def wait_for_step(
        self, step: int, run: str = "", mode: str = "GLOBAL", timeout_s: float = 60.0
    ) -> bytes:
        """JSON of a StepReport; WaitTimeout."""
        watcher = await self._watcher(run)  # one that stands by may get its turn meanwhile
        return msgspec.json.encode(
            await watcher.wait_for_step(step, ModeKeys[mode], timeout_s=timeout_s)
        )

    async def stop(self) -> None:
        """Returns when the lease is handed back. The process is the caller's to end."""
        self._stop.set()
        with contextlib.suppress(Exception):  # info() tells it
            await asyncio.shield(self._running)

    async def _answering(self, run: str) -> RunWatcher:
        """What one that another coordinator has shut out last knew is no answer."""
        watcher = await self._watcher(run)
        if watcher.state in ("refused", "superseded"):
            detail = watcher.status().detail
            raise CoordinationError(f"{watcher.url}: {detail}; ask that one, or open a trial")
        return watcher

    async def _watcher(self, run: str) -> RunWatcher:
        """Of a run that was just found, or resumed, nothing is known until it has been read."""
        deadline = time.monotonic() + _SETTLE_S
        while True:
            waiting = time.monotonic() < deadline and not self._running.done()
            try:
                watcher = await self._watch.refreshed(run)
                if not waiting or _was_read(watcher):
                    return watcher
            except NoSuchRun:
                if self._watch.looked or not waiting:
                    raise
            await asyncio.sleep(0.02)


def _was_read(watcher: RunWatcher) -> bool:
    """Or it is known why not."""
    return watcher.state not in ("waiting", "opening") or bool(watcher.status().detail)
