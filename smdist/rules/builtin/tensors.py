"""Rules on the values of single rows: vanishing, non-finite, all zero, too much or little variance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from smdist.rules.builtin.base import BuiltInRule, Judged, Place, number, where_text
from smdist.rules.builtin.selection import chosen, merge_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smdist.rules.evidence import Evidence
    from smdist.rules.findings import Finding
    from smdist.tables.rows import Rows

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["AllZero", "ExplodingTensor", "TensorVariance", "VanishingGradient"]

_SELECT = "a collection_names or tensor_regex that matches saved tensors"


class _PerRow(BuiltInRule):
    """A rule that rows decide exactly. With scope "merged" it looks at all ranks together."""

    scope: str

    def check(self) -> None:
        if self.scope not in ("each", "merged"):
            raise self.refuse(f'scope is {self.scope!r}; give "each" or "merged"')

    def judged(
        self, evidence: Evidence, collections: tuple[str, ...] | None, regex: str | None
    ) -> Iterator[Judged]:
        """Yield what is known of each selected tensor."""
        for name, part in chosen(evidence.rows, collections, regex):
            rows = merge_ranks(part) if self.scope == "merged" else part
            with np.errstate(all="ignore"):
                fires, valid, values = self.judge(rows)
            unknown = np.zeros(len(rows), np.bool_)
            yield Judged(name, rows, fires & valid, unknown, values, bool(valid.any()))

    def judge(self, rows: Rows) -> tuple[Array, Array, Array]:
        """Return where the condition holds, which rows count, and the values to report."""
        raise NotImplementedError


@dataclass(frozen=True)
class VanishingGradient(_PerRow):
    """Fires when the mean magnitude of a gradient is below `threshold`."""

    threshold: float = 1e-7
    ignore_frozen: bool = False  # leave out gradients that were 0 at every saved step
    scope: str = "each"
    advice: ClassVar[str] = (
        "check initialisation, normalisation and activations before this layer, or raise the "
        "learning rate; for parameters frozen on purpose pass ignore_frozen=True"
    )

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        """Return the gradients that vanish, the earliest first."""

        def describe(judged: Judged, place: Place) -> tuple[str, float]:
            mean = number(judged.values[place.row])
            text = f"{where_text(judged.name, place)}: mean magnitude {mean}"
            return f"{text} is below {number(self.threshold)}", self.threshold

        judged = self.judged(evidence, ("gradients",), None)
        if self.ignore_frozen:
            judged = (each for each in judged if each.part["abs_sum"].any())
        needs = "the collection gradients"
        return self.conclude(judged, describe, missing=needs, needs=needs)

    def judge(self, rows: Rows) -> tuple[Array, Array, Array]:
        """Compare the mean magnitude. Rows with NaN are for ExplodingTensor."""
        mean = rows["abs_sum"] / rows["count"]
        return mean < self.threshold, (rows["count"] > 0) & (rows["nans"] == 0), mean


@dataclass(frozen=True)
class ExplodingTensor(_PerRow):
    """Fires when a tensor has a NaN or, unless `only_nan`, an infinity."""

    collection_names: tuple[str, ...] | None = None
    tensor_regex: str | None = None
    only_nan: bool = False
    scope: str = "each"
    advice: ClassVar[str] = (
        "look at the first tensor in order of capture and its inputs; lower the learning rate, clip "
        "gradients, or raise the loss scale's floor"
    )

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        """Return the tensors with non-finite values, the first that was captured first."""

        def describe(judged: Judged, place: Place) -> tuple[str, float]:
            nans, infs = (int(judged.part[key][place.row]) for key in ("nans", "infs"))
            return f"{where_text(judged.name, place)}: {nans} NaN and {infs} infinities", 0.0

        judged = self.judged(evidence, self.collection_names, self.tensor_regex)
        return self.conclude(judged, describe, missing=_SELECT, needs=_SELECT)

    def judge(self, rows: Rows) -> tuple[Array, Array, Array]:
        """Count what is not finite."""
        bad = rows["nans"] if self.only_nan else rows["nans"] + rows["infs"]
        return bad > 0, np.ones(len(rows), np.bool_), bad


class _Selecting(_PerRow):
    collection_names: tuple[str, ...] | None
    tensor_regex: str | None

    def check(self) -> None:
        if not self.collection_names and not self.tensor_regex:
            raise self.refuse("give collection_names or tensor_regex")
        super().check()


@dataclass(frozen=True)
class AllZero(_Selecting):
    """Fires when at least `threshold` percent of a tensor's elements are 0."""

    collection_names: tuple[str, ...] | None = None
    tensor_regex: str | None = None
    threshold: float = 100.0
    scope: str = "each"
    advice: ClassVar[str] = "check that the tensor is used and that its inputs are not all zero"

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        """Return the tensors that are zero, the earliest first."""

        def describe(judged: Judged, place: Place) -> tuple[str, float]:
            share = number(judged.values[place.row])
            return f"{where_text(judged.name, place)}: {share} % are zero", self.threshold

        judged = self.judged(evidence, self.collection_names, self.tensor_regex)
        return self.conclude(judged, describe, missing=_SELECT, needs=_SELECT)

    def judge(self, rows: Rows) -> tuple[Array, Array, Array]:
        """Compare the share of zeros."""
        share = 100.0 * rows["zeros"] / rows["count"]
        return share >= self.threshold, rows["count"] > 0, share


@dataclass(frozen=True)
class TensorVariance(_Selecting):
    """Fires when the variance of a tensor is above `max_threshold` or below `min_threshold`."""

    collection_names: tuple[str, ...] | None = None
    tensor_regex: str | None = None
    max_threshold: float | None = None
    min_threshold: float | None = None
    scope: str = "each"
    advice: ClassVar[str] = "check initialisation and normalisation of this layer"

    def check(self) -> None:
        """Require a threshold."""
        if self.max_threshold is None and self.min_threshold is None:
            raise self.refuse("give max_threshold, min_threshold or both")
        super().check()

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        """Return the tensors whose variance is out of range, the earliest first."""

        def describe(judged: Judged, place: Place) -> tuple[str, float | None]:
            value = float(judged.values[place.row])
            above = self.max_threshold is not None and value > self.max_threshold
            limit = self.max_threshold if above else self.min_threshold
            text = f"{where_text(judged.name, place)}: variance {number(value)}"
            return f"{text} is {'above' if above else 'below'} {limit}", limit

        judged = self.judged(evidence, self.collection_names, self.tensor_regex)
        return self.conclude(judged, describe, missing=_SELECT, needs=_SELECT)

    def judge(self, rows: Rows) -> tuple[Array, Array, Array]:
        """Compare the variance. Rows that are not finite have none."""
        variance = rows["m2"] / rows["count"]
        above = variance > (np.inf if self.max_threshold is None else self.max_threshold)
        below = variance < (-np.inf if self.min_threshold is None else self.min_threshold)
        return above | below, np.isfinite(variance), variance
