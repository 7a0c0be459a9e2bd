"""Writes the answer to a query as text: an aligned table, JSON or CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from typing import Any

from smdist.errors import ConfigurationError
from smdist.messages import printable

__all__ = ["render"]


def render(table: Any, output: str) -> str:
    """Return the text of a pyarrow.Table, or of nothing; raise ConfigurationError for another form."""
    if output not in ("table", "json", "csv"):
        raise ConfigurationError(f"-o {output}: give table, json or csv")
    names = [] if table is None else list(table.column_names)
    rows = [] if table is None else [list(row.values()) for row in table.to_pylist()]
    if output == "json":
        found = [{n: _plain(v) for n, v in zip(names, row, strict=True)} for row in rows]
        return json.dumps(found, default=str) + "\n"
    if output == "csv":
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([names, *rows])
        return text.getvalue()
    cells = [names, *([printable(_cell(value)) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)
    return "".join(f"{line}\n" for line in lines)


def _plain(value: object) -> object:
    # JSON has no NaN and no infinity.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
