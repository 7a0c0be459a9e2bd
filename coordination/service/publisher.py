"""Write snapshots of a run while holding its lease, and remove those that were replaced.

One owner (`RunWatcher`, `merge_once`), one event loop: `read_pointer`, then `acquire` once, then
`publish_if_due` and `renew` as often as needed, `release` last. Raises AlreadyCoordinated from
`acquire` and Superseded from the others, after which nothing may be written. StoreError and OSError:
try again later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from smdist.coordination.service.leadership import PublishIntervals, snapshot_due
from smdist.coordination.service.lease import Lease
from smdist.coordination.service.run_follower import RunFollower
from smdist.coordination.service.snapshot_cleanup import SnapshotCleaner
from smdist.coordination.snapshot.pack import PackedSnapshot, Pointer, compact_view, pack
from smdist.coordination.view.run_view import View
from smdist.errors import SmdistError
from smdist.storage.store import Store

if TYPE_CHECKING:
    from smdist.coordination.service.hint_server import InboxAddress

__all__ = ["SnapshotPublisher"]


class SnapshotPublisher:
    """The writer of one run's snapshots. `inbox`: where uploaders may send hints, if anywhere."""

    def __init__(
        self,
        store: Store,
        *,
        owner: str | None,
        now: Callable[[], float],
        intervals: PublishIntervals,
        keep_s: float,
        inbox: InboxAddress | None,
    ) -> None:
        self.intervals = intervals
        self.final = False  # the newest snapshot says that the run has ended
        self._store, self._now, self._keep_s, self._inbox = store, now, keep_s, inbox
        self._lease = Lease(store, owner=owner, now=now, intervals=intervals)
        self.reset()

    def reset(self) -> None:
        """Forget all snapshots: another run took the place of the one before."""
        self._cleaner = SnapshotCleaner(self._store, self._now, self._keep_s)
        self._packed: PackedSnapshot | None = None
        self._written_at: float | None = None
        self.final = False

    @property
    def pointer(self) -> Pointer | None:
        """Return the newest known snapshot."""
        return self._lease.pointer

    @property
    def writer(self) -> str:
        return self._lease.writer

    async def read_pointer(self) -> Pointer | None:
        return await self._lease.read_pointer()

    async def acquire(self, *, take_over: bool) -> None:
        await self._lease.acquire(take_over=take_over)

    async def renew(self) -> None:
        await self._lease.renew()

    async def begin(self, follower: RunFollower) -> None:
        """Schedule old snapshots for removal and publish the inbox. Both are optional."""
        with contextlib.suppress(SmdistError, OSError):
            await self._cleaner.adopt_existing(self.pointer, follower.chunk_keys())
            if self._inbox is not None:
                await self._inbox.publish(self._store, self._lease.epoch, self._now())

    async def begin_finished(self, follower: RunFollower) -> None:
        """Note that the newest snapshot is the last one, and remove those before it."""
        self.final = True
        with contextlib.suppress(SmdistError, OSError):
            await self._cleaner.adopt_existing(self.pointer, follower.chunk_keys())
            await self.clean_up()

    async def clean_up(self) -> None:
        """Remove old snapshots of a run that has ended. Call it again later: some may be too new."""
        await self._cleaner.run_finished()

    def compact(self, view: View) -> View:
        """Return `view` with its step entries in columns, which take a tenth of the memory."""
        lease = self._lease
        return compact_view(
            view, epoch=lease.epoch, number=lease.next_number(), writer=lease.writer
        )

    async def publish_if_due(self, run_id: str, follower: RunFollower) -> bool:
        """Write a snapshot if it is time, else keep the lease; return whether one was written."""
        pending, now = follower.pending(), self._now()
        if not snapshot_due(pending, self._written_at, now, self.intervals):
            await self._lease.renew()
            return False
        lease = self._lease
        packed = pack(
            follower.view,
            self._packed,
            run_id=run_id,
            epoch=lease.epoch,
            number=lease.next_number(),
            writer=lease.writer,
            now=now,
            interval_s=self.intervals.interval_s,
            final=pending.final,
            layouts=follower.poller.layouts,
        )
        await lease.publish(packed)
        self._packed, self._written_at, self.final = packed, now, pending.final
        follower.published(packed.view)
        await self._cleaner.published(packed)
        if self.final:
            await self.clean_up()
            with contextlib.suppress(SmdistError, OSError):
                await self.release()
        return True

    async def release(self) -> None:
        """Give back the lease, so that the next coordinator need not wait for its end."""
        if self._inbox is not None:
            await self._inbox.withdraw(self._store)
        if self._lease.epoch:
            await self._lease.release()
