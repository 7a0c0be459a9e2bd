"""How far the manifests of a rank were read: a pure value that readers of a run keep for each rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from smdist.coordination.view.run_view import RankView
from smdist.format.intervals import Intervals, Members, merge_intervals, subtract, to_intervals

__all__ = ["ReadCursor"]


@dataclass
class ReadCursor:
    """How far the manifests of one rank in one attempt were read."""

    upto: int = 0  # every seq below was read
    beyond: set[int] = field(default_factory=set)  # read, behind a gap
    final: bool = False
    session: str = ""  # id of the session that wrote them, once that was read
    foreign: bool = False  # the session was of another run, and is read again
    merged: Intervals = ()  # behind a gap, and held by a snapshot

    @classmethod
    def of(cls, known: RankView) -> ReadCursor:
        """Return the cursor behind the manifests that are in a view."""
        whole = known.seen[:1] if known.seen and known.seen[0][0] == 0 else ()
        upto = whole[0][1] if whole else 0
        final = known.head is not None and known.head.state == "ended"
        recorded = known.session is not None and known.session.is_recorded
        session = known.session.session if known.session is not None and recorded else ""
        return cls(upto, set(), final, session, not recorded, known.seen[len(whole) :])

    @property
    def has_gaps(self) -> bool:
        return bool(self.beyond or self.merged)

    @property
    def ended(self) -> bool:
        return self.final and not self.has_gaps

    @property
    def next(self) -> int:
        """Return the number behind all that were read."""
        last = self.merged[-1][1] if self.merged else self.upto
        return max(max(self.beyond, default=-1) + 1, last)

    def lacks(self, seq: int) -> bool:
        return seq >= self.upto and seq not in self.beyond and seq not in Members(self.merged)

    def unread(self, spans: Intervals) -> Intervals:
        """Return the numbers of `spans`, all from `upto` on, that were not read."""
        return subtract(spans, merge_intervals((*self.merged, *to_intervals(self.beyond))))

    def mark_read(self, seq: int) -> None:
        self.beyond.add(seq)
        while self.upto in self.beyond or (self.merged and self.merged[0][0] <= self.upto):
            if self.upto in self.beyond:
                self.beyond.remove(self.upto)
                self.upto += 1
            else:
                self.upto, self.merged = max(self.upto, self.merged[0][1]), self.merged[1:]
