"""`PoorWeightInitialization`: what the first saved steps say about the first weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from smdist.identity import ModeKeys
from smdist.rules.builtin.base import BuiltInRule, Judged, Place, number, resolve, where_text
from smdist.rules.builtin.losses import stale_steps
from smdist.rules.builtin.selection import chosen, preferred
from smdist.rules.builtin.series import series_of
from smdist.rules.findings import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smdist.rules.evidence import Evidence
    from smdist.rules.findings import Finding
    from smdist.tables.rows import Rows

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["PoorWeightInitialization"]

_MODES = (ModeKeys.TRAIN, ModeKeys.GLOBAL)
_LEAST = 1e-12  # variances below count as this


@dataclass(frozen=True)
class PoorWeightInitialization(BuiltInRule):
    """Fires on any of three signs in the first `steps` saved steps of training.

    Variances of activation inputs differ by more than `threshold` times between layers; the middle
    90 % of a gradient span less than `distribution_range`; or, at the end, the loss has not been below
    its best for `patience` saved steps.
    """

    activation_inputs_regex: str = ".*relu_input"
    threshold: float = 10.0
    distribution_range: float = 0.001
    patience: int = 5
    steps: int = 10
    advice: ClassVar[str] = (
        "use an initialisation made for the activation (He, Xavier); check its gain"
    )

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        """Return the signs that hold; QUIET only if all three could be looked at."""
        answers = [*self._variances(evidence), *self._gradients(evidence), *self._loss(evidence)]
        found = [each for each in answers if each.verdict is Verdict.FIRES]
        if found:
            return sorted(found, key=lambda each: each.first_step or 0)
        unsure = [each for each in answers if each.verdict is Verdict.UNDECIDED]
        if unsure:
            needs = "; ".join(dict.fromkeys(each.needs or "" for each in unsure))
            return self.undecided(needs, f"{len(unsure)} of 3 signs cannot be looked at")
        return self.quiet(f"the first {self.steps} saved steps show no sign of it")

    def _window(self, part: Rows) -> Rows:
        """Return the rows of the first saved steps of training."""
        rows = preferred(part, _MODES)
        saved = np.unique(rows["mode_step"])[: self.steps]
        return rows.where(rows["mode_step"] <= saved[-1]) if len(saved) else rows

    def _variances(self, evidence: Evidence) -> list[Finding]:
        parts = [
            (name, rows.where((rows["count"] > 0) & np.isfinite(rows["m2"])))
            for name, part in chosen(evidence.rows, None, self.activation_inputs_regex)
            for rows in [self._window(part)]
        ]
        parts = [(name, part) for name, part in parts if len(part)]
        if not parts:
            needs = "inputs of activations that match activation_inputs_regex"
            return self.undecided(needs, "no inputs of activations")
        keys = [
            np.concatenate([part[key] for _, part in parts])
            for key in ("rank", "mode_step", "mode", "step", "attempt")
        ]
        variance = np.concatenate([part["m2"] / part["count"] for _, part in parts])
        tensor = np.repeat(np.arange(len(parts)), [len(part) for _, part in parts])
        order = np.lexsort([variance, *keys])
        keys, variance, tensor = [key[order] for key in keys], variance[order], tensor[order]
        begins = np.append(True, np.logical_or.reduce([key[1:] != key[:-1] for key in keys]))
        starts = np.flatnonzero(begins)
        ends = np.append(starts[1:], len(variance)) - 1
        ratios = variance[ends] / np.maximum(variance[starts], _LEAST)
        over = np.flatnonzero(ratios > self.threshold)
        if not len(over):
            return self.quiet("variances are alike")
        first = int(over[0])
        at = ends[first]
        _, mode_step, mode, step, attempt = (int(key[at]) for key in keys)
        together = [each for each in over.tolist() if all(k[ends[each]] == k[at] for k in keys[1:])]
        ranks = tuple(int(keys[0][ends[each]]) for each in together)
        place = Place(first, attempt, ModeKeys(mode), mode_step, step, 0, ranks)
        high, low = (parts[int(tensor[each])][0] for each in (at, starts[first]))
        value = float(ratios[first])
        text = f"{where_text(high, place)}: variance is {number(value)} times that of {low}"
        return [self.fires(text, place=place, tensor=high, value=value, threshold=self.threshold)]

    def _gradients(self, evidence: Evidence) -> list[Finding]:
        def describe(judged: Judged, place: Place) -> tuple[str, float]:
            span = number(judged.values[place.row])
            text = f"{where_text(judged.name, place)}: the gradient spans only {span}"
            return text, self.distribution_range

        return self.conclude(
            self._spans(evidence),
            describe,
            missing="the collection gradients",
            needs="raw values of gradients at the first steps, for their quantiles",
        )

    def _spans(self, evidence: Evidence) -> Iterator[Judged]:
        for name, part in chosen(evidence.rows, ("gradients",)):
            rows = self._window(part)
            valid = (rows["count"] > 0) & (rows["nans"] == 0)
            with np.errstate(all="ignore"):
                span = rows["max"] - rows["min"]
            narrow = valid & (span < self.distribution_range)
            judged = Judged(name, rows, narrow, valid & ~narrow, span, bool(valid.any()))

            def decide(row: int, name: str = name, rows: Rows = rows) -> tuple[bool, float] | None:
                mode, step = ModeKeys(int(rows["mode"][row])), int(rows["mode_step"][row])
                raw = evidence.raw(name, mode, step, int(rows["rank"][row]))
                if raw is None or not raw.size:
                    return None
                low, high = np.quantile(np.asarray(raw, np.float64), [0.05, 0.95])
                return bool(high - low < self.distribution_range), float(high - low)

            yield resolve(judged, decide)

    def _loss(self, evidence: Evidence) -> list[Finding]:
        found, complete, seen = [], 0, 0
        for name, part in chosen(evidence.rows, ("losses",)):
            series = series_of(self._window(part))
            seen += 1
            if len(series) < self.steps and not (evidence.ended and len(series) > self.patience):
                continue
            complete += 1
            stale = int(stale_steps(series.values, 0.0)[-1])
            if stale >= self.patience:
                place = series.place(len(series) - 1)
                text = f"{where_text(name, place)}: not below its best for {stale} saved steps"
                limit = float(self.patience)
                found.append(
                    self.fires(text, place=place, tensor=name, value=float(stale), threshold=limit)
                )
        if found:
            return found
        if not complete:
            needs = f"losses of the first {self.steps} saved steps"
            return self.undecided(needs, "too few losses")
        return self.quiet(f"{seen} losses decrease")
