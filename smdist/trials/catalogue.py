"""What a run holds, as of one moment: the pure side of a trial.

A `Catalogue` is immutable; `smdist.trials.advance` makes the next one. Every question a trial answers
without reading tensor data is answered here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from smdist.coordination.columnar.blocks import Blocks
from smdist.coordination.view.membership import (
    DEFAULT_TIMEOUTS,
    LivenessTimeouts,
    MissingReason,
    RankReport,
    RankStatus,
    StepFacts,
    missing_ranks,
    rank_reports,
)
from smdist.coordination.view.run_view import StepKey, View
from smdist.errors import StepNotYetAvailable, StepUnavailable
from smdist.format.block import checksum_seed
from smdist.format.intervals import Members
from smdist.format.layout import Layout, TensorEntry
from smdist.format.manifest import StepEntry
from smdist.identity import ModeKeys

__all__ = ["Catalogue", "LayoutIndex", "StepState", "TensorLocation"]

GLOBAL = ModeKeys.GLOBAL


class StepState(Enum):
    """UNAVAILABLE: not saved and never will be. AVAILABLE: all there, or no more of it can come."""

    UNAVAILABLE = 0
    AVAILABLE = 1
    NOT_YET_AVAILABLE = 2


class LayoutIndex:
    """A layout with its names looked up by dictionary."""

    __slots__ = ("layout", "positions")

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.positions = {tensor.name: place for place, tensor in enumerate(layout.tensors)}


class TensorLocation(NamedTuple):
    """Where a tensor of a step of a rank lies: `position` in `layout`, in the block of `entry`.

    `session` has written it, and no other.
    """

    rank: int
    session: str
    entry: StepEntry
    layout: Layout
    position: int

    @property
    def tensor(self) -> TensorEntry:
        return self.layout.tensors[self.position]

    @property
    def checksum_seed(self) -> int:
        return checksum_seed(self.session, self.entry)


@dataclass(frozen=True)
class Catalogue:
    """`attempt` None: of each step the newest attempt; `steps` holds that choice.

    `since`: when the run was begun; one whose first rank died at once is not waited for. `spoiled`
    are segments of which something could not be read.
    """

    attempt: int | None = None
    range_steps: tuple[int | None, int | None] = (None, None)
    timeouts: LivenessTimeouts = DEFAULT_TIMEOUTS
    view: View = field(default_factory=View)
    layouts: Mapping[str, LayoutIndex] = field(default_factory=dict)
    expected: Mapping[int, Members] = field(default_factory=dict)
    steps: Mapping[StepKey, StepFacts] = field(default_factory=dict)
    now: float = 0.0
    since: float = 0.0
    spoiled: frozenset[str] = frozenset()

    # -- steps -------------------------------------------------------------------------------

    @cached_property
    def by_number(self) -> dict[int, StepFacts]:
        """Return the steps by global number, in order.

        Two steps can claim one number when attempts or ranks interleaved their modes differently;
        the newer attempt, then the lower rank is followed. The other keeps its mode's number.
        """
        chosen: dict[int, StepFacts] = {}
        for facts in self.steps.values():
            other = chosen.get(facts.step)
            if other is None or _precedence(facts) < _precedence(other):
                chosen[facts.step] = facts
        return dict(sorted(chosen.items()))

    @cached_property
    def _mode_steps(self) -> dict[int, dict[int, StepFacts]]:
        found: dict[int, dict[int, StepFacts]] = {}
        for (mode, mode_step), facts in sorted(self.steps.items()):
            found.setdefault(mode, {})[mode_step] = facts
        return found

    def of_mode(self, mode: ModeKeys) -> Mapping[int, StepFacts]:
        """Return the steps by number as users of `mode` count, in order."""
        return self.by_number if mode is GLOBAL else self._mode_steps.get(mode.value, {})

    def step(self, number: int, mode: ModeKeys) -> StepFacts | None:
        return self.of_mode(mode).get(number)

    def require(self, number: int, mode: ModeKeys) -> StepFacts:
        """Return that step; raise StepUnavailable or StepNotYetAvailable if nothing of it is here."""
        facts = self.step(number, mode)
        if facts is not None:
            return facts
        if self.state(number, mode) is StepState.UNAVAILABLE:
            raise StepUnavailable(number, mode)
        raise StepNotYetAvailable(number, mode)

    @cached_property
    def last_complete_step(self) -> int:
        return max((facts.step for facts in self.steps.values() if facts.complete), default=-1)

    @cached_property
    def saved_modes(self) -> list[ModeKeys]:
        return [ModeKeys(mode) for mode in sorted(self._mode_steps)]

    # -- ranks -------------------------------------------------------------------------------

    @cached_property
    def attempts(self) -> tuple[int, ...]:
        known = sorted(self.view.attempts)
        return tuple(known if self.attempt is None else [a for a in known if a == self.attempt])

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that have started."""
        return tuple(sorted({rank for a in self.attempts for rank in self.view.attempts[a]}))

    @cached_property
    def _reports(self) -> dict[int, dict[int, RankReport]]:
        return {a: rank_reports(self.view, a, self.now, self.timeouts) for a in self.attempts}

    def reports(self, attempt: int) -> Mapping[int, RankReport]:
        return self._reports.get(attempt, {})

    @cached_property
    def finished(self) -> bool:
        """Return whether no rank may still write."""
        reports = [r for attempt in self._reports.values() for r in attempt.values()]
        if not reports:
            return self.now - self.since > self.timeouts.lost_after_s
        return not any(report.pending for report in reports)

    def missing(self, facts: StepFacts) -> dict[int, MissingReason]:
        return missing_ranks(self.view, facts, self.reports(facts.attempt))

    def may_still_write(self, facts: StepFacts, rank: int) -> bool:
        """Return whether `rank` may still add to that step."""
        return rank in facts.absent and self._awaited(facts, rank)

    def settled(self, facts: StepFacts) -> bool:
        pending = self._pending.get(facts.attempt, ())
        return facts.complete or not any(
            rank in facts.absent and self._awaited(facts, rank) for rank in pending
        )

    def _awaited(self, facts: StepFacts, rank: int) -> bool:
        reports = self.reports(facts.attempt)
        (reason,) = missing_ranks(self.view, facts, reports, (rank,)).values()
        waited_for = (MissingReason.LAGGING, MissingReason.NEVER_STARTED)
        return reports[rank].pending and reason in waited_for

    @cached_property
    def _pending(self) -> dict[int, list[int]]:
        """Return, by attempt, the ranks that may still write."""
        return {
            attempt: [rank for rank, report in reports.items() if report.pending]
            for attempt, reports in self._reports.items()
        }

    def state(self, number: int, mode: ModeKeys) -> StepState:
        facts = self.step(number, mode)
        if facts is not None:
            return StepState.AVAILABLE if self.settled(facts) else StepState.NOT_YET_AVAILABLE
        if mode is GLOBAL and not self.in_range(number):
            return StepState.UNAVAILABLE
        for attempt, reports in self._reports.items():
            known = self.view.attempts[attempt]
            for rank, report in reports.items():
                passed = known[rank].passed if report.status is not RankStatus.NEVER_STARTED else {}
                if report.pending and passed.get(mode.value, -1) <= number:
                    return StepState.NOT_YET_AVAILABLE
        started = bool(self._reports) or self.finished
        return StepState.UNAVAILABLE if started else StepState.NOT_YET_AVAILABLE

    def next_step(self, number: int, mode: ModeKeys) -> int | None:
        """Return the first saved step from `number` on."""
        steps = list(self.of_mode(mode))
        place = bisect_left(steps, number)
        return steps[place] if place < len(steps) else None

    def in_range(self, number: int) -> bool:
        first, end = self.range_steps
        return (first is None or number >= first) and (end is None or number < end)

    # -- tensors -----------------------------------------------------------------------------

    def names_of(self, facts: Iterable[StepFacts]) -> set[str]:
        digests = {digest for one in facts for digest in one.layouts}
        return {name for digest in digests for name in self._positions(digest)}

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(self.names_of(self.steps.values()))

    @cached_property
    def members(self) -> dict[str, set[str]]:
        """Return the names of the tensors that were saved as members, by collection."""
        found: dict[str, set[str]] = {}
        for digest in {digest for facts in self.steps.values() for digest in facts.layouts}:
            index = self.layouts.get(digest)
            for tensor in index.layout.tensors if index else ():
                for collection in tensor.collections:
                    found.setdefault(collection, set()).add(tensor.name)
        return found

    def _positions(self, digest: str) -> Mapping[str, int]:
        index = self.layouts.get(digest)
        return index.positions if index is not None else {}

    def unread(self, facts: StepFacts, rank: int | None = None) -> str:
        """Return an unreadable layout of the step, or of that rank's part; "" if there is none."""
        named: Iterable[str] = facts.layouts
        if rank is not None and any(digest not in self.layouts for digest in named):
            blocks = self.view.blocks(facts.attempt, rank, facts.key)
            named = [entry.layout for entry in blocks if entry.layout]
        return next((digest for digest in named if digest not in self.layouts), "")

    def damaged(self, facts: StepFacts) -> set[int]:
        """Return the ranks of which a layout or a segment of that step could not be read."""
        if not self.spoiled and facts.layouts <= self.layouts.keys():
            return set()
        return {
            rank
            for rank, blocks in self.view.step(facts.attempt, facts.key).items()
            for entry in blocks
            if entry.segment in self.spoiled or (entry.layout and entry.layout not in self.layouts)
        }

    def has(self, facts: StepFacts, name: str) -> bool:
        return any(name in self._positions(digest) for digest in facts.layouts)

    def find(self, facts: StepFacts, name: str, rank: int) -> TensorLocation | None:
        """Return the tensor as `rank` wrote it in that step; the newest if it wrote several."""
        if not self.has(facts, name):
            return None
        blocks = self.view.blocks(facts.attempt, rank, facts.key)
        return self._find(name, facts.attempt, rank, blocks)

    def _find(self, name: str, attempt: int, rank: int, blocks: Blocks) -> TensorLocation | None:
        for entry in reversed(blocks):
            if not entry.layout:
                continue
            position = self._positions(entry.layout).get(name)
            if position is not None:
                session = self.view.session(attempt, rank)
                return TensorLocation(
                    rank, session, entry, self.layouts[entry.layout].layout, position
                )
        return None

    def holders(self, facts: StepFacts, name: str) -> Iterator[TensorLocation]:
        """Yield the tensor of that step on every rank that has it, in order of rank."""
        yield from self.all_holders(facts, (name,))

    def all_holders(self, facts: StepFacts, names: Iterable[str]) -> Iterator[TensorLocation]:
        """Yield each tensor of `names`, in their order, on every rank that has it."""
        names = [name for name in names if self.has(facts, name)]
        if names:
            blocks = sorted(self.view.step(facts.attempt, facts.key).items())
            for name in names:
                for rank, of_rank in blocks:
                    found = self._find(name, facts.attempt, rank, of_rank)
                    if found is not None:
                        yield found

    def first_holder(self, facts: StepFacts, name: str) -> TensorLocation | None:
        if self.has(facts, name):
            for rank in facts.ranks:
                found = self.find(facts, name, rank)
                if found is not None:
                    return found
        return None


def _precedence(facts: StepFacts) -> tuple[int, int, StepKey]:
    return (-facts.attempt, next(iter(facts.ranks), 1 << 62), facts.key)
