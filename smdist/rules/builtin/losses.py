"""Rules on losses over steps. A loss is the mean over the ranks of its step."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from smdist.identity import ModeKeys
from smdist.rules.builtin.base import BuiltInRule, number, where_text
from smdist.rules.builtin.selection import chosen, in_mode, preferred
from smdist.rules.builtin.series import Series, series_of

if TYPE_CHECKING:
    from smdist.rules.evidence import Evidence
    from smdist.rules.findings import Finding
    from smdist.tables.rows import Rows

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["LossNotDecreasing", "Overfit", "Overtraining", "stale_steps"]

_LOSSES = ("losses",)
_PHASE = re.compile(r"^(train|validation|valid|eval|test)-")  # metrics of XGBoost


@dataclass(frozen=True)
class LossNotDecreasing(BuiltInRule):
    """Fires when a loss has hardly decreased, or has increased, over `num_steps` steps."""

    collection_names: tuple[str, ...] | None = None
    tensor_regex: str | None = None
    use_losses_collection: bool = True
    num_steps: int = 10
    diff_percent: float = 0.1
    increase_threshold_percent: float = 5.0
    mode: ModeKeys | None = None
    advice: ClassVar[str] = "check the learning rate, the data and the labels"

    def check(self) -> None:
        """Require a distance and a selection."""
        if self.num_steps < 1:
            raise self.refuse(f"num_steps is {self.num_steps}; give at least 1")
        if not (self.use_losses_collection or self.collection_names or self.tensor_regex):
            raise self.refuse("give collection_names or tensor_regex, or use_losses_collection")

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        """Return the losses that do not decrease, each at its first step."""
        names = (*(self.collection_names or ()), *(_LOSSES if self.use_losses_collection else ()))
        found, checks, seen = [], 0, 0
        for name, part in chosen(evidence.rows, names, self.tensor_regex):
            rows = self._in_mode(part)
            if not len(rows):
                continue
            seen += 1
            series = series_of(rows, by_global_step=self.mode is ModeKeys.GLOBAL)
            finding, checked = self._follow(name, rows, series)
            checks += checked
            if finding is not None:
                found.append(finding)
        if found:
            return sorted(found, key=lambda finding: finding.first_step or 0)
        if not seen:
            needs = "the collection losses, or a tensor_regex that matches losses or metrics"
            return self.undecided(needs, "no loss was saved")
        if not checks:
            needs = f"losses at steps at least {self.num_steps} apart"
            return self.undecided(needs, "the saved losses are too few to compare")
        return self.quiet(f"{seen} losses decrease; compared {checks} times")

    def _in_mode(self, part: Rows) -> Rows:
        if self.mode is None:
            return preferred(part, (ModeKeys.EVAL, ModeKeys.TRAIN, ModeKeys.GLOBAL))
        return part if self.mode is ModeKeys.GLOBAL else in_mode(part, self.mode)

    def _follow(self, name: str, rows: Rows, series: Series) -> tuple[Finding | None, int]:
        """Return the first finding of one loss and how often it was compared."""
        bad = np.flatnonzero(~np.isfinite(series.values))
        end = int(bad[0]) if len(bad) else len(series)
        steps, values = series.steps, series.values
        last, checks = 0, 0
        while len(series):
            at = int(np.searchsorted(steps, steps[last] + self.num_steps))
            if at >= end:
                break
            before = int(np.searchsorted(steps, steps[at] - self.num_steps, side="right")) - 1
            checks += 1
            last = at
            old, new = float(values[before]), float(values[at])
            drop = 100.0 * (old - new) / abs(old) if old else _from_zero(new)
            if self._holds(drop):
                place = series.place(at)
                text = f"{where_text(name, place)}: {number(new)} after {number(old)}"
                text += f" at step {int(series.mode_steps[before])}"
                limit = -self.increase_threshold_percent if drop < 0 else self.diff_percent
                finding = self.fires(text, place=place, tensor=name, value=drop, threshold=limit)
                return finding, checks
        if not len(bad):
            return None, checks
        at_step = rows["mode_step"] == series.mode_steps[end]
        at_step &= rows["mode"] == series.modes[end]
        ranks = rows["rank"][at_step & ~np.isfinite(rows["sum"])]
        place = series.place(end, tuple(sorted({int(rank) for rank in ranks})))
        text = f"{where_text(name, place)}: the loss is not finite"
        finding = self.fires(text, place=place, tensor=name, value=float(values[end]))
        return finding, checks

    def _holds(self, drop: float) -> bool:
        if drop < 0 and -drop > self.increase_threshold_percent:
            return True
        return 0 <= drop < self.diff_percent or (self.diff_percent == 0 and drop <= 0)


def _from_zero(new: float) -> float:
    return 0.0 if new == 0 else float(np.copysign(np.inf, -new))


def _phases(evidence: Evidence, regex: str | None) -> dict[str, dict[ModeKeys, tuple[str, Series]]]:
    """Return the series of TRAIN and EVAL of each loss; metrics of XGBoost say theirs in the name."""
    found: dict[str, dict[ModeKeys, tuple[str, Series]]] = {}
    for name, part in chosen(evidence.rows, None if regex else _LOSSES, regex):
        told = _PHASE.match(name)
        if told is not None:
            mode = ModeKeys.TRAIN if told[1] == "train" else ModeKeys.EVAL
            series = series_of(part, by_global_step=True)
            found.setdefault(name[told.end() :], {})[mode] = (name, series)
            continue
        training = (
            ModeKeys.TRAIN if (part["mode"] == ModeKeys.TRAIN.value).any() else ModeKeys.GLOBAL
        )
        for mode, own in ((ModeKeys.TRAIN, training), (ModeKeys.EVAL, ModeKeys.EVAL)):
            rows = in_mode(part, own)
            if len(rows):
                series = series_of(rows, by_global_step=True)
                found.setdefault(name, {})[mode] = (name, series)
    return found


@dataclass(frozen=True)
class Overfit(BuiltInRule):
    """Fires when the validation loss stays above the training loss for `patience` evaluations.

    Each evaluation is compared with the training since the evaluation before it.
    """

    tensor_regex: str | None = None
    start_step: int = 0
    patience: int = 1
    ratio_threshold: float = 0.1
    advice: ClassVar[str] = "stop earlier, add regularisation or data"

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        """Return the losses that show overfitting, each at its first evaluation."""
        found, compared = [], 0
        for phases in _phases(evidence, self.tensor_regex).values():
            if len(phases) < 2:
                continue
            name, evaluated = phases[ModeKeys.EVAL]
            _, trained = phases[ModeKeys.TRAIN]
            ratios, ends = _ratios(trained, evaluated)
            later = evaluated.steps[ends] >= self.start_step
            ratios, ends = ratios[later], ends[later]
            compared += len(ratios)
            at = _first_run(ratios > self.ratio_threshold, max(self.patience, 1))
            if at is None:
                continue
            place, ratio = evaluated.place(int(ends[at])), float(ratios[at])
            text = f"{where_text(name, place)}: validation loss is {number(100 * ratio)} % above"
            found.append(
                self.fires(
                    f"{text} the training loss",
                    place=place,
                    tensor=name,
                    value=ratio,
                    threshold=self.ratio_threshold,
                )
            )
        if found:
            return sorted(found, key=lambda finding: finding.first_step or 0)
        if not compared:
            needs = "losses of TRAIN and of EVAL, or metrics train-* and validation-*"
            return self.undecided(needs, "there is no evaluation to compare with training")
        return self.quiet(f"{compared} evaluations are close enough to training")


def _ratios(trained: Series, evaluated: Series) -> tuple[Array, Array]:
    """Return (validation - training) / |training| of each block of evaluation, and its last step."""
    steps = np.concatenate([trained.steps, evaluated.steps])
    values = np.concatenate([trained.values, evaluated.values])
    phase = np.repeat([0, 1], [len(trained), len(evaluated)])
    own = np.concatenate([np.arange(len(trained)), np.arange(len(evaluated))])
    order = np.lexsort([phase, steps])  # training first where both have the same step
    values, phase, own = values[order], phase[order], own[order]
    starts = np.flatnonzero(np.append(True, phase[1:] != phase[:-1]))
    lengths = np.diff(np.append(starts, len(phase)))
    with np.errstate(all="ignore"):
        means = np.add.reduceat(values, starts) / lengths
        blocks = np.flatnonzero(phase[starts] == 1)
        blocks = blocks[blocks > 0]
        before = means[blocks - 1]
        ratios = (means[blocks] - before) / np.abs(before)
    return ratios, own[starts[blocks] + lengths[blocks] - 1]


def _first_run(holds: Array, length: int) -> int | None:
    """Return where `length` successive truths are complete for the first time."""
    run = 0
    for at, each in enumerate(holds.tolist()):
        run = run + 1 if each else 0
        if run == length:
            return at
    return None


def stale_steps(values: Array, delta: float) -> Array:
    """Return, for each step, how many steps ago a loss was last lower than its best by `delta`."""
    best, since, found = np.inf, 0, []
    for value in values.tolist():
        since += 1
        if value < best - delta:
            best, since = value, 0
        found.append(since)
    return np.array(found, np.int64)


@dataclass(frozen=True)
class Overtraining(BuiltInRule):
    """Fires when neither the training nor the validation loss has improved for its patience."""

    patience_train: int = 5
    patience_validation: int = 10
    delta: float = 0.01
    advice: ClassVar[str] = "stop the job, or lower the learning rate"

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        """Return the losses that no longer improve, each at its first step."""
        found, enough = [], 0
        for phases in _phases(evidence, None).values():
            if ModeKeys.TRAIN not in phases:
                continue
            name, trained = phases[ModeKeys.TRAIN]
            enough += len(trained) > self.patience_train
            at = self._first(trained, phases[ModeKeys.EVAL][1] if len(phases) > 1 else None)
            if at is None:
                continue
            place = trained.place(at)
            stale = int(stale_steps(trained.values, self.delta)[at])
            text = f"{where_text(name, place)}: no improvement for {stale} saved steps"
            limit = float(self.patience_train)
            found.append(
                self.fires(text, place=place, tensor=name, value=float(stale), threshold=limit)
            )
        if found:
            return sorted(found, key=lambda finding: finding.first_step or 0)
        if not enough:
            needs = f"training losses at more than {self.patience_train} steps"
            return self.undecided(needs, "there are too few training losses")
        return self.quiet("training or validation still improves")

    def _first(self, trained: Series, evaluated: Series | None) -> int | None:
        """Return the first step of training at which both are stale."""
        holds = stale_steps(trained.values, self.delta) >= self.patience_train
        if evaluated is not None and len(evaluated):
            stale = stale_steps(evaluated.values, self.delta) >= self.patience_validation
            known = np.searchsorted(evaluated.steps, trained.steps, side="right") - 1
            holds &= np.where(known >= 0, stale[known], False)
            if stale[-1] and not holds.any() and len(trained):
                # The last evaluation comes after the last training step.
                last = len(trained) - 1
                holds[last] = stale_steps(trained.values, self.delta)[last] >= self.patience_train
        at = np.flatnonzero(holds)
        return int(at[0]) if len(at) else None
