"""Answer questions about a watched run: its state, who is missing, wait for a step.

Queries run on the event loop of the run's watcher, at any time between its polls. They see what the
last completed poll found. `WatchedRun` is what the watcher and its queries share.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from smdist.coordination.service.publisher import SnapshotPublisher
from smdist.coordination.service.run_follower import RunFollower
from smdist.coordination.view.describe import attempt_lines, latest_complete, rank_lines, waited_for
from smdist.coordination.view.run_view import View
from smdist.coordination.view.status import RunState, RunStatus, StepReport
from smdist.errors import CoordinationError, StepNotYetAvailable, StepUnavailable, WaitTimeout
from smdist.identity import ModeKeys

__all__ = ["RunQueries", "WatchedRun"]

GLOBAL = ModeKeys.GLOBAL
_MAX_TROUBLES = 20


@dataclass
class WatchedRun:
    """The state of one watched run. Only its watcher changes it."""

    url: str
    publisher: SnapshotPublisher
    follower: RunFollower
    run_id: str = ""
    state: RunState = RunState.WAITING
    detail: str = ""  # why it is in this state
    replaced: str = ""  # which run was here before
    trouble: str = ""  # why no snapshot can be written
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def set_state(self, state: RunState, detail: str = "") -> None:
        self.state, self.detail = state, detail
        self.notify()

    def notify(self) -> None:
        """Wake up everybody who waits for a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def changed(self) -> asyncio.Event:
        """Return the event of the next change. Get it before looking at the state."""
        return self._changed


class RunQueries:
    def __init__(self, run: WatchedRun, now: Callable[[], float]) -> None:
        self._run, self._now = run, now

    @property
    def view(self) -> View:
        """Return what is known now. Do not change it; the next poll may replace it."""
        return self._run.follower.view

    def latest_complete_step(self, mode: ModeKeys = GLOBAL) -> int:
        """Return the last step that is complete over all ranks, -1 if there is none."""
        return self._run.follower.index.latest_complete(mode)

    def step(self, step: int, mode: ModeKeys = GLOBAL) -> StepReport:
        """Return who has the step. Until the first poll, a step without any rank may still come."""
        follower = self._run.follower
        report = follower.index.report(follower.view, follower.reports(), step, mode)
        is_read = follower.polled or self._run.state is RunState.FINISHED
        if report.standing == "not saved" and not is_read:
            return StepReport(step, mode.name, "pending")
        return report

    def missing(self, step: int, mode: ModeKeys = GLOBAL) -> dict[int, str]:
        """Return rank -> reason for each rank that lacks the step; empty if it is complete.

        Raise StepUnavailable if no rank saved it, StepNotYetAvailable if it may still come.
        """
        report = self.step(step, mode)
        if report.attempt < 0:
            known = report.standing == "not saved"
            raise (StepUnavailable if known else StepNotYetAvailable)(step, mode)
        return report.missing

    async def wait_for_step(
        self, step: int, mode: ModeKeys = GLOBAL, timeout_s: float = 60.0
    ) -> StepReport:
        """Wait until nothing more is expected of the step: complete, partial or not saved.

        Raise WaitTimeout, which names the missing ranks, or CoordinationError if the run is not
        watched any more.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            changed = self._run.changed()
            report = self.step(step, mode)
            if report.standing != "pending":
                return report
            if self._run.state.is_final:
                raise CoordinationError(
                    f"{self._run.url} is not watched any more: {self._run.detail}"
                )
            left_s = deadline - loop.time()
            if left_s <= 0:
                latest = self.latest_complete_step(mode)
                raise WaitTimeout(f"{self._run.url}: {waited_for(report, latest)}")
            # Time alone changes the answer too: a silent rank becomes lost.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), min(left_s, 1.0))

    def status(self) -> RunStatus:
        """Return ranks, steps and troubles as of now."""
        run, follower, publisher = self._run, self._run.follower, self._run.publisher
        reports, pointer, index = follower.reports(), publisher.pointer, follower.index
        # Before the first poll nothing is known, which differs from nothing being there.
        opening = run.state is RunState.WATCHING and not follower.polled
        troubles = [text for text in (run.replaced, follower.trouble, run.trouble) if text]
        troubles += list(follower.poller.troubles.values())[:_MAX_TROUBLES]
        return RunStatus(
            url=run.url,
            run_id=run.run_id,
            state=RunState.OPENING if opening else run.state,
            detail=run.detail,
            time=self._now(),
            writer=publisher.writer,
            epoch=pointer.epoch if pointer else 0,
            number=pointer.number if pointer else 0,
            snapshot_time=pointer.time if pointer else 0.0,
            final=publisher.final,
            attempts=attempt_lines(follower.view, reports),
            ranks=rank_lines(reports),
            latest_complete=latest_complete(index),
            last_step=index.last_step,
            steps=len(index),
            complete_steps=index.complete,
            manifests=follower.manifests_read,
            hints=follower.poller.hints,
            troubles=tuple(troubles),
        )
