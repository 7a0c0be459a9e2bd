"""Many rules on one evidence: a bad rule disturbs no other, and causes come before consequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from smdist.identity import ModeKeys
from smdist.rules.evidence import Evidence
from smdist.rules.findings import Finding, Verdict
from smdist.rules.judge import judge
from tests.support.rows import evidence_of

TRAIN = ModeKeys.TRAIN
NAMES = {"w": ["weights"], "gradient/w": ["gradients"], "x_input_0": ["inputs"]}


@dataclass(frozen=True)
class Says:
    findings: tuple[Finding, ...]

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        return list(self.findings)


class Raises:
    def evaluate(self, evidence: Evidence) -> list[Finding]:
        raise ZeroDivisionError("by nothing")


def fires(tensor: str, step: int, mode: ModeKeys = TRAIN) -> Finding:
    text = f"{tensor} at {step}"
    return Finding(
        rule="R", verdict=Verdict.FIRES, message=text, tensor=tensor, first_step=step, mode=mode
    )


def evidence() -> Evidence:
    values = {(name, TRAIN, step, 0): np.ones(2) for name in NAMES for step in range(5)}
    values["w", ModeKeys.EVAL, 0, 0] = np.ones(2)
    return evidence_of(values, NAMES, global_steps={(ModeKeys.EVAL, 0): 100})


def test_causes_come_first() -> None:
    quiet = Finding(rule="Q", verdict=Verdict.QUIET, message="fine")
    unknown = Finding(rule="U", verdict=Verdict.UNDECIDED, message="?", needs="more")
    late = fires("w", 0, ModeKeys.EVAL)  # the global step 100
    told = (quiet, late, fires("x_input_0", 4), fires("w", 3), unknown, fires("gradient/w", 3))
    found = judge([Says(told)], evidence())
    assert [one.message for one in found] == [
        "gradient/w at 3",
        "w at 3",
        "x_input_0 at 4",
        "w at 0",
        "?",
        "fine",
    ]


def test_a_rule_that_raises_is_not_fine_and_disturbs_no_other() -> None:
    first, second, third = judge([Raises(), Says(()), Says((fires("w", 1),))], evidence())
    assert first.verdict is Verdict.FIRES
    assert (second.rule, second.verdict) == ("Raises", Verdict.UNDECIDED)
    assert "ZeroDivisionError: by nothing" in second.message
    assert (third.rule, third.verdict) == ("Says", Verdict.UNDECIDED)
