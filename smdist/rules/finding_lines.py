"""Findings as lines of text for people. Names in them are not escaped: whoever prints does that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from smdist.identity import worker_name
from smdist.messages import count_of
from smdist.rules.findings import Finding, Verdict

__all__ = ["lines_of"]

_MAX_RANKS = 8  # to name


def lines_of(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield lines for a terminal: problems, then what is not decided, then the rest in one line."""
    by_verdict = {v: [one for one in findings if one.verdict is v] for v in Verdict}
    fires, undecided = by_verdict[Verdict.FIRES], by_verdict[Verdict.UNDECIDED]
    yield f"{count_of(len(fires), 'problem')} found" if fires else "no problem found"
    for finding in fires:
        yield ""
        yield f"{finding.rule}: {finding.message}"
        yield f"  {_where(finding)}"
        if finding.advice:
            yield f"  try: {finding.advice}"
    if undecided:
        yield ""
        yield "not decided:"
        width = max(len(one.rule) for one in undecided)
        for one in undecided:
            yield f"  {one.rule:<{width}}  {one.message}; needs {one.needs or 'more data'}"
    if quiet := sorted({one.rule for one in by_verdict[Verdict.QUIET]}):
        yield ""
        yield f"nothing found by: {', '.join(quiet)}"


def _where(finding: Finding) -> str:
    """Return rank, step, tensor and figures in one line."""
    ranks = [worker_name(rank) for rank in finding.ranks[:_MAX_RANKS]]
    if len(finding.ranks) > _MAX_RANKS:
        ranks.append(f"{len(finding.ranks) - _MAX_RANKS} more")
    parts = [f"ranks: {', '.join(ranks)}" if ranks else ""]
    if finding.first_step is not None:
        mode = f" of {finding.mode.name}" if finding.mode is not None else ""
        parts.append(f"step: {finding.first_step}{mode}")
    if finding.attempt:
        parts.append(f"attempt: {finding.attempt}")
    parts.append(f"tensor: {finding.tensor}" if finding.tensor else "")
    if finding.value is not None and finding.threshold is not None:
        parts.append(f"value: {finding.value:.4g} (limit {finding.threshold:.4g})")
    return "  ".join(part for part in parts if part)
