"""`check`: ask a trial all rules at once. `smdist check` prints its answer."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from smdist.errors import ConfigurationError, TensorUnavailableForStep
from smdist.identity import ModeKeys, worker_name
from smdist.rules.across_ranks import ACROSS_RANKS
from smdist.rules.evidence import Evidence
from smdist.rules.findings import Finding
from smdist.rules.judge import EvidenceRule, judge
from smdist.rules.registry import build
from smdist.trials import Trial
from smdist.trials.statistics_rows import read_rows

__all__ = ["check", "evidence_of_trial"]

# Without false alarms on healthy runs as far as is known. Rules of the ancestor with thresholds that
# depend on the model (LossNotDecreasing, ...) are asked for by name.
_BY_DEFAULT = (*(rule.__name__ for rule in ACROSS_RANKS), "ExplodingTensor", "StalledTrainingRule")


def check(trial: Trial, rules: Iterable[str | EvidenceRule] | None = None) -> list[Finding]:
    """Return what the rules find in a trial as it is now: problems first, in causal order.

    `rules` are names or rules with parameters of their own; None stands for the rules across ranks and
    two more. Raises UnknownKey for a name that no rule has.
    """
    if isinstance(rules, str):
        raise ConfigurationError(f"rules={rules!r} is one text; give a list of names")
    chosen = [build(rule) if isinstance(rule, str) else rule for rule in rules or _BY_DEFAULT]
    return judge(chosen, evidence_of_trial(trial))


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
    return Evidence(rows, raw, ended, time.time(), _last_progress(trial))


def _last_progress(trial: Trial) -> dict[int, float]:
    """Return when each rank of the newest attempt closed its last step."""
    attempts = trial.catalogue.view.attempts
    newest = attempts[max(attempts)] if attempts else {}
    return {rank: known.closed_at for rank, known in newest.items() if known.closed_at > 0}
