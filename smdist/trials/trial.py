"""A run as people ask about it.

A trial is a snapshot: whatever is asked, every answer is about the same set of steps, until the
trial moves on; `smdist.trials.live` says when it does.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from smdist.config.collection import Collection, CollectionKeys
from smdist.coordination.view.membership import Disagreement, MissingReason, RankReport, StepFacts
from smdist.errors import (
    ConfigurationError,
    StepNotYetAvailable,
    StepUnavailable,
    TensorUnavailable,
)
from smdist.format.manifest import CollectionInfo, SamplingChanges
from smdist.identity import ModeKeys, worker_name
from smdist.storage import loop_thread as sync
from smdist.trials.arguments import plain_arguments
from smdist.trials.catalogue import Catalogue
from smdist.trials.live import LiveTrial
from smdist.trials.report import (
    REDUCTIONS,
    AttemptInfo,
    DroppedTensors,
    Selected,
    attempt_info,
    describe,
    dropped,
    to_dataframe,
)
from smdist.trials.segment_reader import Array
from smdist.trials.statistics_rows import read_rows
from smdist.trials.tensor import Tensor

if TYPE_CHECKING:
    from smdist.storage.store import Store

__all__ = ["Trial"]

GLOBAL = ModeKeys.GLOBAL


@plain_arguments
class Trial(LiveTrial):
    """Made by `create_trial`."""

    def __init__(self, store: Store, name: str, path: str, catalogue: Catalogue) -> None:
        self.path = path
        self.logger = logging.getLogger("smdist.trials")
        super().__init__(store, name, catalogue)

    def __repr__(self) -> str:
        steps = list(self.catalogue.by_number)
        extent = f"{len(steps)} steps {steps[0]}..{steps[-1]}" if steps else "no steps yet"
        state = "finished" if self.catalogue.finished else "live"
        return (
            f"<Trial {self.name!r} at {self.path}: {len(self.catalogue.ranks)} workers, {extent}, "
            f"{len(self.catalogue.names)} tensors, {state}>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- tensors -----------------------------------------------------------------------------

    def tensor_names(
        self,
        show_prefixed_tensors: bool = False,
        *,
        step: int | None = None,
        mode: ModeKeys = GLOBAL,
        regex: str | Sequence[str] | None = None,
        collection: str | Collection | None = None,
    ) -> list[str]:
        """Return sorted names of saved tensors, filtered by step, mode, regex or collection.

        `show_prefixed_tensors` is taken for the sake of older scripts; nothing is ever hidden.
        """
        if regex is not None and collection is not None:
            raise ConfigurationError("tensor_names() takes regex or collection, not both")

        def query() -> list[str]:
            names = self._names(self.catalogue, step, mode)
            if regex is not None:
                patterns = [_pattern(r) for r in ([regex] if isinstance(regex, str) else regex)]
                names = {name for name in names if any(p.search(name) for p in patterns)}
            if collection is not None:
                names &= self._members(self.catalogue, collection)
            return sorted(names)

        return query() or (query() if self.refresh_if_live() else [])

    tensors = tensor_names

    @staticmethod
    def _names(catalogue: Catalogue, step: int | None, mode: ModeKeys) -> set[str]:
        steps = catalogue.of_mode(mode)
        if step is not None:
            return catalogue.names_of([steps[step]] if step in steps else [])
        return set(catalogue.names) if mode is GLOBAL else catalogue.names_of(steps.values())

    def _members(self, catalogue: Catalogue, collection: str | Collection) -> set[str]:
        """Return tensors saved as members; for a collection unknown to the run, those it matches."""
        name = collection if isinstance(collection, str) else collection.name
        if name == CollectionKeys.ALL:
            return set(catalogue.names)
        # A pattern of the run's own is not tried: it may take for ever, and the run knows its members.
        if name in {*catalogue.members, *self._described} or isinstance(collection, str):
            return catalogue.members.get(name, set())
        return {tensor for tensor in catalogue.names if collection.matches(tensor)}

    def tensor(self, tname: str) -> Tensor:
        if not self.has_tensor(tname):
            for facts in self.catalogue.steps.values():
                self.check_layouts_read(self.catalogue, facts)
            raise TensorUnavailable(tname, get_close_matches(tname, self.catalogue.names, n=3))
        return Tensor(tname, self)

    def has_tensor(self, tname: str) -> bool:
        return tname in self.catalogue.names or (
            self.refresh_if_live() and tname in self.catalogue.names
        )

    def collections(self) -> dict[str, Collection]:
        """Return the collections as the lowest rank configured them, with the names of saved tensors.

        Collections that only appear in saved tensors are added.
        """
        found = {name: _read_collection(info) for name, info in self._described.items()}
        for name, members in self.catalogue.members.items():
            collection = found.setdefault(name, Collection(name))
            collection.tensor_names = sorted({*collection.tensor_names, *members})
        return found

    def collection(self, coll_name: str) -> Collection | None:
        return self.collections().get(coll_name)

    def values(
        self,
        names: str | Iterable[str] | None = None,
        steps: Iterable[int] | None = None,
        workers: Iterable[str | int] | None = None,
        mode: ModeKeys = GLOBAL,
    ) -> dict[str, dict[int, dict[str, Array]]]:
        """Read many raw values with few requests: name -> step -> worker -> value.

        None means all there are, of incomplete steps too. What was not saved is left out.
        """
        selected = [
            one for one in self._select(names, steps, workers, mode) if one.found.tensor.offset >= 0
        ]
        result: dict[str, dict[int, dict[str, Array]]] = {}
        arrays = self.reader.values([one.found for one in selected])
        for (number, _, found), value in zip(selected, arrays, strict=True):
            of_step = result.setdefault(found.tensor.name, {}).setdefault(number, {})
            of_step[worker_name(found.rank)] = value
        return result

    rows = read_rows

    def inputs(self, step: int, mode: ModeKeys = GLOBAL) -> list[Array]:
        """Return the inputs of the model at a step: the collection `inputs`, in numeric order."""
        return self._batch(step, mode, collection=CollectionKeys.INPUTS)

    def labels(self, step: int, mode: ModeKeys = GLOBAL) -> list[Array]:
        return self._batch(step, mode, regex="label")

    def predictions(self, step: int, mode: ModeKeys = GLOBAL) -> list[Array]:
        return self._batch(step, mode, regex="prediction")

    def _batch(self, step: int, mode: ModeKeys, **which: Any) -> list[Array]:
        names = sorted(self.tensor_names(step=step, mode=mode, **which), key=_by_number)
        return [self.tensor(name).value(step, mode) for name in names]

    def to_dataframe(
        self,
        names: str | Iterable[str] | None = None,
        steps: Iterable[int] | None = None,
        workers: Iterable[str | int] | None = None,
        mode: ModeKeys = GLOBAL,
        reductions: Sequence[str] = REDUCTIONS,
    ) -> Any:
        """Build a pandas DataFrame: one row for each tensor of each rank at each step.

        `value` is that of tensors with one element. Reductions come from saved statistics; tensors
        that were only saved raw are read for them.
        """
        return to_dataframe(self.reader, self._select(names, steps, workers, mode), reductions)

    def _select(
        self,
        names: str | Iterable[str] | None,
        steps: Iterable[int] | None,
        workers: Iterable[str | int] | None,
        mode: ModeKeys,
    ) -> list[Selected]:
        if names is not None:
            names = [names] if isinstance(names, str) else list(names)
            for name in names:
                self.tensor(name)
        ranks = None if workers is None else {self.rank_of(worker) for worker in workers}
        catalogue = self.catalogue
        every = catalogue.of_mode(mode)
        chosen = every if steps is None else {n: every[n] for n in steps if n in every}
        self.prepare(catalogue, chosen.values())
        by_name: dict[str, list[Selected]] = {
            name: [] for name in (sorted(catalogue.names) if names is None else names)
        }
        for number, facts in chosen.items():
            for rank in (None,) if ranks is None else ranks:
                self.check_layouts_read(catalogue, facts, rank)
            for found in catalogue.all_holders(facts, by_name):
                if ranks is None or found.rank in ranks:
                    by_name[found.tensor.name].append(Selected(number, facts.attempt, found))
        return [one for of_name in by_name.values() for one in of_name]

    # -- steps -------------------------------------------------------------------------------

    def steps(self, mode: ModeKeys = GLOBAL, show_incomplete_steps: bool = False) -> list[int]:
        """Return the COMPLETE steps, or all of which any rank has something."""

        def query() -> list[int]:
            steps = self.catalogue.of_mode(mode).items()
            return [n for n, facts in steps if show_incomplete_steps or facts.complete]

        return query() or (query() if self.refresh_if_live() else [])

    @property
    def last_complete_step(self) -> int:
        """Return the greatest global step that is COMPLETE, -1 if there is none."""
        return self.catalogue.last_complete_step

    @property
    def range_steps(self) -> tuple[int | None, int | None]:
        return self.catalogue.range_steps

    def modes(self) -> list[ModeKeys]:
        """Return the modes with saved steps, without GLOBAL."""
        return [mode for mode in self.catalogue.saved_modes if mode is not GLOBAL]

    def mode(self, global_step: int) -> ModeKeys | None:
        return self.mode_modestep(global_step)[0]

    def mode_step(self, global_step: int) -> int | None:
        return self.mode_modestep(global_step)[1]

    def mode_modestep(self, global_step: int) -> tuple[ModeKeys | None, int | None]:
        facts = self._step_or_none(global_step, GLOBAL)
        if facts is None:
            return None, None
        mode, mode_step = facts.key
        return ModeKeys(mode), facts.step if mode == GLOBAL.value else mode_step

    def global_step(self, mode: ModeKeys, mode_step: int) -> int | None:
        if mode is GLOBAL:
            return mode_step
        facts = self._step_or_none(mode_step, mode)
        return None if facts is None else facts.step

    def _step_or_none(self, number: int, mode: ModeKeys) -> StepFacts | None:
        try:
            return self.ask(lambda catalogue: catalogue.require(number, mode))
        except (StepNotYetAvailable, StepUnavailable):
            return None

    def missing(self, step: int, mode: ModeKeys = GLOBAL) -> dict[int, MissingReason]:
        """Return why each missing rank is missing from that step; {} if the step is COMPLETE."""

        def query(catalogue: Catalogue) -> dict[int, MissingReason]:
            return catalogue.missing(catalogue.require(step, mode))

        return self.ask(query)

    def disagreements(self) -> list[Disagreement]:
        """Return steps to which ranks gave different global numbers; the lowest rank's is used."""
        steps = sorted(self.catalogue.steps.items())
        return [facts.disagreement for _, facts in steps if facts.disagreement is not None]

    # -- ranks -------------------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """Return how many ranks of the newest attempt save."""
        return max(
            (len(self.catalogue.expected[a]) for a in self.catalogue.attempts[-1:]), default=0
        )

    def ranks(self, attempt: int | None = None) -> dict[int, RankReport]:
        """Return a report of each rank as of the last refresh, of the newest attempt or `attempt`."""
        newest = self.catalogue.attempts[-1] if self.catalogue.attempts else 0
        return dict(self.catalogue.reports(newest if attempt is None else attempt))

    def attempts(self) -> list[AttemptInfo]:
        """Return the starts of the job: one, and one more for each resume or restart."""
        return [attempt_info(self.catalogue, attempt) for attempt in self.catalogue.attempts]

    def troubles(self) -> dict[str, list[str]]:
        """Return problems beside the training: worker -> messages; "" for unreadable objects."""
        found: dict[str, list[str]] = {}
        for _, rank, known in self.catalogue.view.ranks():
            for _, _, message in sorted(known.troubles):
                found.setdefault(worker_name(rank), []).append(message)
        if unreadable := self.troubles_of_objects():
            found[""] = list(unreadable.values())
        return found

    warnings = troubles

    def sampling_changes(self) -> list[SamplingChanges]:
        """Return what `overhead_budget` has left out, by attempt and rank: from which step on."""
        return sync.run(self._loader.sampling_changes())

    thinned = sampling_changes

    def dropped(self) -> list[DroppedTensors]:
        """Return what was not saved and why, in order of attempt, rank and step."""
        return dropped(self.catalogue)

    def describe(self) -> str:
        """Describe the run in a few lines."""
        return describe(self.name, self.path, self.catalogue, self.troubles())


def _pattern(regex: str) -> re.Pattern[str]:
    try:
        return re.compile(regex)
    except (re.error, TypeError) as error:
        raise ConfigurationError(
            f"regex={regex!r} is no regular expression: {error}; re.escape() makes one of a name"
        ) from error


def _by_number(name: str) -> tuple[str, int]:
    found = re.fullmatch(r"(.*)_(\d{1,18})", name)
    return (found[1], int(found[2])) if found else (name, -1)


def _read_collection(info: CollectionInfo) -> Collection:
    regex, names = list(info.include_regex), list(info.tensor_names)
    try:
        return Collection(
            info.name, regex, names, info.reduction_config or None, info.save_config or None
        )
    except ConfigurationError:
        # A newer writer may use settings that this version does not know. The names still hold.
        return Collection(info.name, regex, names)
