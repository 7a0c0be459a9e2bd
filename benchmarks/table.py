"""One row per measured thing, with its bar and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ["Row", "markdown", "plain"]

_HEAD = ("what", "median", "p99", "rounds", "bar", "verdict", "note")


class Row(msgspec.Struct, frozen=True):
    what: str
    value: float | None  # None: not measured, the note says why
    unit: str
    p99: float | None = None
    bar: float | None = None
    note: str = ""
    spread: tuple[float, float] | None = None  # lowest and highest of the rounds
    group: str = ""  # rows of one group are drawn together,
    label: str = ""  # each by its label
    measurement: str = ""  # that it is of

    @property
    def verdict(self) -> str:
        """By the median; and whether the rounds agree."""
        if self.value is None:
            return "not measured"
        if self.bar is None:
            return ""
        low, high = self.spread or (self.value, self.value)
        found = "met" if self.value <= self.bar else "MISSED"
        return f"{found}, not in all rounds" if low <= self.bar < high else found

    def cells(self) -> tuple[str, ...]:
        return (
            self.what,
            "" if self.value is None else _shown(self.value, self.unit),
            "" if self.p99 is None else _shown(self.p99, self.unit),
            "" if self.spread is None else " .. ".join(_number(v, self.unit) for v in self.spread),
            "" if self.bar is None else f"<= {self.bar:g} {self.unit}",
            self.verdict,
            self.note,
        )


def _number(value: float, unit: str) -> str:
    digits = 3 if unit == "x" and value < 1.5 else 2 if unit == "x" else 1
    return f"{value:.{digits}f}"


def _shown(value: float, unit: str) -> str:
    return f"{_number(value, unit)} {unit}"


def plain(rows: Sequence[Row]) -> str:
    lines = [_HEAD, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if 0 < i < 5 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def markdown(rows: Sequence[Row]) -> str:
    lines = [
        _HEAD,
        ("---", "---:", "---:", "---:", "---:", "---", "---"),
        *([cell.replace("|", "/") for cell in row.cells()] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
