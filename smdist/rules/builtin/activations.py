"""Rules on units of activations: saturated and dead ones.

A unit is an index along axis 1, all other axes are its samples; in one dimension each element is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from smdist.identity import ModeKeys
from smdist.rules.builtin.base import BuiltInRule, Judged, Place, number, resolve, where_text
from smdist.rules.builtin.selection import chosen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from smdist.rules.evidence import Evidence
    from smdist.rules.findings import Finding
    from smdist.tables.rows import Rows

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["DeadRelu", "SaturatedActivation"]


class _Units(BuiltInRule):
    threshold_inactivity: float
    threshold_layer: float

    def check(self) -> None:
        for name in ("threshold_inactivity", "threshold_layer"):
            if not 0 <= getattr(self, name) <= 100:
                raise self.refuse(f"{name} is {getattr(self, name)}; give 0 to 100 percent")

    def answer(self, judged: Iterator[Judged], what: str, missing: str) -> list[Finding]:
        """Return the answer over all tensors; the values are percentages of units."""

        def describe(each: Judged, place: Place) -> tuple[str, float]:
            share = number(each.values[place.row])
            text = f"{where_text(each.name, place)}: at least {share} % of units are {what}"
            return text, self.threshold_layer

        needs = "raw values of the activations"
        return self.conclude(judged, describe, missing=missing, needs=needs)

    def decider(
        self, evidence: Evidence, name: str, part: Rows, active: Callable[[Array], Array]
    ) -> Callable[[int], tuple[bool, float] | None]:
        """Return the function that counts inactive units in raw values."""

        def decide(row: int) -> tuple[bool, float] | None:
            mode, step = ModeKeys(int(part["mode"][row])), int(part["mode_step"][row])
            raw = evidence.raw(name, mode, step, int(part["rank"][row]))
            if raw is None or not raw.size:
                return None
            share = _inactive(active(np.asarray(raw)), self.threshold_inactivity)
            return share > self.threshold_layer, share

        return decide


def _inactive(active: Array, threshold: float) -> float:
    """Return the percentage of units that are active in less than `threshold` % of their samples."""
    if active.ndim < 2:
        shares = active.ravel() * 100.0
    else:
        axes = tuple(axis for axis in range(active.ndim) if axis != 1)
        shares = active.mean(axis=axes) * 100.0
    return float(np.mean(shares < threshold) * 100.0)


@dataclass(frozen=True)
class SaturatedActivation(_Units):
    """Fires when too many units of a tanh or sigmoid get inputs where it is flat."""

    collection_names: tuple[str, ...] | None = None
    tensor_regex: str | None = ".*tanh_input|.*sigmoid_input"
    threshold_tanh_min: float = -9.4999
    threshold_tanh_max: float = 9.4999
    threshold_sigmoid_min: float = -23.0
    threshold_sigmoid_max: float = 16.99999
    threshold_inactivity: float = 1.0
    threshold_layer: float = 50.0
    threshold_tanh: tuple[float, ...] | None = None  # the older form: (min, max)
    threshold_sigmoid: tuple[float, ...] | None = None
    advice: ClassVar[str] = (
        "scale or normalise the inputs of this layer, or lower the learning rate"
    )

    def check(self) -> None:
        """Require pairs."""
        for name in ("threshold_tanh", "threshold_sigmoid"):
            pair = getattr(self, name)
            if pair is not None and len(pair) != 2:
                raise self.refuse(f"{name} has {len(pair)} values; give min and max")
        super().check()

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        """Return the activations that saturate, the earliest first."""
        missing = "inputs of tanh or sigmoid modules, with tanh or sigmoid in their names"
        return self.answer(self._judged(evidence), "saturated", missing)

    def _range(self, name: str) -> tuple[float, float] | None:
        if "tanh" in name.lower():
            given, low, high = self.threshold_tanh, self.threshold_tanh_min, self.threshold_tanh_max
        elif "sigmoid" in name.lower():
            given = self.threshold_sigmoid
            low, high = self.threshold_sigmoid_min, self.threshold_sigmoid_max
        else:
            return None
        return (low, high) if given is None else (given[0], given[1])

    def _judged(self, evidence: Evidence) -> Iterator[Judged]:
        for name, part in chosen(evidence.rows, self.collection_names, self.tensor_regex):
            limits = self._range(name)
            if limits is None:
                continue
            low, high = limits
            valid = (part["count"] > 0) & (part["nans"] == 0)
            inside = (part["min"] > low) & (part["max"] < high)
            outside = (part["min"] >= high) | (part["max"] <= low)
            if not self.threshold_inactivity:  # no unit has less than nothing
                inside, outside = np.ones_like(inside), np.zeros_like(outside)
            fires = valid & outside & (self.threshold_layer < 100)
            judged = Judged(
                name,
                part,
                fires,
                valid & ~inside & ~outside,
                np.where(fires, 100.0, 0.0),
                bool(valid.any()),
            )

            def active(raw: Array, low: float = low, high: float = high) -> Array:
                return np.asarray((raw > low) & (raw < high))

            yield resolve(judged, self.decider(evidence, name, part, active))


@dataclass(frozen=True)
class DeadRelu(_Units):
    """Fires when too many units of a ReLU are hardly ever above 0.

    With the share of zeros Z and t = threshold_inactivity / 100, the share of dead units lies between
    (Z - 1 + t) / t and Z / (1 - t). That decides it without raw values if Z is small or near 1.
    """

    tensor_regex: str = ".*relu_output|.*ReLU_output"
    threshold_inactivity: float = 1.0
    threshold_layer: float = 50.0
    advice: ClassVar[str] = (
        "lower the learning rate, check biases and initialisation, or use LeakyReLU"
    )

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        """Return the ReLUs with dead units, the earliest first."""
        missing = (
            "outputs of ReLU modules that match tensor_regex; F.relu is no module: not captured"
        )
        return self.answer(self._judged(evidence), "dead", missing)

    def _judged(self, evidence: Evidence) -> Iterator[Judged]:
        share, layer = self.threshold_inactivity / 100, self.threshold_layer / 100
        for name, part in chosen(evidence.rows, None, self.tensor_regex):
            valid = (part["count"] > 0) & (part["nans"] == 0)
            with np.errstate(all="ignore"):
                zeros = part["zeros"] / part["count"]
                zeros = np.where(part["max"] <= 0, 1.0, zeros)
                least = (zeros - 1 + share) / share if share else np.zeros(len(part))
                most = (
                    zeros / (1 - share) if 0 < share < 1 else np.full(len(part), 1.0 * (share > 0))
                )
            # Negative elements are inactive as well, but are no zeros: no upper bound.
            most = np.where((part["min"] < 0) & (share > 0), 1.0, most)
            fires = valid & (least > layer)
            unknown = valid & ~fires & (most > layer)
            judged = Judged(name, part, fires, unknown, 100 * least, bool(valid.any()))
            yield resolve(judged, self.decider(evidence, name, part, lambda raw: raw > 0))
