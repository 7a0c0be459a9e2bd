"""Rules on values that do not change: between steps, or between runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from smdist.identity import ModeKeys
from smdist.rules.builtin.base import BuiltInRule, Judged, Place, number, resolve, where_text
from smdist.rules.builtin.closeness import Tolerance, pick
from smdist.rules.builtin.selection import chain, chosen, newest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smdist.rules.evidence import Evidence
    from smdist.rules.findings import Finding
    from smdist.tables.rows import Rows

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["SimilarAcrossRuns", "UnchangedTensor"]


@dataclass(frozen=True)
class UnchangedTensor(BuiltInRule):
    """Fires when the last `num_steps` saved values of a tensor are close to the newest of them."""

    collection_names: tuple[str, ...] | None = None
    tensor_regex: str | None = None
    num_steps: int = 3
    rtol: float = 1e-5
    atol: float = 1e-8
    equal_nan: bool = False
    advice: ClassVar[str] = (
        "check that the tensor is trained: optimizer, requires_grad, learning rate"
    )

    def check(self) -> None:
        """Require a selection and at least two steps."""
        if not self.collection_names and not self.tensor_regex:
            raise self.refuse("give collection_names or tensor_regex")
        if self.num_steps < 2:
            raise self.refuse(f"num_steps is {self.num_steps}; give at least 2")

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        """Return the tensors that stopped changing, the earliest first."""

        def describe(judged: Judged, place: Place) -> tuple[str, float]:
            text = f"{where_text(judged.name, place)}: unchanged over {self.num_steps} saved steps"
            return text, float(self.num_steps)

        return self.conclude(
            self._judged(evidence),
            describe,
            missing="a collection_names or tensor_regex that matches saved tensors",
            needs="fingerprints, or raw values of the tensors",
        )

    def _judged(self, evidence: Evidence) -> Iterator[Judged]:
        tolerance = Tolerance(self.rtol, self.atol, self.equal_nan)
        for name, part in chosen(evidence.rows, self.collection_names, self.tensor_regex):
            order, group = chain(part)
            columns = pick(part, order)
            n = len(part)
            fires = np.zeros(n, np.bool_)
            fires[self.num_steps - 1 :] = (
                group[self.num_steps - 1 :] == group[: max(n - self.num_steps + 1, 0)]
            )
            changed = ~fires
            for lag in range(1, self.num_steps):
                older = {key: array[:-lag] for key, array in columns.items()}
                newer = {key: array[lag:] for key, array in columns.items()}
                equal, differ = tolerance.compare(older, newer)
                fires[lag:] &= equal
                changed[lag:] |= differ
            back = np.empty(n, np.int64)
            back[order] = np.arange(n)
            judged = Judged(
                name,
                part,
                fires[back],
                (~fires & ~changed)[back],
                np.full(n, float(self.num_steps)),
            )
            yield resolve(judged, self._decider(evidence, name, part, order, back, tolerance))

    def _decider(
        self,
        evidence: Evidence,
        name: str,
        part: Rows,
        order: Array,
        back: Array,
        tolerance: Tolerance,
    ) -> Any:
        def decide(row: int) -> tuple[bool, float] | None:
            place = int(back[row])
            last = _raw(evidence, name, part, row)
            if last is None:
                return None
            known = True
            for lag in range(1, self.num_steps):
                older = _raw(evidence, name, part, int(order[place - lag]))
                if older is None:
                    known = False
                elif not tolerance.close(older, last):
                    return False, 0.0
            return (True, float(self.num_steps)) if known else None

        return decide


def _raw(evidence: Evidence, name: str, part: Rows, row: int) -> Array | None:
    mode = ModeKeys(int(part["mode"][row]))
    return evidence.raw(name, mode, int(part["mode_step"][row]), int(part["rank"][row]))


@dataclass(frozen=True)
class SimilarAcrossRuns(BuiltInRule):
    """Fires when a tensor differs from that of another run at the same step and rank.

    The other runs come as `Evidence.others`; `other_trials` names them for whoever opens them.
    """

    other_trials: tuple[str, ...] | None = None
    other_trial: str | None = None  # the older name
    collection_names: tuple[str, ...] | None = None
    tensor_regex: str | None = None
    rtol: float = 1e-5
    atol: float = 1e-8
    advice: ClassVar[str] = (
        "compare seeds, data order and versions of both runs; see the first step"
    )

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        """Return the tensors that differ, the earliest first."""
        if not evidence.others:
            needs = "other_trials: the location of another run"
            return self.undecided(needs, "there is no other run to compare with")

        def describe(judged: Judged, place: Place) -> tuple[str, float]:
            text = f"{where_text(judged.name, place)}: differs from the other run"
            apart = judged.values[place.row]
            if np.isfinite(apart):
                text += f"; the means are {number(apart)} apart"
            return text, self.rtol

        missing = "tensors that both runs saved at the same step and rank"
        only_here: list[str] = []
        answers = self.conclude(
            self._judged(evidence, only_here),
            describe,
            missing=missing,
            needs="fingerprints, or raw values of the tensors in both runs",
        )
        if only_here and answers[0].verdict.value == "QUIET":
            text = f"{answers[0].message}; {len(only_here)} have rows in one run only"
            return self.quiet(f"{text}, such as {only_here[0]}")
        return answers

    def _judged(self, evidence: Evidence, only_here: list[str]) -> Iterator[Judged]:
        for other in evidence.others:
            theirs = dict(chosen(other.rows, self.collection_names, self.tensor_regex))
            mine = dict(chosen(evidence.rows, self.collection_names, self.tensor_regex))
            only_here.extend(sorted(mine.keys() ^ theirs.keys()))
            for name in mine.keys() & theirs.keys():
                found = self._compare(evidence, other, name, mine[name], theirs[name])
                if found is None:
                    only_here.append(name)
                else:
                    yield found

    def _compare(
        self, evidence: Evidence, other: Evidence, name: str, mine: Rows, theirs: Rows
    ) -> Judged | None:
        tolerance = Tolerance(self.rtol, self.atol, equal_nan=True)
        at_mine, at_theirs = _partners(mine, theirs)
        if not len(at_mine):
            return None
        a, b = pick(mine, at_mine), pick(theirs, at_theirs)
        equal, differ = tolerance.compare(a, b)
        part = mine.where(at_mine)
        with np.errstate(all="ignore"):
            values = np.abs(a["sum"] - b["sum"]) / a["count"]

        def decide(row: int) -> tuple[bool, float] | None:
            first = _raw(evidence, name, part, row)
            second = None if first is None else _raw(other, name, part, row)
            if first is None or second is None:
                return None
            return not tolerance.close(first, second), float(values[row])

        return resolve(Judged(name, part, differ, ~equal & ~differ, values), decide)


def _partners(mine: Rows, theirs: Rows) -> tuple[Array, Array]:
    """Return the rows of the same mode, step and rank, of the newest attempt, of both."""
    own, other = newest(mine), newest(theirs)
    ranks = 1 + max(int(side["rank"].max(initial=0)) for side in (mine, theirs))

    def keys(side: Rows, at: Array) -> Array:
        steps = side["mode_step"][at] * 8 + side["mode"][at]
        return np.asarray(steps * ranks + side["rank"][at])

    _, first, second = np.intersect1d(
        keys(mine, own), keys(theirs, other), assume_unique=True, return_indices=True
    )
    order = np.argsort(own[first], kind="stable")
    return own[first][order], other[second][order]
