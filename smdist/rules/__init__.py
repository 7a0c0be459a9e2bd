"""Rules: conditions that are evaluated at every saved step of a trial."""

from __future__ import annotations

from smdist.rules.check import check
from smdist.rules.findings import Finding, Verdict
from smdist.rules.req_tensors import RequiredTensors, RequiredTensorsForTrial
from smdist.rules.rule import Rule
from smdist.rules.rule_invoker import invoke_rule

__all__ = [
    "Finding",
    "RequiredTensors",
    "RequiredTensorsForTrial",
    "Rule",
    "Verdict",
    "check",
    "invoke_rule",
]
