"""What all built-in rules share: their answers, and how the rows of each tensor lead to one."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from smdist.errors import ConfigurationError
from smdist.identity import ModeKeys
from smdist.rules.builtin.selection import matcher
from smdist.rules.findings import Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from smdist.rules.evidence import Evidence
    from smdist.tables.rows import Rows

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["BuiltInRule", "Judged", "Place", "first_place", "number", "resolve", "where_text"]

MISSES = 64
"""A tensor whose raw values were asked for this often in vain is not asked for again."""


def number(value: float) -> str:
    """Return a number for a message."""
    return f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where something first holds in the rows of one tensor, and the ranks where it does."""

    row: int
    attempt: int
    mode: ModeKeys
    mode_step: int
    step: int
    order: int
    ranks: tuple[int, ...]


def first_place(part: Rows, holds: Array) -> Place | None:
    """Return the first step of a tensor at which `holds` is true for a row; None for nowhere."""
    at = np.flatnonzero(holds)
    if not len(at):
        return None
    attempts = part["attempt"][at]
    at = at[attempts == attempts.min()]
    row = int(at[np.argmin(part["step"][at])])
    mode, mode_step = part["mode"][row], part["mode_step"][row]
    together = at[(part["mode"][at] == mode) & (part["mode_step"][at] == mode_step)]
    return Place(
        row=row,
        attempt=int(part["attempt"][row]),
        mode=ModeKeys(int(mode)),
        mode_step=int(mode_step),
        step=int(part["step"][row]),
        order=int(part["order"][row]),
        ranks=tuple(sorted({int(rank) for rank in part["rank"][together] if rank >= 0})),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """What is known of each row of one tensor. Rows in neither mask are quiet, or were skipped."""

    name: str
    part: Rows
    fires: Array
    unknown: Array
    values: Array
    looked: bool = True  # False: every row was skipped


def resolve(judged: Judged, decide: Callable[[int], tuple[bool, float] | None]) -> Judged:
    """Decide unknown rows by their raw values, from the first step to the first one that fires.

    `decide(row)` returns whether the row fires and its value, or None without raw values.
    """
    if not judged.unknown.any():
        return judged
    part, fires, values = judged.part, judged.fires.copy(), judged.values.copy()
    unknown = judged.unknown.copy()
    at = np.flatnonzero(unknown)
    at = at[np.lexsort([part["step"][at], part["attempt"][at]])]
    hits = misses = 0
    first = first_place(part, fires)
    for row in at.tolist():
        if first is not None and _after(part, row, first):
            break
        answer = decide(row)
        if answer is None:
            misses += 1
            if misses >= MISSES and not hits:
                break
            continue
        hits += 1
        unknown[row] = False
        fires[row], values[row] = answer
        if answer[0]:
            first = first_place(part, fires)
    return Judged(judged.name, part, fires, unknown, values, judged.looked)


def _after(part: Rows, row: int, place: Place) -> bool:
    here = (int(part["attempt"][row]), int(part["step"][row]))
    return here > (place.attempt, place.step)


class BuiltInRule:
    """Base of built-in rules: frozen dataclasses of parameters whose `evaluate` is pure."""

    advice: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            if each.name.endswith("regex") and (regex := getattr(self, each.name)) is not None:
                matcher(regex)
        self.check()

    def check(self) -> None:
        """Raise ConfigurationError for parameters that do not fit together."""

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        """Return findings that FIRE, the earliest first; or one that is QUIET or UNDECIDED."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Return the name of the rule, which is that of its class."""
        return type(self).__name__

    # -- answers ---------------------------------------------------------------------------------

    def fires(
        self,
        message: str,
        *,
        place: Place | None = None,
        tensor: str | None = None,
        value: float | None = None,
        threshold: float | None = None,
        advice: str | None = None,
        ranks: Sequence[int] | None = None,
    ) -> Finding:
        """Return a finding that FIRES, at a place if it has one."""
        return Finding(
            rule=self.name,
            verdict=Verdict.FIRES,
            message=message,
            first_step=None if place is None else place.mode_step,
            mode=None if place is None else place.mode,
            attempt=None if place is None else place.attempt,
            tensor=tensor,
            ranks=tuple(ranks) if ranks is not None else () if place is None else place.ranks,
            value=None if value is None else float(value),
            threshold=None if threshold is None else float(threshold),
            advice=advice or self.advice,
        )

    def quiet(self, message: str) -> list[Finding]:
        """Return the answer that the condition does not hold."""
        return [Finding(rule=self.name, verdict=Verdict.QUIET, message=message)]

    def undecided(self, needs: str, message: str) -> list[Finding]:
        """Return the answer that what the rule needs was not saved."""
        verdict = Verdict.UNDECIDED
        return [Finding(rule=self.name, verdict=verdict, message=message, needs=needs)]

    def refuse(self, what: str) -> ConfigurationError:
        """Return the error for parameters that cannot be used."""
        return ConfigurationError(f"rule {self.name}: {what}")

    # -- rules that look at tensors one by one ---------------------------------------------------

    def conclude(
        self,
        judged: Iterable[Judged],
        describe: Callable[[Judged, Place], tuple[str, float | None]],
        *,
        missing: str,
        needs: str,
        advice: str | None = None,
    ) -> list[Finding]:
        """Return the answer over all tensors.

        `describe` returns message and threshold of a tensor that fires. `missing` says what to save
        when there is no tensor, `needs` what to save when rows alone do not decide.
        """
        found: list[tuple[tuple[int, int, int], Finding]] = []
        seen, looked = 0, 0
        open_tensors: list[str] = []
        for each in judged:
            seen += 1
            looked += each.looked
            place = first_place(each.part, each.fires)
            if place is not None:
                message, threshold = describe(each, place)
                finding = self.fires(
                    message,
                    place=place,
                    tensor=each.name,
                    value=float(each.values[place.row]),
                    threshold=threshold,
                    advice=advice,
                )
                found.append(((place.attempt, place.step, place.order), finding))
            elif each.unknown.any():
                open_tensors.append(each.name)
        if found:
            return [finding for _, finding in sorted(found, key=lambda pair: pair[0])]
        if not seen:
            return self.undecided(missing, "no tensor that the rule looks at was saved")
        if open_tensors:
            what = f"{open_tensors[0]!r}" if len(open_tensors) == 1 else f"{len(open_tensors)}"
            plural = "" if len(open_tensors) == 1 else " tensors"
            return self.undecided(needs, f"the rows of {what}{plural} do not decide it")
        if not looked:
            return self.undecided(missing, f"the {seen} tensors have no finite values to look at")
        return self.quiet(f"does not hold for {seen} tensors")


def where_text(name: str, place: Place) -> str:
    """Return tensor, step and ranks for a message."""
    ranks = ", ".join(map(str, place.ranks[:4])) + (", ..." if len(place.ranks) > 4 else "")
    on = "over all ranks" if not place.ranks else f"on rank {ranks}"
    return f"{name} at step {place.mode_step} of {place.mode.name} {on}"
