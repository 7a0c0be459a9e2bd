"""Rules that compare ranks. Each is a frozen set of thresholds with `evaluate(evidence)`."""

from __future__ import annotations

from smdist.rules.across_ranks.first_non_finite import FirstNonFinite
from smdist.rules.across_ranks.identical_data import IdenticalData
from smdist.rules.across_ranks.loss_spike import LossSpike
from smdist.rules.across_ranks.no_update import NoUpdate
from smdist.rules.across_ranks.norm_mismatch import NormMismatch
from smdist.rules.across_ranks.not_zeroed import NotZeroed
from smdist.rules.across_ranks.outlier_rank import OutlierRank
from smdist.rules.across_ranks.replica_desync import ReplicaDesync
from smdist.rules.across_ranks.step_skew import StepSkew
from smdist.rules.across_ranks.straggler import Straggler

__all__ = [
    "ACROSS_RANKS",
    "FirstNonFinite",
    "IdenticalData",
    "LossSpike",
    "NoUpdate",
    "NormMismatch",
    "NotZeroed",
    "OutlierRank",
    "ReplicaDesync",
    "StepSkew",
    "Straggler",
]

ACROSS_RANKS = (
    FirstNonFinite,
    ReplicaDesync,
    OutlierRank,
    IdenticalData,
    StepSkew,
    NoUpdate,
    NotZeroed,
    NormMismatch,
    LossSpike,
    Straggler,
)
"""All of them, with their defaults when called without arguments."""
