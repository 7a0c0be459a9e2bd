"""Built-in rules: pure functions of rows. Each is a frozen dataclass of its parameters."""

from __future__ import annotations

from smdist.rules.builtin.activations import DeadRelu, SaturatedActivation
from smdist.rules.builtin.base import BuiltInRule
from smdist.rules.builtin.changes import SimilarAcrossRuns, UnchangedTensor
from smdist.rules.builtin.classes import ClassImbalance, Confusion
from smdist.rules.builtin.initialization import PoorWeightInitialization
from smdist.rules.builtin.inputs import CheckInputImages, NLPSequenceRatio
from smdist.rules.builtin.losses import LossNotDecreasing, Overfit, Overtraining
from smdist.rules.builtin.progress import StalledTrainingRule
from smdist.rules.builtin.tensors import (
    AllZero,
    ExplodingTensor,
    TensorVariance,
    VanishingGradient,
)
from smdist.rules.builtin.trees import (
    CreateXgboostReport,
    FeatureImportanceOverweight,
    TreeDepth,
)
from smdist.rules.builtin.weights import WeightUpdateRatio

__all__ = [
    "AllZero",
    "BuiltInRule",
    "CheckInputImages",
    "ClassImbalance",
    "Confusion",
    "CreateXgboostReport",
    "DeadRelu",
    "ExplodingTensor",
    "FeatureImportanceOverweight",
    "LossNotDecreasing",
    "NLPSequenceRatio",
    "Overfit",
    "Overtraining",
    "PoorWeightInitialization",
    "SaturatedActivation",
    "SimilarAcrossRuns",
    "StalledTrainingRule",
    "TensorVariance",
    "TreeDepth",
    "UnchangedTensor",
    "VanishingGradient",
    "WeightUpdateRatio",
]
