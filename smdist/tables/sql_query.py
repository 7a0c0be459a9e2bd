"""Answers SQL over the rows of a run with DuckDB, in memory. Needs the extra `analysis`.

Views: `statistics` (the rows), `steps`, `ranks`, and `scalars` (tensors of one element, with `value`).
Files, other databases and extensions are out of reach of a query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smdist.errors import ConfigurationError
from smdist.tables.arrow_table import missing_extra, to_arrow

if TYPE_CHECKING:
    from smdist.tables.rows import Rows

__all__ = ["VIEWS", "query"]

VIEWS = {
    "steps": "SELECT attempt, mode, mode_step, step, count(DISTINCT rank) AS ranks, count(*) AS tensors "
    "FROM statistics GROUP BY ALL ORDER BY ALL",
    "ranks": "SELECT attempt, rank, min(step) AS first_step, max(step) AS last_step, "
    "count(DISTINCT step) AS steps, count(*) AS tensors FROM statistics GROUP BY ALL ORDER BY ALL",
    "scalars": 'SELECT tensor, collections, attempt, mode, mode_step, step, rank, sum AS "value" '
    'FROM statistics WHERE "count" = 1',
}
_SETTINGS: dict[str, Any] = {
    "enable_external_access": "false",
    "python_enable_replacements": "false",
    "lock_configuration": "true",
}


def query(rows: Rows, text: str) -> Any:
    """Return the answer as a pyarrow.Table; raise ConfigurationError for SQL that is wrong."""
    try:
        import duckdb
    except ModuleNotFoundError as error:
        raise missing_extra("duckdb") from error
    table = to_arrow(rows)
    with duckdb.connect(":memory:", config=_SETTINGS) as connection:
        connection.register("statistics", table)
        for name, view in VIEWS.items():
            connection.execute(f"CREATE VIEW {name} AS {view}")
        try:
            answer: Any = connection.sql(text)  # None for a statement without rows
            return None if answer is None else answer.to_arrow_table()
        except duckdb.Error as error:
            raise ConfigurationError(f"the query failed: {error}") from error
