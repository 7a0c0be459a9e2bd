"""Rules: conditions on trials, evaluated at every saved step or over all rows of a run."""

from __future__ import annotations

from smdist.rules.check import check
from smdist.rules.evidence import Evidence
from smdist.rules.findings import Finding, Verdict
from smdist.rules.registry import build, default_rules
from smdist.rules.req_tensors import RequiredTensors, RequiredTensorsForTrial
from smdist.rules.rule import Rule
from smdist.rules.rule_invoker import invoke_rule

__all__ = [
    "Evidence",
    "Finding",
    "RequiredTensors",
    "RequiredTensorsForTrial",
    "Rule",
    "Verdict",
    "build",
    "check",
    "default_rules",
    "invoke_rule",
]
