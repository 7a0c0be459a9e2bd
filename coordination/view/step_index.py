"""The steps of a run over all attempts, kept up to date as facts come in. Pure.

Used by the coordinator. `update` looks again only at the steps that new facts touch. Of each step the
index holds the newest attempt, as a trial shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from smdist.coordination.view.membership import (
    MissingReason,
    RankReport,
    RankStatus,
    StepFacts,
    all_step_facts,
    expected_ranks,
    missing_ranks,
    progress_of_lost_ranks,
)
from smdist.coordination.view.run_view import StepKey, View
from smdist.coordination.view.status import StepReport
from smdist.coordination.view.step_facts import damaged_steps, mark_superseded, may_be_superseded
from smdist.format.intervals import Members
from smdist.identity import ModeKeys

__all__ = ["StepIndex"]

GLOBAL = ModeKeys.GLOBAL
_WAITED_FOR = (MissingReason.LAGGING, MissingReason.NEVER_STARTED)

Reports = Mapping[int, Mapping[int, RankReport]]
"""Attempt -> rank -> how it stands."""


class StepIndex:
    def __init__(self) -> None:
        self._facts: dict[StepKey, StepFacts] = {}
        self._numbers: dict[int, set[StepKey]] = {}
        self._latest: dict[int, int] = {}
        self._keys: dict[int, set[StepKey]] = {}  # by attempt: to look again when its world grows
        self._expected: dict[int, Members] = {}
        # By attempt and rank: steps that nobody planned after those lack it.
        self._lost_at: dict[int, dict[int, dict[int, int]]] = {}
        self._doubted: dict[int, bool] = {}
        self._damaged: dict[int, dict[StepKey, set[int]]] = {}
        # A thousand ranks of a thousand steps: the same few sets of ranks, again and again.
        self._shared: dict[Members, Members] = {}
        self.complete = 0

    def __len__(self) -> int:
        return len(self._facts)

    @property
    def last_step(self) -> int:
        return max(self._numbers, default=-1)

    @property
    def modes(self) -> list[ModeKeys]:
        return [ModeKeys(mode) for mode in sorted({mode for mode, _ in self._facts})]

    def layouts(self) -> set[str]:
        return {digest for facts in self._facts.values() for digest in facts.layouts}

    def update(self, view: View, touched: Mapping[int, Iterable[StepKey]]) -> None:
        """Look again at `touched`: by attempt, the steps of which `view` has new facts."""
        for attempt in sorted({*touched, *self._expected}):
            keys = set(touched.get(attempt, ()))
            own = self._keys.setdefault(attempt, set())
            own |= keys
            expected = expected_ranks(view, attempt)
            if expected != self._expected.get(attempt):
                self._expected[attempt] = expected
                keys = set(own)
            if self._lost(view, attempt) or self._doubt(view, attempt):
                keys = set(own)
            keys |= self._damage(view, attempt)
            if keys:
                self._judge(view, attempt, keys)

    def load(self, view: View) -> None:
        """Fill an empty index with all that `view` knows."""
        for attempt in sorted(view.attempts):
            self._expected[attempt] = expected_ranks(view, attempt)
            self._lost(view, attempt)
            self._judge(view, attempt, None)

    def _lost(self, view: View, attempt: int) -> bool:
        """Return whether the lost ranks, or how far they came, changed since the last call."""
        found = progress_of_lost_ranks(view, attempt, self._expected[attempt])
        now = {rank: dict(passed) for rank, passed in found.items()}
        before, self._lost_at[attempt] = self._lost_at.get(attempt, {}), now
        return now != before

    def _doubt(self, view: View, attempt: int) -> bool:
        """Return whether the attempt has become superseded, or no longer is, since the last call."""
        before = self._doubted.get(attempt, False)
        self._doubted[attempt] = may_be_superseded(view, attempt)
        return self._doubted[attempt] != before

    def _damage(self, view: View, attempt: int) -> set[StepKey]:
        """Return the steps of which the damage has changed since the last call."""
        before, now = self._damaged.get(attempt, {}), damaged_steps(view, attempt)
        self._damaged[attempt] = now
        return {key for key in {*before, *now} if before.get(key) != now.get(key)}

    def _judge(self, view: View, attempt: int, keys: set[StepKey] | None) -> None:
        found = all_step_facts(view, attempt, self._expected[attempt], keys)
        self._keys.setdefault(attempt, set()).update(found)
        found = mark_superseded(view, attempt, self._expected[attempt], found)
        for key, facts in found.items():
            old = self._facts.get(key)
            if old is None or old.attempt <= attempt:
                self._set(key, old, facts)

    def _set(self, key: StepKey, old: StepFacts | None, new: StepFacts) -> None:
        share = self._shared.setdefault
        new = new._replace(ranks=share(new.ranks, new.ranks), absent=share(new.absent, new.absent))
        if old is not None and old.step != new.step:
            self._numbers[old.step].discard(key)
            if not self._numbers[old.step]:
                del self._numbers[old.step]
        self._numbers.setdefault(new.step, set()).add(key)
        self._facts[key] = new
        was = old is not None and old.complete
        self.complete += new.complete - was
        for mode, number in ((key[0], _number(new)), (GLOBAL.value, new.step)):
            if new.complete:
                self._latest[mode] = max(self._latest.get(mode, -1), number)
        if old is not None and was and (not new.complete or old.step != new.step):
            self._look_again()

    def _look_again(self) -> None:
        self._latest.clear()
        for (mode, _), facts in self._facts.items():
            if facts.complete:
                for where, number in ((mode, _number(facts)), (GLOBAL.value, facts.step)):
                    self._latest[where] = max(self._latest.get(where, -1), number)

    # -- questions -------------------------------------------------------------------------------

    def latest_complete(self, mode: ModeKeys = GLOBAL) -> int:
        return self._latest.get(mode.value, -1)

    def find(self, number: int, mode: ModeKeys = GLOBAL) -> StepFacts | None:
        """Return the step that a user of `mode` calls `number`."""
        if mode is not GLOBAL:
            return self._facts.get((mode.value, number))
        found = [self._facts[key] for key in self._numbers.get(number, ())]
        # Several when attempts or ranks interleaved their modes differently.
        return min(found, key=_precedence, default=None)

    def report(self, view: View, reports: Reports, number: int, mode: ModeKeys) -> StepReport:
        facts = self.find(number, mode)
        if facts is None:
            pending = _may_come(view, reports, number, mode)
            return StepReport(number, mode.name, "pending" if pending else "not saved")
        of_ranks = reports[facts.attempt]
        missing = missing_ranks(view, facts, of_ranks)
        awaited = [r for r, why in missing.items() if of_ranks[r].pending and why in _WAITED_FOR]
        return StepReport(
            number,
            mode.name,
            "complete" if not missing else "pending" if awaited else "partial",
            facts.attempt,
            {rank: str(reason) for rank, reason in missing.items()},
        )


def _may_come(view: View, reports: Reports, number: int, mode: ModeKeys) -> bool:
    """Return whether a rank that may still write has not passed that step."""
    for attempt, of_ranks in reports.items():
        known = view.attempts.get(attempt, {})
        for rank, report in of_ranks.items():
            started = report.status is not RankStatus.NEVER_STARTED
            passed = known[rank].passed.get(mode.value, -1) if started else -1
            if report.pending and passed <= number:
                return True
    return not reports


def _number(facts: StepFacts) -> int:
    mode, mode_step = facts.key
    return facts.step if mode == GLOBAL.value else mode_step


def _precedence(facts: StepFacts) -> tuple[int, int, StepKey]:
    return (-facts.attempt, next(iter(facts.ranks), 1 << 62), facts.key)
