"""The tensors that a rule needs at a step, fetched together before the rule runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smdist.errors import TensorUnavailableForStep

if TYPE_CHECKING:
    from collections.abc import Iterable

    from smdist.trials import Tensor, Trial

__all__ = ["RequiredTensors", "RequiredTensorsForTrial"]


class RequiredTensors:
    """The required tensors of a rule, by trial. `trial=None` means the base trial."""

    def __init__(self, base_trial: Trial, other_trials: Iterable[Trial] | None = None) -> None:
        self.base_trial = base_trial
        self._per_trial = {
            trial: RequiredTensorsForTrial(trial) for trial in (base_trial, *(other_trials or ()))
        }

    def _of(self, trial: Trial | None) -> RequiredTensorsForTrial:
        return self._per_trial[self.base_trial if trial is None else trial]

    def add(
        self,
        name: str,
        steps: Iterable[int],
        trial: Trial | None = None,
        should_match_regex: bool = False,
    ) -> None:
        """Require the tensor `name`, or all tensors that match it as a regex, at the global `steps`."""
        self._of(trial).add(name, steps, should_match_regex)

    def get_tensor_steps(self, name: str, trial: Trial | None = None) -> list[int]:
        return self._of(trial).get_tensor_steps(name)

    def get_names(self, trial: Trial | None = None) -> list[str]:
        return self._of(trial).get_names()

    def get(self, trial: Trial | None = None) -> list[Tensor]:
        return self._of(trial).get()

    def clear(self) -> None:
        for required in self._per_trial.values():
            required.clear()

    def fetch(self) -> None:
        for required in self._per_trial.values():
            required.fetch()


class RequiredTensorsForTrial:
    """The required tensors of one trial."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.logger = trial.logger
        self._steps: dict[str, list[int]] = {}
        self._tensors: dict[str, Tensor] = {}

    def add(self, name: str, steps: Iterable[int], should_match_regex: bool = False) -> None:
        wanted = list(steps)
        for one in self.trial.tensor_names(regex=name) if should_match_regex else [name]:
            self._tensors[one] = self.trial.tensor(one)
            self._steps.setdefault(one, []).extend(wanted)

    def get_tensor_steps(self, name: str) -> list[int]:
        return self._steps[name]

    def get_names(self) -> list[str]:
        return list(self._steps)

    def get(self) -> list[Tensor]:
        return list(self._tensors.values())

    def clear(self) -> None:
        self._steps.clear()
        self._tensors.clear()

    def fetch(self) -> None:
        """Wait for the steps and load the raw values of the lowest rank into the trial's cache.

        Tensors with reductions only are accepted. Raises TensorUnavailableForStep for a tensor that
        has neither at a step.
        """
        self.trial.wait_for_steps(sorted({step for some in self._steps.values() for step in some}))
        raw = []
        for name, tensor in self._tensors.items():
            for step in self._steps[name]:
                found = tensor.locate(step)
                if found.tensor.offset >= 0:
                    raw.append(found)
                elif found.tensor.row < 0:
                    raise TensorUnavailableForStep(name, step)
        self.trial.reader.warm(raw)
