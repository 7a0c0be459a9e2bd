"""One run, watched: new facts are read and folded, snapshots written, questions answered.

Used on one event loop, in this order: `open` once, `turn` again and again (or `run`, which does
it), `close` last. Questions (`status`, `missing`, ...) may be asked at any time between. Nothing
here is needed to read a run: whoever is killed at any moment is replaced by another one, which
goes on from the newest snapshot, or from nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from smdist.coordination.membership import PATIENCE, Patience
from smdist.coordination.status import RunState, RunStatus, StepReport
from smdist.identity import ModeKeys
from smdist.storage.base import Store

__all__ = ["Watch", "Watcher"]

GLOBAL = ModeKeys.GLOBAL


class Watcher:
    def __init__(
        self,
        url: str,
        *,
        store: Store | None = None,
        interval_s: float = 1.0,
        patience: Patience = PATIENCE,
        now: Callable[[], float] = time.time,
        writer: str | None = None,
        take_over: bool = False,
    ) -> None:
        """`writer` names who may come back: a restart under the same name waits for no lease.

        Give an actor's id, which outlives its process; left out, every watcher is a stranger.
        """
        raise NotImplementedError

    async def open(self) -> None:
        """NoSuchRun: call again later. AlreadyCoordinated: another one holds the lease."""
        raise NotImplementedError

    async def turn(self) -> bool:
        """One look: read what is new, fold it, write a snapshot if one is due; whether one was.

        Never raises for what a store does. Superseded: this watcher writes no more.
        """
        raise NotImplementedError

    async def run(self, stop: asyncio.Event) -> None:
        """Turns until stopped, superseded (raises), or the run is finished and that is written."""
        raise NotImplementedError

    def hint(self, worker: str, attempt: int, seq: int) -> None:
        """That manifest is said to be there: look at the rank now."""
        raise NotImplementedError

    def status(self) -> RunStatus:
        raise NotImplementedError

    @property
    def state(self) -> RunState:
        raise NotImplementedError

    def latest_complete_step(self, mode: ModeKeys = GLOBAL) -> int:
        """-1 when there is none."""
        raise NotImplementedError

    def missing(self, step: int, mode: ModeKeys = GLOBAL) -> dict[int, str]:
        """Rank -> reason; empty when complete. StepUnavailable, StepNotYetAvailable."""
        raise NotImplementedError

    def step(self, step: int, mode: ModeKeys = GLOBAL) -> StepReport:
        raise NotImplementedError

    async def wait_for_step(
        self, step: int, mode: ModeKeys = GLOBAL, timeout_s: float = 60.0
    ) -> StepReport:
        """How the step stands once nothing more of it is expected: complete, partial, not saved.

        WaitTimeout names who is missing.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Hand back the lease. What was folded and not written yet is read again by the next."""
        raise NotImplementedError


class Watch:
    """The runs at or below a place: `url` is one, or holds some, found by their `run.json`."""

    def __init__(
        self,
        url: str,
        *,
        store: Store | None = None,
        interval_s: float = 1.0,
        patience: Patience = PATIENCE,
        now: Callable[[], float] = time.time,
        writer: str | None = None,
        take_over: bool = False,
    ) -> None:
        raise NotImplementedError

    async def run(self, stop: asyncio.Event) -> None:
        """Watch what is there and what comes, until stopped."""
        raise NotImplementedError

    def runs(self) -> dict[str, RunStatus]:
        """By URL."""
        raise NotImplementedError

    def watcher(self, run: str = "") -> Watcher:
        """The one of a run, by URL, run id or name below the prefix; "" when there is only one.

        NoSuchRun.
        """
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError
