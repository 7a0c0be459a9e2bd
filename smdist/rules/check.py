"""`check`: ask a trial all rules at once. `smdist check` prints its answer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from smdist.errors import ConfigurationError, TensorUnavailableForStep, UnknownKey
from smdist.identity import ModeKeys, worker_name
from smdist.rules.across_ranks import ACROSS_RANKS
from smdist.rules.evidence import Evidence
from smdist.rules.findings import Finding
from smdist.rules.judge import EvidenceRule, judge
from smdist.trials import Trial
from smdist.trials.statistics_rows import read_rows

__all__ = ["RULES", "check", "evidence_of_trial"]

RULES: dict[str, type[EvidenceRule]] = {rule.__name__: rule for rule in ACROSS_RANKS}
"""Rules by name, to be made with their defaults."""


def check(trial: Trial, rules: Iterable[str | EvidenceRule] | None = None) -> list[Finding]:
    """Return what the rules find in a trial as it is now: problems first, in causal order.

    `rules` are names or rules with thresholds of their own; None stands for all. Raises UnknownKey
    for a name that no rule has.
    """
    if isinstance(rules, str):
        raise ConfigurationError(f"rules={rules!r} is one text; give a list of names")
    return judge(_chosen(rules), evidence_of_trial(trial))


def _chosen(rules: Iterable[str | EvidenceRule] | None) -> Sequence[EvidenceRule]:
    chosen = []
    for rule in RULES if rules is None else rules:
        if isinstance(rule, str) and rule not in RULES:
            raise UnknownKey(rule, tuple(RULES), "rules")
        chosen.append(RULES[rule]() if isinstance(rule, str) else rule)
    return chosen


def evidence_of_trial(trial: Trial) -> Evidence:
    """Read the rows of a trial; raw values are read when a rule asks for them."""

    def raw(
        tensor: str, mode: ModeKeys, mode_step: int, rank: int
    ) -> np.ndarray[Any, np.dtype[Any]] | None:
        try:
            return trial.tensor(tensor).value(mode_step, mode, worker_name(rank))
        except TensorUnavailableForStep:
            return None

    ended = trial.catalogue.finished  # before the rows are read: a live run may end meanwhile
    rows = read_rows(trial)
    progress = {rank: report.last_seen for rank, report in trial.ranks().items()}
    return Evidence(rows, raw, ended, time.time(), progress)
