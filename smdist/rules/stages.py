"""Stages: where in a training step a tensor comes into being. Faults travel from low to high. Pure."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import TYPE_CHECKING

from smdist.config.collection import CollectionKeys

if TYPE_CHECKING:
    from smdist.tables.rows import Rows

__all__ = ["GRADIENT_PREFIX", "Stage", "is_buffer", "of_stage", "stage_of"]

GRADIENT_PREFIX = "gradient/"  # followed by the name of the weight


class Stage(IntEnum):
    """The causal order within a step. OTHER are tensors of which neither name nor collection tells."""

    INPUT = 0
    OUTPUT = 1
    OTHER = 2
    LOSS = 3
    GRADIENT = 4
    WEIGHT = 5
    OPTIMIZER = 6


_OF_COLLECTION = {
    # The first that holds decides: a bias is also a weight, a loss also an output.
    CollectionKeys.LOSSES: Stage.LOSS,
    CollectionKeys.GRADIENTS: Stage.GRADIENT,
    CollectionKeys.OPTIMIZER_VARIABLES: Stage.OPTIMIZER,
    CollectionKeys.WEIGHTS: Stage.WEIGHT,
    CollectionKeys.BIASES: Stage.WEIGHT,
    CollectionKeys.INPUTS: Stage.INPUT,
    CollectionKeys.OUTPUTS: Stage.OUTPUT,
    CollectionKeys.PREDICTIONS: Stage.OUTPUT,
    CollectionKeys.LAYERS: Stage.OUTPUT,
}
_BUFFER = re.compile(r"(running_mean|running_var|num_batches_tracked|moving_mean|moving_variance)")
_INPUT, _OUTPUT = re.compile(r"_input_\d+$"), re.compile(r"_output_\d+$")


def stage_of(name: str, collections: frozenset[str]) -> Stage:
    """Return the stage of a tensor, from its collections, else from its name."""
    for collection, stage in _OF_COLLECTION.items():
        if collection in collections:
            return Stage.INPUT if stage is Stage.OUTPUT and _INPUT.search(name) else stage
    if name.startswith(GRADIENT_PREFIX):
        return Stage.GRADIENT
    if _INPUT.search(name):
        return Stage.INPUT
    return Stage.OUTPUT if _OUTPUT.search(name) else Stage.OTHER


def is_buffer(name: str) -> bool:
    """Check for a running statistic, such as those of BatchNorm, which ranks keep for themselves."""
    return _BUFFER.search(name) is not None


def of_stage(rows: Rows, *stages: Stage) -> list[str]:
    """Return the names of these stages, without buffers."""
    none: frozenset[str] = frozenset()
    return [
        name
        for name in rows.names
        if stage_of(name, rows.collections.get(name, none)) in stages and not is_buffer(name)
    ]
