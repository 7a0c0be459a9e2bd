"""Decide for how long a snapshot counts as all there is. Pure: the times are passed in.

A working coordinator moves the pointer soon after there is something new, and renews its lease when
there is not. A pointer that has just moved lacks no more than the last moments. One that stands still
means that nothing is new, or that its writer has died; then the ranks are read. How long it has stood
still is measured by the reader's clock. The pointer's own time counts only for the first look.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from smdist.coordination.service.leadership import LeaseRecord
from smdist.coordination.snapshot.head import Pointer

__all__ = [
    "PointerObservation",
    "RefreshDepth",
    "WriterState",
    "fresh_for_s",
    "stale_after_s",
    "writer_state",
]

RefreshDepth = Literal["opening", "following", "asked", "close", "sure"]
"""How closely a poll looks beyond a snapshot whose writer seems to be at work.

"opening": it has stood still: at the manifests. "following", which is repeated: the same, now and
then. "asked", by a person: the same, each time. "close": at the manifests in any case. "sure": at
all that the ranks say.
"""

WriterState = Literal["live", "idle", "gone"]
"""It has just moved; it stands still, and its writer may live; its writer has left or died."""

_INTERVALS, _MARGIN_S = 3.0, 1.0
_LEASE_S = 5.0  # of a coordinator that writes seldom, the lease is looked at more often


@dataclass
class PointerObservation:
    """When the pointer was seen to move. `now` is monotonic, `wall` the time of day."""

    place: tuple[int, int] | None = None
    _moved_at: float = 0.0
    _looked_at: float = float("-inf")

    def saw(self, pointer: Pointer, now: float, wall: float) -> None:
        place = (pointer.epoch, pointer.number)
        if place != self.place:
            # It moved after the last look. A clock that is far ahead of ours says nothing.
            self._moved_at = now - min(abs(wall - pointer.time), now - self._looked_at)
            self.place = place
        self._looked_at = now

    def age_s(self, now: float) -> float:
        return now - self._moved_at


def fresh_for_s(pointer: Pointer) -> float:
    """Return for how long after a move the pointer alone proves that its writer works."""
    return min(pointer.interval_s, _LEASE_S)


def stale_after_s(pointer: Pointer) -> float:
    """Return after how long without a move the manifests are read, whatever the lease says."""
    return _INTERVALS * pointer.interval_s + _MARGIN_S


def writer_state(
    pointer: Pointer, age_s: float, lease: LeaseRecord | None, wall: float
) -> WriterState:
    if lease is None or lease.released or abs(wall - lease.time) > lease.lease_s:
        return "gone"
    return "live" if age_s <= stale_after_s(pointer) else "idle"
