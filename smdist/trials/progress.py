"""How far the manifests of a rank were read."""

from __future__ import annotations

from dataclasses import dataclass, field

from smdist.coordination.merge import RankView

__all__ = ["Progress", "progress_of"]


@dataclass
class Progress:
    """How far the manifests of one rank in one attempt were read."""

    upto: int = 0  # every seq below was read
    beyond: set[int] = field(default_factory=set)
    final: bool = False
    session: str = ""  # whose they are, once that was read

    @property
    def ended(self) -> bool:
        return self.final and not self.beyond

    @property
    def next(self) -> int:
        """Behind all that was read."""
        return max(self.beyond, default=self.upto - 1) + 1

    def lacks(self, seq: int) -> bool:
        return seq >= self.upto and seq not in self.beyond

    def saw(self, seq: int) -> None:
        self.beyond.add(seq)
        while self.upto in self.beyond:
            self.beyond.remove(self.upto)
            self.upto += 1


def progress_of(known: RankView) -> Progress:
    seen = known.seen
    upto = seen[0][1] if seen and seen[0][0] == 0 else 0
    beyond = {seq for start, stop in seen if start >= upto for seq in range(start, stop)}
    final = known.head is not None and known.head.state == "ended"
    session = known.session.session if known.session is not None else ""
    return Progress(upto, beyond, final, session)
