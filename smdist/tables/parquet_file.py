"""Writes rows as a Parquet file: sorted, a row group per tensor, zstd. Needs the extra `analysis`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from smdist.tables.arrow_table import missing_extra, to_arrow

if TYPE_CHECKING:
    import os

    from smdist.tables.rows import Rows

__all__ = ["write_parquet"]


def write_parquet(rows: Rows, path: str | os.PathLike[str]) -> None:
    """Write the rows; a reader of one tensor then needs one row group."""
    try:
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise missing_extra("pyarrow") from error
    table = to_arrow(rows)
    ends = np.searchsorted(rows["tensor"], np.arange(len(rows.names)), "right").tolist()
    with pq.ParquetWriter(path, table.schema, compression="zstd") as writer:
        for first, end in zip([0, *ends], ends, strict=False):
            writer.write_table(table.slice(first, end - first), row_group_size=max(end - first, 1))
