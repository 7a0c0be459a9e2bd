"""How far the manifests of a rank were read."""

from __future__ import annotations

from dataclasses import dataclass, field

from smdist.coordination.view.run_view import RankView
from smdist.format.intervals import Intervals, Members, merge_intervals, subtract, to_intervals

__all__ = ["ReadCursor", "cursor_of"]


@dataclass
class ReadCursor:
    """How far the manifests of one rank in one attempt were read."""

    upto: int = 0  # every seq below was read
    beyond: set[int] = field(default_factory=set)
    final: bool = False
    session: str = ""  # whose they are, once that was read
    foreign: bool = False  # the session was of another run, and is read again
    merged: Intervals = ()  # behind `upto` and a gap: those that a snapshot holds

    @property
    def gaps(self) -> bool:
        return bool(self.beyond or self.merged)

    @property
    def ended(self) -> bool:
        return self.final and not self.gaps

    @property
    def next(self) -> int:
        """Behind all that was read."""
        last = self.merged[-1][1] if self.merged else self.upto
        return max(max(self.beyond, default=-1) + 1, last)

    def lacks(self, seq: int) -> bool:
        return seq >= self.upto and seq not in self.beyond and seq not in Members(self.merged)

    def lacked(self, spans: Intervals) -> Intervals:
        """Of those from `upto` on, what was not read."""
        return subtract(spans, merge_intervals((*self.merged, *to_intervals(self.beyond))))

    def saw(self, seq: int) -> None:
        self.beyond.add(seq)
        while self.upto in self.beyond or (self.merged and self.merged[0][0] <= self.upto):
            if self.upto in self.beyond:
                self.beyond.remove(self.upto)
                self.upto += 1
            else:
                self.upto, self.merged = max(self.upto, self.merged[0][1]), self.merged[1:]


def cursor_of(known: RankView) -> ReadCursor:
    whole = known.seen[:1] if known.seen and known.seen[0][0] == 0 else ()
    upto = whole[0][1] if whole else 0
    final = known.head is not None and known.head.state == "ended"
    recorded = known.session is not None and known.session.is_recorded
    session = known.session.session if known.session is not None and recorded else ""
    return ReadCursor(upto, set(), final, session, not recorded, known.seen[len(whole) :])
