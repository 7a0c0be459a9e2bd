"""`Evidence`: all that a rule may look at. Pure data; whoever runs rules puts it together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np

    from smdist.identity import ModeKeys
    from smdist.tables.rows import Rows

    RawValues = Callable[[str, ModeKeys, int, int], np.ndarray[Any, np.dtype[Any]] | None]

__all__ = ["Evidence"]


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """Rows of a run, its raw values where they were saved, and how far its ranks have come.

    `raw(tensor, mode, mode_step, rank)` returns None where only a row was saved.
    """

    rows: Rows
    raw: RawValues
    ended: bool
    now: float  # unix time
    last_progress: Mapping[int, float]  # rank -> unix time of its last saved step
    others: tuple[Evidence, ...] = ()  # other runs, for rules that compare runs
