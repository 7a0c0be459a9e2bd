"""Merge a run once, without staying: what a coordinator does, for runs that nobody watches.

By the uploader that ends last, so that a finished run opens with a handful of requests, and by
`smdist merge`. Rights and rules are a coordinator's (`tenure`): of several that merge at the same
moment one writes, and none writes beside a coordinator that is at work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from smdist.coordination.service.poll_schedule import PollIntervals, RankTrack
from smdist.coordination.service.run_watcher import RunWatcher
from smdist.coordination.service.store_poller import StorePoller
from smdist.coordination.view.membership import finished
from smdist.coordination.view.run_view import Fact
from smdist.coordination.view.status import RunStatus
from smdist.errors import CoordinationError, SmdistError
from smdist.storage.store import Store

__all__ = ["MergeResult", "merge_once"]

_AT_ONCE = 32


class MergeResult(NamedTuple):
    """`written` False: the newest snapshot says it all already."""

    written: bool
    status: RunStatus


async def merge_once(
    store: Store, *, concurrency: int = _AT_ONCE, take_over: bool = False
) -> MergeResult:
    """Write one snapshot of the run in `store` as it is now. The store stays the caller's.

    AlreadyCoordinated: a coordinator is at work, or another one merges. Superseded: it was taken
    over meanwhile. NoSuchRun, StoreError, OSError.
    """
    watcher = _Once(
        store.url,
        store=store,
        interval_s=0.0,
        take_over=take_over,
        follow=partial(_quick, concurrency),
    )
    try:
        await watcher.open()
        written = await watcher.poll_once()
        if watcher.error is not None:
            raise watcher.error
        return MergeResult(written, watcher.status())
    finally:
        await watcher.close()


class _Once(RunWatcher):
    """One turn of it: reads all there is, then writes one snapshot."""

    error: SmdistError | OSError | None = None

    async def _is_same(self) -> bool:
        return True  # it was opened a moment ago

    async def _poll(self) -> None:
        known = -1
        while known < self._manifests:
            known = self._manifests
            try:
                await super()._poll()  # at least once: it folds what was found on opening, too
            except (SmdistError, OSError) as error:
                self.error = error
                raise
            if self._follow.settled:
                return

    def _has_ended(self) -> bool:
        """Nobody waits here for a failed job to be started again: who reads finds out by itself."""
        follow = self._follow
        over = follow.settled and self._all_said()
        return over and finished(self._view, self._now(), self._patience, follow.hearing())

    async def _write(self) -> bool:
        if self._tenure.pointer is not None and not self._facts and not self._has_ended():
            return False
        try:
            if self._follow.failing:
                raise CoordinationError(f"{self.url} cannot be read: {self._first_trouble()}")
            return await super()._write()
        except (SmdistError, OSError) as error:
            self.error = error
            raise

    def _first_trouble(self) -> str:
        return next(iter(self._follow.troubles.values()), "it gives no answer")


class _Quick(StorePoller):
    """Asks for all that can be asked for, whatever its time; not how the ended lived to the last."""

    @property
    def settled(self) -> bool:
        tracks = self.tracks.values()
        said = bool(tracks) and all(track.final for track in tracks)
        return said and self._looked and not self._wanted

    def _beat_due(self, track: RankTrack, now: float) -> bool:
        return not track.final and super()._beat_due(track, now)

    def _stuck(self, track: RankTrack) -> bool:
        """Nobody waits here for a rank to be silent: what lies behind a gap is asked for at once."""
        return not track.final and (track.seek_s == 0.0 or self.now() >= track.seek_due_at)


def _quick(
    concurrency: int,
    store: Store,
    take: Callable[[Fact], None],
    now: Callable[[], float],
    rhythm: PollIntervals,
) -> StorePoller:
    at_once = PollIntervals(interval_s=0.0, beat_s=0.0, discover_s=0.0, seek_s=rhythm.seek_s)
    return _Quick(store, take, now, at_once, concurrency)
