"""Built-in rules: pure functions of rows. Each is a frozen dataclass of its parameters."""

from __future__ import annotations

from smdist.rules.builtin.activations import DeadRelu, SaturatedActivation
from smdist.rules.builtin.base import BuiltInRule
from smdist.rules.builtin.changes import SimilarAcrossRuns, UnchangedTensor
from smdist.rules.builtin.inputs import CheckInputImages, NLPSequenceRatio
from smdist.rules.builtin.losses import LossNotDecreasing, Overfit, Overtraining
from smdist.rules.builtin.progress import StalledTrainingRule
from smdist.rules.builtin.tensors import (
    AllZero,
    ExplodingTensor,
    TensorVariance,
    VanishingGradient,
)
from smdist.rules.builtin.weights import WeightUpdateRatio

__all__ = [
    "AllZero",
    "BuiltInRule",
    "CheckInputImages",
    "DeadRelu",
    "ExplodingTensor",
    "LossNotDecreasing",
    "NLPSequenceRatio",
    "Overfit",
    "Overtraining",
    "SaturatedActivation",
    "SimilarAcrossRuns",
    "StalledTrainingRule",
    "TensorVariance",
    "UnchangedTensor",
    "VanishingGradient",
    "WeightUpdateRatio",
]
