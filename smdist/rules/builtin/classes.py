"""Rules on labels and predictions. They read raw values, which are small."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from smdist.identity import ModeKeys
from smdist.rules.builtin.base import MISSES, BuiltInRule, Place, number, where_text
from smdist.rules.builtin.selection import chosen, newest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smdist.rules.evidence import Evidence
    from smdist.rules.findings import Finding
    from smdist.tables.rows import Rows

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["ClassImbalance", "Confusion"]

_NEEDS = "raw values of labels and predictions, of equal length, at the same steps"


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Labels and predictions of all ranks at one step, as class ids; None: not all were there."""

    place: Place
    pairs: tuple[Array, Array] | None


def _batches(
    evidence: Evidence, labels: tuple[str, Rows], predictions: tuple[str, Rows], *, argmax: bool
) -> Iterator[_Batch]:
    """Yield the steps that have both, in their order. Ends after many steps without raw values."""
    name, part = labels
    at = newest(part)
    at = at[np.lexsort([part["rank"][at], part["mode"][at], part["step"][at]])]
    other = predictions[1]
    present = frozenset(
        zip(
            other["mode"].tolist(), other["mode_step"].tolist(), other["rank"].tolist(), strict=True
        )
    )
    steps: dict[tuple[int, int], list[int]] = {}
    for row in at.tolist():
        key = (int(part["mode"][row]), int(part["mode_step"][row]))
        if (*key, int(part["rank"][row])) in present:
            steps.setdefault(key, []).append(row)
    hits = misses = 0
    for (mode, step), rows in steps.items():
        ranks = tuple(int(part["rank"][row]) for row in rows)
        row = rows[0]
        place = Place(
            row, int(part["attempt"][row]), ModeKeys(mode), step, int(part["step"][row]), 0, ranks
        )
        found = [
            _ids(
                evidence.raw(name, ModeKeys(mode), step, rank),
                evidence.raw(predictions[0], ModeKeys(mode), step, rank),
                argmax=argmax,
            )
            for rank in ranks
        ]
        usable = [pair for pair in found if pair is not None]
        if len(usable) < len(found):
            misses += 1
            yield _Batch(place, None)
            if misses >= MISSES and not hits:
                return
            continue
        hits += 1
        truth, guess = (np.concatenate([pair[side] for pair in usable]) for side in (0, 1))
        yield _Batch(place, (truth, guess))


def _ids(
    labels: Array | None, predictions: Array | None, *, argmax: bool
) -> tuple[Array, Array] | None:
    """Return class ids; None if values are missing, negative, not finite or of unequal number."""
    if labels is None or predictions is None:
        return None
    if argmax and predictions.ndim:
        if labels.ndim == predictions.ndim and labels.shape == predictions.shape:
            labels = np.argmax(labels, axis=-1)  # one-hot
        predictions = np.argmax(predictions, axis=-1)
    truth, guess = (np.asarray(side, np.float64).ravel() for side in (labels, predictions))
    if len(truth) != len(guess) or not np.isfinite(truth).all() or not np.isfinite(guess).all():
        return None
    ids = np.rint(truth).astype(np.int64), np.rint(guess).astype(np.int64)
    return None if min(int(side.min(initial=0)) for side in ids) < 0 else ids


def _confusion(truth: Array, guess: Array, classes: int) -> Array:
    """Return the counts: rows are labels, columns are predictions."""
    size = max(classes, int(truth.max(initial=-1)) + 1, int(guess.max(initial=-1)) + 1)
    return np.bincount(truth * size + guess, minlength=size * size).reshape(size, size)


@dataclass(frozen=True)
class ClassImbalance(BuiltInRule):
    """Fires when classes differ too much in number, or one is mispredicted too often.

    Counts over steps and ranks until there are `samples` labels, then starts again.
    """

    threshold_imbalance: float = 10.0
    threshold_misprediction: float = 0.7
    samples: int = 500
    argmax: bool = False
    labels_regex: str = ".*labels"
    predictions_regex: str = ".*predictions"
    advice: ClassVar[str] = "sample rare classes more often, or weight the loss by class"

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        """Return the first window with imbalanced and the first with mispredicted classes."""
        labels = sorted(chosen(evidence.rows, None, self.labels_regex), key=lambda each: each[0])
        predictions = chosen(evidence.rows, None, self.predictions_regex)
        guesses = sorted(predictions, key=lambda each: each[0])
        if not labels or not guesses:
            return self.undecided(_NEEDS, "labels or predictions were not saved")
        found: dict[str, Finding] = {}
        windows, missed = 0, False
        for one, other in zip(labels, guesses, strict=False):
            empty = np.zeros(0, np.int64)
            truth, guess = empty, empty
            for batch in _batches(evidence, one, other, argmax=self.argmax):
                if batch.pairs is None:
                    missed = True
                    continue
                truth = np.concatenate([truth, batch.pairs[0]])
                guess = np.concatenate([guess, batch.pairs[1]])
                if len(truth) >= self.samples:
                    windows += 1
                    for kind, finding in self._look(one[0], batch.place, truth, guess).items():
                        found.setdefault(kind, finding)
                    truth, guess = empty, empty
        if found:
            return list(found.values())
        if missed:
            return self.undecided(_NEEDS, "labels or predictions of some steps cannot be used")
        if not windows:
            needs = f"{self.samples} labels with their predictions"
            return self.undecided(needs, "too few labels were saved")
        return self.quiet(f"classes are balanced in {windows} x {self.samples} samples")

    def _look(self, name: str, place: Place, truth: Array, guess: Array) -> dict[str, Finding]:
        counts = np.bincount(truth)
        wrong = np.bincount(truth[truth != guess], minlength=len(counts))
        seen = np.flatnonzero(counts)
        found: dict[str, Finding] = {}
        ratio = float(counts[seen].max() / counts[seen].min())
        where = where_text(name, place)
        if ratio > self.threshold_imbalance:
            rare = int(seen[np.argmin(counts[seen])])
            text = f"{where}: class {rare} is {number(ratio)} times as rare as the most frequent"
            limit = self.threshold_imbalance
            found["imbalance"] = self.fires(
                text, place=place, tensor=name, value=ratio, threshold=limit
            )
        shares = wrong[seen] / counts[seen]
        worst = int(np.argmax(shares))
        if shares[worst] > self.threshold_misprediction:
            text = f"{where}: class {int(seen[worst])} is mispredicted in {number(100 * shares[worst])} %"
            found["misprediction"] = self.fires(
                text,
                place=place,
                tensor=name,
                value=float(shares[worst]),
                threshold=self.threshold_misprediction,
            )
        return found


@dataclass(frozen=True)
class Confusion(BuiltInRule):
    """Fires when a class is recognised too rarely or too often taken for another.

    Of the labels of a class, at least `min_diag` must be predicted right. Of the predictions of a
    class, at most `max_off_diag` may come from one other class. Looks at each step over all ranks.
    """

    category_no: int | None = None
    labels: str = "labels"
    predictions: str = "predictions"
    labels_collection: str = "labels"
    predictions_collection: str = "predictions"
    min_diag: float = 0.9
    max_off_diag: float = 0.1
    advice: ClassVar[str] = "look at examples of both classes, their labels and their number"

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        """Return the first step with confused classes."""
        labels = self._find(evidence, self.labels, self.labels_collection)
        predictions = self._find(evidence, self.predictions, self.predictions_collection)
        if labels is None or predictions is None:
            return self.undecided(_NEEDS, "labels or predictions were not saved")
        steps, missed = 0, False
        for batch in _batches(evidence, labels, predictions, argmax=False):
            pairs = batch.pairs
            if pairs is None:
                missed = True
                continue
            if not len(pairs[0]):
                continue
            steps += 1
            finding = self._look(labels[0], batch.place, _confusion(*pairs, self.category_no or 0))
            if finding is not None:
                return [finding]
        if missed or not steps:
            return self.undecided(_NEEDS, "labels or predictions of some steps cannot be used")
        return self.quiet(f"no classes are confused at {steps} steps")

    @staticmethod
    def _find(evidence: Evidence, name: str, collection: str) -> tuple[str, Rows] | None:
        """Return the tensor of this name, else the first of the collection."""
        part = evidence.rows.of_tensor(name)
        if len(part):
            return name, part
        return min(chosen(evidence.rows, (collection,)), key=lambda each: each[0], default=None)

    def _look(self, name: str, place: Place, counts: Array) -> Finding | None:
        with np.errstate(all="ignore"):
            right = np.diag(counts) / counts.sum(axis=1)
            taken = counts / counts.sum(axis=0)
        np.fill_diagonal(taken, 0.0)
        right, taken = np.nan_to_num(right, nan=1.0), np.nan_to_num(taken, nan=0.0)
        worst = int(np.argmin(right))
        where = where_text(name, place)
        if right[worst] < self.min_diag:
            text = f"{where}: class {worst} is recognised in {number(100 * right[worst])} %"
            value, limit = float(right[worst]), self.min_diag
            return self.fires(text, place=place, tensor=name, value=value, threshold=limit)
        label, column = (int(each) for each in np.unravel_index(np.argmax(taken), taken.shape))
        value = float(taken[label, column])
        if value <= self.max_off_diag:
            return None
        text = f"{where}: {number(100 * value)} % of predictions {column} have the label {label}"
        return self.fires(text, place=place, tensor=name, value=value, threshold=self.max_off_diag)
