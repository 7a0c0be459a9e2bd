"""Which tensors of a Keras step are wanted, sorted by the place in the step where they are seen.

`KerasRecording` computes these sets on the training thread, once per model and plan. `StepProbes` reads
them to decide where to look. Everything here is pure.

A gradient has two stages: "local" is what the replica computed, "synced" is what a Horovod reduction
made of it. Hooks that share one step may want different stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from smdist.planning import Planner
from smdist.workers.keras_adapter.variable_names import VariableNames, gradient_name

__all__ = [
    "NOTHING",
    "SYNCED_PREFIX",
    "AnyStep",
    "CaptureSet",
    "capture_set_of",
    "common",
    "includes",
    "select_stage",
    "union",
    "with_stage",
]

SYNCED_PREFIX = "synced:"  # before the name of a gradient of the synced stage
_MODEL = ("inputs", "labels", "predictions", "batch_loss")
_NUMBERS = range(16)  # how many tensors a layer returns is not known before it runs


class CaptureSet(NamedTuple):
    """Paths of layers and variables, and names of the model's own tensors."""

    inputs: frozenset[str]  # layers
    outputs: frozenset[str]  # layers
    gradients: frozenset[str]  # variables
    model: frozenset[str]
    synced: frozenset[str] = frozenset()  # variables, gradients after their reduction


NOTHING = CaptureSet(*[frozenset[str]()] * 4)


def union(sets: Sequence[CaptureSet]) -> CaptureSet:
    return CaptureSet(*(frozenset[str]().union(*parts) for parts in zip(*sets, strict=True)))


def common(one: CaptureSet, other: CaptureSet) -> CaptureSet:
    return CaptureSet(*(mine & its for mine, its in zip(one, other, strict=True)))


def includes(large: CaptureSet, small: CaptureSet) -> bool:
    return all(its <= mine for mine, its in zip(large, small, strict=True))


def with_stage(wanted: CaptureSet, synced: bool) -> CaptureSet:
    """Move the gradients of `wanted` to the synced stage if `synced`."""
    return wanted._replace(gradients=frozenset(), synced=wanted.gradients) if synced else wanted


def select_stage(seen: dict[str, Any], synced: bool) -> dict[str, Any]:
    """Return what probes saw, with the gradients of one stage, by the names to save it under."""
    found = {n: value for n, value in seen.items() if not n.startswith(SYNCED_PREFIX)}
    if synced:
        rest = [n for n in seen if n not in found]
        found |= {n.removeprefix(SYNCED_PREFIX): seen[n] for n in rest}
    return found


class _Plan(Protocol):
    def wants(self, name: str) -> object | None: ...


def capture_set_of(plan: _Plan, names: VariableNames) -> CaptureSet:
    """Return what `plan` wants from the inside of a step of the model that `names` describes."""

    def wanted(name: str) -> bool:
        return plan.wants(name) is not None or any(
            plan.wants(f"{name}_{number}") is not None for number in _NUMBERS
        )

    return CaptureSet(
        frozenset(path for path in names.layers if wanted(f"{path}/inputs")),
        frozenset(path for path in names.layers if wanted(f"{path}/outputs")),
        # Frozen variables are included: which ones are trained is decided when a step is traced.
        frozenset(v.path for v in names.variables if plan.wants(gradient_name(v.path)) is not None),
        frozenset(name for name in _MODEL if wanted(name)),
    )


class AnyStep:
    """A plan that wants everything that any step may want."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def wants(self, name: str) -> object | None:
        return name if self._planner.wanted_anywhere(name) else None
