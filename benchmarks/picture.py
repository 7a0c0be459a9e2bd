"""Step-time ratios as a picture: docs/benchmarks.svg, drawn by hand, with the fonts the reader has.

python -m benchmarks.picture ROWS.json PICTURE.svg
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

import msgspec

from benchmarks.table import Row

__all__ = ["draw"]

WIDTH, LEFT, RIGHT = 860, 190, 110
BAR, GAP, HEAD, TOP, FOOT = 16, 5, 42, 40, 34
LOWEST, HIGHEST = 1.0, 3.0  # bars are cut off beyond: one would hide all others
COLOURS = {"smdist": "#0b6e4f", "none": "#9aa0a6", "limit": "#5f6368"}
OTHERS = "#c9825b"


def draw(rows: Iterable[Row], about: str) -> str:
    """One block per group, one bar per row; empty without rows that belong to a group."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.group and row.value is not None:
            groups.setdefault(row.group, []).append(row)
    if not groups:
        return ""
    parts, y = [], TOP
    for title, members in groups.items():
        parts.append(_text(16, y + 20, title, "weight"))
        y += HEAD
        top, bottom = y - 4, y + len(members) * (BAR + GAP)
        parts += [_line(at, top, bottom) for at in (1.0, 1.5, 2.0, 2.5, 3.0)]
        for row in sorted(members, key=lambda one: one.value or 0.0):
            parts += _bar(row, y)
            y += BAR + GAP
        parts += [_limit(row.bar, top, bottom) for row in members if row.bar is not None]
        y += 10
    head = _text(16, 26, "Step time with capture / without (1 is free; less is better)", "title")
    foot = _text(16, y + 20, about, "small")
    return _page(y + FOOT, [head, *parts, foot])


def _x(ratio: float) -> float:
    inner = WIDTH - LEFT - RIGHT
    return LEFT + inner * (min(max(ratio, LOWEST), HIGHEST) - LOWEST) / (HIGHEST - LOWEST)


def _bar(row: Row, y: int) -> list[str]:
    assert row.value is not None
    limit = row.label.startswith("one ")
    colour = COLOURS["limit"] if limit else COLOURS.get(row.label, OTHERS)
    end, middle = _x(row.value), y + BAR / 2
    size = f'width="{max(end - LEFT, 1):.1f}" height="{BAR}"'
    parts = [
        _text(LEFT - 8, y + 12, row.label, "label"),
        f'<rect x="{LEFT}" y="{y}" {size} fill="{colour}"/>',
    ]
    edge = end
    if row.spread is not None:
        low, high = map(_x, row.spread)
        edge = max(end, high)
        parts.append(
            f'<path d="M{low:.1f} {middle} H{high:.1f} M{low:.1f} {middle - 4} V{middle + 4} '
            f'M{high:.1f} {middle - 4} V{middle + 4}" stroke="#202124" fill="none"/>'
        )
    cut = " (cut off)" if row.value > HIGHEST else ""
    shown = f"{row.value:.3f}" if row.value < 1.5 else f"{row.value:.2f}"
    parts.append(_text(edge + 6, y + 12, shown + cut, "value"))
    return parts


def _line(ratio: float, top: int, bottom: int) -> str:
    x = _x(ratio)
    mark = _text(x, top - 2, f"{ratio:g}", "tick")
    return f'<path d="M{x:.1f} {top} V{bottom}" stroke="#dadce0"/>{mark}'


def _limit(ratio: float, top: int, bottom: int) -> str:
    x = _x(ratio)
    return f'<path d="M{x:.1f} {top} V{bottom}" stroke="#d93025" stroke-dasharray="4 3"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class={quoteattr(kind)}>{escape(text)}</text>'


def _page(height: int, parts: Sequence[str]) -> str:
    style = (
        "text{font-family:sans-serif;font-size:12px;fill:#202124}"
        ".title{font-size:16px;font-weight:bold}.weight{font-weight:bold}.label{text-anchor:end}"
        ".tick{text-anchor:middle;font-size:10px;fill:#5f6368}.small{font-size:11px;fill:#5f6368}"
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}">\n<style>{style}</style>\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def main() -> None:
    rows = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=list[Row])
    Path(sys.argv[2]).write_text(draw(rows, "Dashed: the bar. Whiskers: lowest and highest round."))


if __name__ == "__main__":
    main()
