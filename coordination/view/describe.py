"""Turn a view of a run into the lines of its status. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from smdist.coordination.view.membership import RankReport, expected_ranks
from smdist.coordination.view.run_view import View
from smdist.coordination.view.status import AttemptLine, RankLine, StepReport
from smdist.coordination.view.step_index import StepIndex
from smdist.identity import ModeKeys

__all__ = ["attempt_lines", "latest_complete", "rank_lines", "waited_for"]

Reports = Mapping[int, Mapping[int, RankReport]]
"""Attempt -> rank -> how it stands."""


def attempt_lines(view: View, reports: Reports) -> tuple[AttemptLine, ...]:
    def line(attempt: int) -> AttemptLine:
        counts = Counter(str(report.status) for report in reports[attempt].values())
        return AttemptLine(attempt, len(expected_ranks(view, attempt)), dict(counts))

    return tuple(map(line, sorted(reports)))


def rank_lines(reports: Reports) -> tuple[RankLine, ...]:
    """Return the ranks of the newest attempt."""
    newest = reports[max(reports)] if reports else {}
    return tuple(
        RankLine(
            report.rank,
            str(report.status),
            report.step,
            report.behind_steps,
            report.behind_s,
            report.last_seen,
            report.reason,
        )
        for report in newest.values()
    )


def latest_complete(book: StepIndex) -> dict[str, int]:
    modes = dict.fromkeys([*book.modes, ModeKeys.GLOBAL])
    return {mode.name: book.latest_complete(mode) for mode in modes}


def waited_for(report: StepReport, latest: int) -> str:
    text = f"step {report.step} of mode {report.mode} is not complete in time"
    some = [f"rank {rank} ({why})" for rank, why in report.missing.items()]
    if some:
        more = f" and {len(some) - 8} more" if len(some) > 8 else ""
        text += f"; missing: {', '.join(some[:8])}{more}"
    return f"{text}; the latest complete step is {latest}"
