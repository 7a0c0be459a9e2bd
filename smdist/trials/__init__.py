"""Questions about a run: `create_trial` opens it, `Trial` and `Tensor` answer."""

from __future__ import annotations

from smdist.coordination.view.membership import Disagreement, MissingReason, RankReport, RankStatus
from smdist.trials.catalogue import StepState
from smdist.trials.live import no_refresh
from smdist.trials.open import LocalTrial, S3Trial, create_trial
from smdist.trials.report import AttemptInfo, DroppedTensors
from smdist.trials.tensor import Tensor
from smdist.trials.trial import Trial

__all__ = [
    "AttemptInfo",
    "Disagreement",
    "DroppedTensors",
    "LocalTrial",
    "MissingReason",
    "RankReport",
    "RankStatus",
    "S3Trial",
    "StepState",
    "Tensor",
    "Trial",
    "create_trial",
    "no_refresh",
]
