"""Run many rules on one evidence. What one rule does wrong is its own finding and nobody else's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from smdist.rules.evidence import Evidence
from smdist.rules.findings import Finding, Verdict
from smdist.rules.stages import Stage, stage_of
from smdist.tables.rows import Rows

__all__ = ["EvidenceRule", "judge"]

_PLACE = {Verdict.FIRES: 0, Verdict.UNDECIDED: 1, Verdict.QUIET: 2}
_NEVER = 1 << 62  # after every step


class EvidenceRule(Protocol):
    """A rule that answers from evidence: FIRES for each place, else one QUIET or UNDECIDED."""

    def evaluate(self, evidence: Evidence) -> list[Finding]: ...


def judge(rules: Iterable[EvidenceRule], evidence: Evidence) -> list[Finding]:
    """Return the findings of all rules: what fires in causal order, then UNDECIDED, then QUIET.

    A rule that raises, or answers nothing, is UNDECIDED.
    """
    found = [finding for rule in rules for finding in _answers(rule, evidence)]
    return sorted(found, key=lambda finding: _key(finding, evidence.rows))


def _answers(rule: EvidenceRule, evidence: Evidence) -> list[Finding]:
    name = getattr(rule, "name", None) or type(rule).__name__
    try:
        found = list(rule.evaluate(evidence))
    except Exception as error:  # noqa: BLE001 - whatever a rule does, the others go on
        text = f"the rule failed: {type(error).__name__}: {error}"
        needs = "a rule that does not raise: this is a fault of the rule, not of the run"
        return [Finding(rule=name, verdict=Verdict.UNDECIDED, message=text, needs=needs)]
    if found:
        return found
    text, needs = "the rule gave no answer", "a rule that returns a finding"
    return [Finding(rule=name, verdict=Verdict.UNDECIDED, message=text, needs=needs)]


def _key(finding: Finding, rows: Rows) -> tuple[int, int, int, int, str]:
    stage = Stage.OTHER
    if finding.tensor is not None:
        stage = stage_of(finding.tensor, rows.collections.get(finding.tensor, frozenset()))
    attempt = 0 if finding.attempt is None else finding.attempt
    step = _global_step(finding, rows) if finding.verdict is Verdict.FIRES else 0
    return (_PLACE[finding.verdict], attempt, step, int(stage), finding.rule)


def _global_step(finding: Finding, rows: Rows) -> int:
    """Return the number of the step over all modes, so that findings of two modes can be ordered."""
    if finding.first_step is None:
        return _NEVER
    if finding.tensor is None or finding.mode is None:
        return finding.first_step
    those = rows.of_tensor(finding.tensor)
    here = (those["mode"] == finding.mode.value) & (those["mode_step"] == finding.first_step)
    return int(those["step"][int(np.argmax(here))]) if here.any() else finding.first_step
