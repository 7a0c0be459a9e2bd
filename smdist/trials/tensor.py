"""One tensor of a trial, over all its steps and ranks."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

from smdist.errors import (
    ShapeUnavailableForStep,
    StepNotYetAvailable,
    TensorUnavailableForStep,
)
from smdist.identity import ModeKeys, worker_name
from smdist.trials.arguments import Worker, plain_arguments
from smdist.trials.reductions import merged, reduce_all, reduction_name, saved_reductions

if TYPE_CHECKING:
    from smdist.coordination.view.membership import StepFacts
    from smdist.trials.catalogue import Catalogue, TensorLocation
    from smdist.trials.live import LiveTrial
    from smdist.trials.segment_reader import Array

__all__ = ["Tensor"]

GLOBAL = ModeKeys.GLOBAL


@plain_arguments
class Tensor:
    """`mode` GLOBAL means that step numbers are global ones, whatever the mode of the step was.

    It may be given by its name. `worker` is a name such as "worker_3" or a rank; None is the lowest
    rank that has the tensor.
    """

    def __init__(self, name: str, trial: LiveTrial) -> None:
        self.name = name
        self.trial = trial

    def __repr__(self) -> str:
        steps = self.steps(show_incomplete_steps=True)
        extent = f"{len(steps)} steps {steps[0]}..{steps[-1]}" if steps else "no steps"
        return f"<Tensor {self.name!r} of trial {self.trial.name!r}: {extent}>"

    # -- where -------------------------------------------------------------------------------

    def steps(self, mode: ModeKeys = GLOBAL, show_incomplete_steps: bool = False) -> list[int]:
        """Return the COMPLETE steps with this tensor on any rank; incomplete ones on request."""
        return list(self._steps(self.trial.catalogue, mode, show_incomplete_steps))

    def _steps(
        self, catalogue: Catalogue, mode: ModeKeys, incomplete: bool
    ) -> dict[int, StepFacts]:
        return {
            number: facts
            for number, facts in catalogue.of_mode(mode).items()
            if (incomplete or facts.complete) and catalogue.has(facts, self.name)
        }

    def prev_steps(self, step: int, n: int | None = None, mode: ModeKeys = GLOBAL) -> list[int]:
        """Return the last `n` steps up to and including `step`, or all of them."""
        steps = self.steps(mode)
        before = steps[: bisect_right(steps, step)]
        return before if n is None else before[max(0, len(before) - n) :]

    def workers(self, step_num: int, mode: ModeKeys = GLOBAL) -> list[str]:
        """Return the workers that have it at that step, in order of rank."""
        return [worker_name(one.rank) for one in self._holders(step_num, mode, partial=True)]

    # -- values ------------------------------------------------------------------------------

    def value(self, step_num: int, mode: ModeKeys = GLOBAL, worker: Worker = None) -> Array:
        found = self.locate(step_num, mode, worker)
        if found.tensor.offset < 0:
            raise TensorUnavailableForStep(
                self.name, step_num, mode, has_reductions=found.tensor.row >= 0
            )
        return self.trial.reader.values([found])[0]

    def values(
        self, mode: ModeKeys = GLOBAL, worker: Worker = None, show_incomplete_steps: bool = False
    ) -> dict[int, Array]:
        """Return values by step: every step that `worker` has; without one the COMPLETE steps."""
        found = self._over_steps(mode, worker, show_incomplete_steps)
        raw = {number: one for number, one in found.items() if one.tensor.offset >= 0}
        if found and not raw:
            number, one = next(iter(found.items()))
            raise TensorUnavailableForStep(
                self.name, number, mode, has_reductions=one.tensor.row >= 0
            )
        return dict(zip(raw, self.trial.reader.values(list(raw.values())), strict=True))

    def shape(
        self, step_num: int, mode: ModeKeys = GLOBAL, worker: Worker = None
    ) -> tuple[int, ...]:
        try:
            return self.locate(step_num, mode, worker).tensor.shape
        except TensorUnavailableForStep:
            raise ShapeUnavailableForStep(self.name, step_num, mode) from None

    def shapes(
        self, mode: ModeKeys = GLOBAL, worker: Worker = None, show_incomplete_steps: bool = False
    ) -> dict[int, tuple[int, ...]]:
        """Return shapes by step, for the steps that `values` returns."""
        found = self._over_steps(mode, worker, show_incomplete_steps)
        return {number: one.tensor.shape for number, one in found.items()}

    # -- reductions --------------------------------------------------------------------------

    def reduction_value(
        self,
        step_num: int,
        reduction_name: str,
        mode: ModeKeys = GLOBAL,
        worker: Worker = None,
        abs: bool = False,
    ) -> np.float64:
        """Return a reduction as saved, else computed from the raw value: the same number."""
        name = _reduction(reduction_name, abs)
        found = self.locate(step_num, mode, worker)
        (reduced,) = reduce_all([found], [name], self.trial.reader)
        if reduced is None:
            raise self._no_reduction(name, step_num, mode, [found])
        return reduced[name]

    def reduction_values(
        self, step_num: int, mode: ModeKeys = GLOBAL, worker: Worker = None
    ) -> dict[tuple[str, bool], np.float64]:
        """Return `(name, abs)` -> value for all saved statistics; {} if there are none."""
        found = self.locate(step_num, mode, worker)
        return {
            (name.removeprefix("abs_"), name.startswith("abs_")): value
            for name, value in saved_reductions(found, self.trial.reader).items()
        }

    # -- all ranks at one step ---------------------------------------------------------------

    def stack(self, step_num: int, mode: ModeKeys = GLOBAL, *, partial: bool = False) -> Array:
        """Return one array `[ranks, *shape]` in order of rank; `workers(step)` names its rows.

        Of a step that is not COMPLETE only when `partial` says so.
        """
        found = self._holders(step_num, mode, partial)
        if not all(one.tensor.offset >= 0 for one in found):
            raise TensorUnavailableForStep(self.name, step_num, mode, has_reductions=True)
        shapes = {worker_name(one.rank): one.tensor.shape for one in found}
        if len(set(shapes.values())) > 1:
            raise TensorUnavailableForStep(
                self.name, step_num, mode, detail=f"shapes differ between ranks: {shapes}"
            )
        return np.stack(self.trial.reader.values(found))

    def across_ranks(
        self,
        step_num: int,
        reduction_name: str,
        mode: ModeKeys = GLOBAL,
        *,
        abs: bool = False,
        partial: bool = True,
    ) -> dict[str, float]:
        """Return the reduction of each worker's tensor, in order of rank."""
        name = _reduction(reduction_name, abs)
        found = self._holders(step_num, mode, partial)
        reduced = reduce_all(found, [name], self.trial.reader)
        if all(one is None for one in reduced):
            raise self._no_reduction(name, step_num, mode, found)
        pairs = zip(found, reduced, strict=True)
        return {worker_name(one.rank): float(r[name]) for one, r in pairs if r is not None}

    def reduction_of_all_ranks(
        self,
        step_num: int,
        reduction_name: str,
        mode: ModeKeys = GLOBAL,
        *,
        abs: bool = False,
        partial: bool = False,
    ) -> np.float64:
        """Return one reduction over all elements of all ranks, exact, from their statistics."""
        name = _reduction(reduction_name, abs)
        found = self._holders(step_num, mode, partial)
        reduced = merged(found, name, self.trial.reader)
        if reduced is None:
            raise self._no_reduction(name, step_num, mode, found)
        return reduced

    # -- finding -----------------------------------------------------------------------------

    def _no_reduction(
        self, name: str, step_num: int, mode: ModeKeys, found: list[TensorLocation]
    ) -> TensorUnavailableForStep:
        if any(one.tensor.offset >= 0 for one in found):
            detail = (
                f"complex numbers have no order, so {name!r} is not defined for them; the raw "
                "tensor is there: use value()"
            )
            return TensorUnavailableForStep(self.name, step_num, mode, False, detail)
        saved = any(one.tensor.row >= 0 for one in found)
        detail = f"neither the raw tensor nor {name!r} was saved"
        return TensorUnavailableForStep(self.name, step_num, mode, False, detail if saved else "")

    def _over_steps(
        self, mode: ModeKeys, worker: Worker, incomplete: bool
    ) -> dict[int, TensorLocation]:
        catalogue = self.trial.catalogue
        rank = None if worker is None else self.trial.rank_of(worker)
        if rank is None:
            steps = self._steps(catalogue, mode, incomplete)
            self.trial.prepare(catalogue, steps.values())
            every = {n: catalogue.first_holder(facts, self.name) for n, facts in steps.items()}
        else:
            steps = self._steps(catalogue, mode, incomplete=True)
            self.trial.prepare(catalogue, steps.values())
            every = {n: catalogue.find(facts, self.name, rank) for n, facts in steps.items()}
        for number, facts in catalogue.of_mode(mode).items():
            asked = rank is not None or incomplete or facts.complete
            if asked and every.get(number) is None:
                self.trial.check_layouts_read(catalogue, facts, rank)
        return {number: one for number, one in every.items() if one is not None}

    def locate(
        self, step_num: int, mode: ModeKeys = GLOBAL, worker: Worker = None
    ) -> TensorLocation:
        """Return where it lies at a step, and what of it was saved."""
        rank = None if worker is None else self.trial.rank_of(worker)
        return self.trial.ask(lambda catalogue: self._find(catalogue, step_num, mode, rank))

    def _find(
        self, catalogue: Catalogue, step_num: int, mode: ModeKeys, rank: int | None
    ) -> TensorLocation:
        facts = catalogue.require(step_num, mode)
        if rank is None:
            found = catalogue.first_holder(facts, self.name)
            coming = not catalogue.settled(facts)
        else:
            found = catalogue.find(facts, self.name, rank)
            coming = catalogue.may_still_write(facts, rank)
        if found is not None:
            return found
        self.trial.check_layouts_read(catalogue, facts, rank)
        if coming:
            raise StepNotYetAvailable(step_num, mode)
        raise self._absent(catalogue, facts, step_num, mode, rank)

    def _absent(
        self,
        catalogue: Catalogue,
        facts: StepFacts,
        step_num: int,
        mode: ModeKeys,
        rank: int | None,
    ) -> TensorUnavailableForStep:
        missing = catalogue.missing(facts)
        if rank is not None:
            missing = {r: reason for r, reason in missing.items() if r == rank}
        detail = ", ".join(f"{worker_name(r)}: {reason}" for r, reason in missing.items())
        return TensorUnavailableForStep(self.name, step_num, mode, False, detail)

    def _holders(self, step_num: int, mode: ModeKeys, partial: bool) -> list[TensorLocation]:
        def query(catalogue: Catalogue) -> list[TensorLocation]:
            facts = catalogue.require(step_num, mode)
            found = list(catalogue.holders(facts, self.name))
            if not (found and partial):
                self.trial.check_layouts_read(catalogue, facts)
            if found and (partial or facts.complete):
                return found
            if not catalogue.settled(facts):
                raise StepNotYetAvailable(step_num, mode)
            raise self._absent(catalogue, facts, step_num, mode, None)

        return self.trial.ask(query)


# Under another name, as the ancestor's argument `reduction_name` hides the function.
_reduction = reduction_name
