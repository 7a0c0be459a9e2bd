"""Reports of a trial for people: attempts, dropped tensors, a description, a pandas DataFrame.

Only `to_dataframe` reads data, through the segment reader that it is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from smdist.coordination.view.membership import RankReport, RankStatus
from smdist.errors import ConfigurationError
from smdist.format.intervals import to_intervals
from smdist.identity import ModeKeys, worker_name
from smdist.messages import printable
from smdist.trials.catalogue import Catalogue, TensorLocation
from smdist.trials.reductions import reduce_all, reduction_name
from smdist.trials.segment_reader import SegmentReader

__all__ = [
    "REDUCTIONS",
    "AttemptInfo",
    "DroppedTensors",
    "Selected",
    "attempt_info",
    "describe",
    "dropped",
    "to_dataframe",
]


_MOST_LINES = 16
_MOST_TROUBLES = 8


@dataclass(frozen=True, slots=True)
class AttemptInfo:
    """One start of the job. `steps`: how many it holds, superseded ones too. `started`: 0 unknown."""

    number: int
    expected: tuple[int, ...]
    world_size: int
    started: float
    steps: int
    ranks: Mapping[int, RankReport]


class DroppedTensors(NamedTuple):
    worker: str
    attempt: int
    mode: ModeKeys
    mode_step: int
    step: int
    names: tuple[str, ...]
    nbytes: int
    reason: str


def attempt_info(catalogue: Catalogue, attempt: int) -> AttemptInfo:
    known = catalogue.view.attempts[attempt]
    return AttemptInfo(
        number=attempt,
        expected=tuple(catalogue.expected[attempt]),
        world_size=max((w.world_size for rank in known.values() for w in rank.worlds), default=0),
        started=min((r.session.started for r in known.values() if r.session), default=0.0),
        steps=len(catalogue.view.keys(attempt)),
        ranks=catalogue.reports(attempt),
    )


def dropped(catalogue: Catalogue) -> list[DroppedTensors]:
    found = []
    for attempt, rank, _ in catalogue.view.ranks():
        if attempt not in catalogue.attempts:
            continue
        drops = sorted(
            (seq, place, drop)
            for some in catalogue.view.drops(attempt, rank).values()
            for seq, place, drop in some
        )
        found += [
            DroppedTensors(
                worker_name(rank),
                attempt,
                ModeKeys(drop.mode),
                drop.mode_step,
                drop.step,
                drop.names,
                drop.nbytes,
                drop.reason,
            )
            for _, _, drop in drops
        ]
    return found


def describe(
    name: str, path: str, catalogue: Catalogue, troubles: Mapping[str, Sequence[str]]
) -> str:
    steps = catalogue.by_number
    complete = sum(facts.complete for facts in steps.values())
    extent = f", {min(steps)} to {max(steps)}" if steps else ""
    lines = [
        f"trial {name} at {path}: {'finished' if catalogue.finished else 'live'}",
        f"steps: {len(steps)}{extent}; {complete} complete, {len(steps) - complete} partial",
        f"tensors: {len(catalogue.names)}",
    ]
    for attempt in catalogue.attempts:
        counts = Counter(report.status.value for report in catalogue.reports(attempt).values())
        said = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        lines.append(
            f"attempt {attempt}: {len(catalogue.expected[attempt])} ranks expected; {said}"
        )
        lines += _absentees(catalogue, attempt)
    lost = dropped(catalogue)
    if lost:
        lines.append(f"dropped: {sum(len(d.names) for d in lost)} tensors in {len(lost)} places")
    told = [
        f"{worker}: {text}" if worker else text for worker in troubles for text in troubles[worker]
    ]
    if told:
        lines += [f"troubles: {len(told)}", *(f"  {text}" for text in told[:_MOST_TROUBLES])]
    if len(told) > _MOST_TROUBLES:
        lines.append(f"  and {len(told) - _MOST_TROUBLES} more: trial.troubles()")
    return "\n".join(map(printable, lines))


def _absentees(catalogue: Catalogue, attempt: int) -> list[str]:
    """Describe the ranks that are lost or lagging, and where each was last seen."""
    lines, ranks = [], []
    reports = catalogue.reports(attempt)
    for report in reports.values():
        if report.status is RankStatus.LOST:
            where = f"after step {report.step}" if report.step >= 0 else "before its first step"
            known = catalogue.view.rank(attempt, report.rank)
            if report.step < 0 and known is not None and known.missing_manifests:
                where = "and its manifests are missing"
            why = f": {report.reason}" if report.reason else ""
            lines.append(f"  {worker_name(report.rank)} was lost {where}{why}")
            ranks.append(report.rank)
        elif report.status is RankStatus.LAGGING:
            lines.append(
                f"  {worker_name(report.rank)} lags: at step {report.step}, "
                f"{report.behind_s:.0f} s behind"
            )
            ranks.append(report.rank)
    if len(lines) > _MOST_LINES:
        rest = ranks[_MOST_LINES:]
        lines[_MOST_LINES:] = [f"  and {len(rest)} more: {_grouped(rest)}"]
    absent = [r.rank for r in reports.values() if r.status is RankStatus.NEVER_STARTED]
    if absent:
        lines.append(f"  never started: {_grouped(absent)}")
    return lines


def _grouped(ranks: Sequence[int]) -> str:
    ranges = [
        worker_name(start) + ("" if stop == start + 1 else f" to {worker_name(stop - 1)}")
        for start, stop in to_intervals(ranks)
    ]
    more = f" and {len(ranges) - _MOST_LINES} more" if len(ranges) > _MOST_LINES else ""
    return ", ".join(ranges[:_MOST_LINES]) + more


REDUCTIONS = ("min", "max", "mean", "std", "l2", "nans", "infs")

_ROWS = 1024


class Selected(NamedTuple):
    """A tensor of a rank at a step; `number` is the step's, in the mode that was asked for."""

    number: int
    attempt: int
    found: TensorLocation


def to_dataframe(
    reader: SegmentReader, selected: Sequence[Selected], reductions: Sequence[str]
) -> Any:
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "to_dataframe() needs pandas: pip install smdist[dataframe]"
        ) from error
    names = [reduction_name(name) for name in reductions]
    columns = ["step", "mode", "mode_step", "attempt", "worker", "tensor", "shape", "value", *names]
    rows = [
        row
        for start in range(0, len(selected), _ROWS)
        for row in _rows(reader, selected[start : start + _ROWS], names)
    ]
    return pd.DataFrame.from_records(rows, columns=columns)


def _rows(
    reader: SegmentReader, selected: Sequence[Selected], names: Sequence[str]
) -> Iterator[tuple[object, ...]]:
    found = [one.found for one in selected]
    reduced = reduce_all(found, names, reader)
    single = [i for i, one in enumerate(found) if one.tensor.offset >= 0 and _is_scalar(one)]
    values = dict(zip(single, reader.values([found[i] for i in single]), strict=True))
    for place, (number, attempt, one) in enumerate(selected):
        value = values[place].reshape(()).astype(object).item() if place in values else None
        numbers = reduced[place] or {}
        yield (
            number,
            ModeKeys(one.entry.mode).name,
            one.entry.mode_step,
            attempt,
            worker_name(one.rank),
            one.tensor.name,
            one.tensor.shape,
            value,
            *(numbers.get(name) for name in names),
        )


def _is_scalar(one: TensorLocation) -> bool:
    return all(size == 1 for size in one.tensor.shape)
