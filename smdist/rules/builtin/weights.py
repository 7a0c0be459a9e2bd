"""`WeightUpdateRatio`: how much weights change from one saved step to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from smdist.identity import ModeKeys
from smdist.rules.builtin.base import BuiltInRule, Judged, Place, number, resolve, where_text
from smdist.rules.builtin.closeness import pick
from smdist.rules.builtin.selection import chain, chosen, preferred

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smdist.rules.evidence import Evidence
    from smdist.rules.findings import Finding
    from smdist.tables.rows import Rows

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["WeightUpdateRatio"]

_ROUNDING = 1e-12  # of norms from rows, relative


def _least_change(part: Rows, order: Array) -> Array:
    """Return a lower bound of the norm of the difference of successive rows.

    Its square is that of the means plus that of the deviations from them. No element changes by more
    than the norm, and the sum of magnitudes by no more than the norm times the root of the count.
    """
    column = pick(part, order, ("count", "sum", "m2", "abs_sum", "min", "max"))
    root = np.sqrt(column["count"][1:])
    of_means = np.diff(column["sum"]) / root
    bounds = (
        np.hypot(of_means, np.diff(np.sqrt(column["m2"]))),
        np.abs(np.diff(column["abs_sum"])) / root,
        np.abs(np.diff(column["min"])),
        np.abs(np.diff(column["max"])),
    )
    return np.asarray(np.maximum.reduce(bounds))


@dataclass(frozen=True)
class WeightUpdateRatio(BuiltInRule):
    """Fires when |W - W'| / (|W'| + epsilon) is above `large_threshold` or below `small_threshold`.

    W' is the previous saved step; with `num_steps` only if it is at most so many steps back. Rows bound
    |W - W'|: it is at most |W| + |W'|, and at least what `_least_change` says. That decides most cases.
    """

    num_steps: int | None = None
    large_threshold: float = 10.0
    small_threshold: float = 1e-8
    epsilon: float = 1e-9
    advice: ClassVar[str] = "adapt the learning rate, or check that the optimizer has these weights"

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        """Return the weights with unusual updates, the earliest first."""

        def describe(judged: Judged, place: Place) -> tuple[str, float]:
            ratio = float(judged.values[place.row])
            above = ratio > self.large_threshold
            limit = self.large_threshold if above else self.small_threshold
            text = f"{where_text(judged.name, place)}: update ratio {number(ratio)}"
            return f"{text} is {'above' if above else 'below'} {number(limit)}", limit

        return self.conclude(
            self._judged(evidence),
            describe,
            missing="the collection weights at two steps that can be compared",
            needs="fingerprints, or raw weights at successive saved steps",
        )

    def _judged(self, evidence: Evidence) -> Iterator[Judged]:
        for name, everything in chosen(evidence.rows, ("weights",)):
            part = preferred(everything, (ModeKeys.TRAIN, ModeKeys.GLOBAL))
            yield self._judge(evidence, name, part)

    def _judge(self, evidence: Evidence, name: str, part: Rows) -> Judged:
        order, group = chain(part)
        norms = part.l2[order]
        steps = part["mode_step"][order]
        prints = pick(part, order, ("fingerprint", "has_fingerprint", "count"))
        n = len(part)
        fires, unknown = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        values = np.full(n, np.nan)
        pair = group[1:] == group[:-1]
        if self.num_steps is not None:
            pair &= steps[:-1] >= steps[1:] - self.num_steps
        now, before = norms[1:], norms[:-1]
        has, mark = prints["has_fingerprint"], prints["fingerprint"]
        with np.errstate(all="ignore"):
            base = before + self.epsilon
            low, high = _least_change(part, order) / base, (now + before) / base
            finite = pair & np.isfinite(low) & (prints["count"][1:] > 0)
            same = has[1:] & has[:-1] & (mark[1:] == mark[:-1])
            low, high = np.where(same, 0.0, low), np.where(same, 0.0, high)
            large = low > self.large_threshold * (1 + _ROUNDING) + _ROUNDING
            small = high < self.small_threshold
            normal = (low - _ROUNDING >= self.small_threshold) & (high <= self.large_threshold)
        fires[1:] = finite & (large | small)
        unknown[1:] = finite & ~large & ~small & ~normal
        values[1:] = low
        back = np.empty(n, np.int64)
        back[order] = np.arange(n)

        def decide(row: int) -> tuple[bool, float] | None:
            found = []
            for at in (row, int(order[back[row] - 1])):
                step, rank = int(part["mode_step"][at]), int(part["rank"][at])
                raw = evidence.raw(name, ModeKeys(int(part["mode"][at])), step, rank)
                if raw is None:
                    return None
                found.append(np.asarray(raw, np.float64).ravel())
            if found[0].shape != found[1].shape:
                return None
            change = float(np.linalg.norm(found[0] - found[1]))
            ratio = change / (float(np.linalg.norm(found[1])) + self.epsilon)
            return not self.small_threshold <= ratio <= self.large_threshold, ratio

        judged = Judged(name, part, fires[back], unknown[back], values[back], bool(finite.any()))
        return resolve(judged, decide)
