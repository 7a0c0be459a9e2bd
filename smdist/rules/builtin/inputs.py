"""Rules on inputs: images that are not normalised, sequences that are mostly padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from smdist.identity import ModeKeys
from smdist.rules.builtin.base import (
    MISSES,
    BuiltInRule,
    Judged,
    Place,
    first_place,
    number,
    resolve,
    where_text,
)
from smdist.rules.builtin.selection import chosen, merge_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smdist.rules.evidence import Evidence
    from smdist.rules.findings import Finding
    from smdist.tables.rows import Rows

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["CheckInputImages", "NLPSequenceRatio"]


@dataclass(frozen=True)
class CheckInputImages(BuiltInRule):
    """Fires when the mean of a channel over at least `threshold_samples` images is far from 0."""

    threshold_mean: float = 0.2
    threshold_samples: int = 500
    regex: str = ".*hybridsequential0_input_0"
    channel: int = 1
    advice: ClassVar[str] = "normalise the images: subtract the mean of each channel"

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        """Return the inputs that are not normalised."""
        found: list[Finding] = []
        seen, decided, open_tensors = 0, 0, 0
        for name, part in chosen(evidence.rows, None, self.regex):
            seen += 1
            finding, windows, complete = self._from_raw(evidence, name, part)
            if finding is None and not complete:
                finding = self._from_rows(name, part)
            if finding is not None:
                found.append(finding)
            decided += windows
            open_tensors += not complete
        if found:
            return found
        if not seen:
            needs = f"images that match regex {self.regex!r}: give the input of the root module"
            return self.undecided(needs, "no input images were saved")
        if open_tensors:
            needs = "raw values of the input images"
            return self.undecided(needs, "rows alone do not tell the channels apart")
        if not decided:
            needs = f"{self.threshold_samples} images"
            return self.undecided(needs, "too few images were saved")
        return self.quiet(
            f"the channels of {decided} x {self.threshold_samples} images are centred"
        )

    def _from_raw(
        self, evidence: Evidence, name: str, part: Rows
    ) -> tuple[Finding | None, int, bool]:
        """Return the first finding, the windows looked at, and whether all raw values were there."""
        order = np.lexsort([part["rank"], part["step"], part["attempt"]])
        images, elements, windows, misses, hits = 0, 0, 0, 0, 0
        sums: Array | float = 0.0
        for row in order.tolist():
            mode, step = ModeKeys(int(part["mode"][row])), int(part["mode_step"][row])
            raw = evidence.raw(name, mode, step, int(part["rank"][row]))
            if raw is None:
                misses += 1
                if misses >= MISSES and not hits:
                    break
                continue
            if not raw.size:
                continue
            hits += 1
            axis = self.channel % raw.ndim if -raw.ndim <= self.channel < raw.ndim else None
            channels = 1 if axis is None else raw.shape[axis]
            others = tuple(each for each in range(raw.ndim) if each != axis)
            added = raw.sum(axis=others, dtype=np.float64)
            if images and np.shape(added) != np.shape(sums):
                images, elements, sums = 0, 0, 0.0  # another shape: another window
            images += raw.shape[0] if raw.ndim > 1 else 1
            elements += raw.size // channels
            sums = sums + added
            if images >= self.threshold_samples:
                means = np.atleast_1d(sums / elements)
                windows += 1
                worst = int(np.argmax(np.abs(means)))
                if abs(means[worst]) > self.threshold_mean:
                    here = np.zeros(len(part), np.bool_)
                    here[row] = True
                    place = first_place(part, here)
                    text = f"channel {worst} has mean {number(means[worst])} over {images} images"
                    return self._finding(name, place, text, float(means[worst])), windows, True
                images, elements, sums = 0, 0, 0.0
        return None, windows, not misses

    def _from_rows(self, name: str, part: Rows) -> Finding | None:
        """Return a finding if the mean over all channels is too far off: then one channel's is."""
        rows = merge_ranks(part)
        count = np.cumsum(rows["count"])
        with np.errstate(all="ignore"):
            means = np.cumsum(rows["sum"]) / count
        # The number of images is not in a row; it is at most that of elements.
        place = first_place(
            rows, (np.abs(means) > self.threshold_mean) & (count >= self.threshold_samples)
        )
        if place is None:
            return None
        mean = float(means[place.row])
        return self._finding(name, place, f"mean {number(mean)} over all channels", mean)

    def _finding(self, name: str, place: Place | None, text: str, mean: float) -> Finding:
        where = name if place is None else where_text(name, place)
        return self.fires(
            f"{where}: {text}", place=place, tensor=name, value=mean, threshold=self.threshold_mean
        )


@dataclass(frozen=True)
class NLPSequenceRatio(BuiltInRule):
    """Fires when a token makes up more than its share of the input, in percent."""

    tensor_regex: str = ".*embedding0_input_0"
    token_values: tuple[float, ...] = (0.0,)
    token_thresholds_percent: tuple[float, ...] = (50.0,)
    advice: ClassVar[str] = "sort sequences by length, or pad each batch to its own longest one"

    def check(self) -> None:
        """Require a threshold for each token."""
        values, thresholds = len(self.token_values), len(self.token_thresholds_percent)
        if values != thresholds:
            raise self.refuse(f"{values} token_values, but {thresholds} token_thresholds_percent")

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        """Return the inputs with too many of a token, for each token the earliest first."""
        answers: list[Finding] = []
        for token, limit in zip(self.token_values, self.token_thresholds_percent, strict=True):
            answers += self._token(evidence, token, limit)
        for verdict in ("FIRES", "UNDECIDED"):
            some = [each for each in answers if each.verdict.value == verdict]
            if some:
                return some if verdict == "FIRES" else some[:1]
        return answers[:1]

    def _token(self, evidence: Evidence, token: float, limit: float) -> list[Finding]:
        def describe(judged: Judged, place: Place) -> tuple[str, float]:
            share = number(judged.values[place.row])
            text = f"{where_text(judged.name, place)}: token {token:g} makes up {share} %"
            return text, limit

        return self.conclude(
            self._judged(evidence, token, limit),
            describe,
            missing=f"inputs that match tensor_regex {self.tensor_regex!r}: those of the embedding",
            needs=f"raw values of the inputs, for token {token:g}",
        )

    def _judged(self, evidence: Evidence, token: float, limit: float) -> Iterator[Judged]:
        for name, part in chosen(evidence.rows, None, self.tensor_regex):
            valid = part["count"] > 0
            with np.errstate(all="ignore"):
                if token == 0:
                    share, known = 100.0 * part["zeros"] / part["count"], valid
                else:
                    all_of_it = (part["min"] == token) & (part["max"] == token)
                    known = all_of_it | (part["min"] > token) | (part["max"] < token)
                    share = np.where(all_of_it, 100.0, 0.0)
            judged = Judged(
                name,
                part,
                valid & known & (share > limit),
                valid & ~known,
                share,
                bool(valid.any()),
            )

            def decide(row: int, name: str = name, part: Rows = part) -> tuple[bool, float] | None:
                mode, step = ModeKeys(int(part["mode"][row])), int(part["mode_step"][row])
                raw = evidence.raw(name, mode, step, int(part["rank"][row]))
                if raw is None:
                    return None
                found = 100.0 * float(np.mean(raw == token))
                return found > limit, found

            yield resolve(judged, decide)
