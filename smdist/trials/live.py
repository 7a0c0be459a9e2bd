"""A trial of a run that may still grow: which moment it shows, and when it moves on.

A trial holds one immutable catalogue at a time and replaces it when it moves on:

- when `refresh()` or `wait_for_steps()` is called,
- on a live job, when `has_passed_step()` cannot answer or `loaded_all_steps` is read,
- on a live job, when an answer would be "not there yet" (StepNotYetAvailable, an unknown tensor, an empty
  list): it refreshes once and answers again.

It moves on to the newest snapshot of a coordinator, or else to what the ranks have written. The last
two rules keep loops such as `while not trial.loaded_all_steps:` going; `no_refresh` suspends them. Once
no rank may still write, only `refresh()` reads the store again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from smdist.coordination.view.membership import StepFacts, check_absent_ranks
from smdist.coordination.view.run_view import StepKey, View
from smdist.errors import (
    CorruptObject,
    InvalidWorker,
    NoMoreData,
    StepNotYetAvailable,
    StepUnavailable,
    StoreError,
    WaitTimeout,
)
from smdist.format.manifest import (
    RUN_KEY,
    CollectionInfo,
    Run,
    layout_key,
    manifest_key,
    parse_manifest_key,
    session_key,
)
from smdist.identity import ModeKeys, worker_name, worker_rank
from smdist.storage import is_remote
from smdist.storage import loop_thread as sync
from smdist.storage.store import Store
from smdist.trials.advance import advance, mark_damaged, touched_steps
from smdist.trials.arguments import plain_arguments
from smdist.trials.catalogue import Catalogue, StepState
from smdist.trials.freshness import RefreshDepth
from smdist.trials.run_loader import RunLoader
from smdist.trials.segment_reader import GAP, REMOTE_GAP, SegmentReader
from smdist.trials.snapshot_cache import SnapshotCache

__all__ = ["LiveTrial", "no_refresh"]

GLOBAL = ModeKeys.GLOBAL
T = TypeVar("T")

POLL_FIRST_S = 0.1
POLL_MOST_S = 2.0
_MOST_TOLD = 1000  # manifests of a rank that are missing, each by its name


@plain_arguments
class LiveTrial:
    """Questions may come from several threads; `refresh` is one at a time."""

    def __init__(self, store: Store, name: str, catalogue: Catalogue) -> None:
        self.name = name
        self.dynamic_refresh = True
        gap = REMOTE_GAP if is_remote(store.url) else GAP
        self.reader = SegmentReader(
            store, sync.run, gap=gap, session=self._session_of, damaged=self._spoiled
        )
        self._store = store
        self._snapshots = SnapshotCache(store, sync.run)
        self._loader = RunLoader(store, self._snapshots)
        self._refreshing = threading.Lock()
        self._described: dict[str, CollectionInfo] = {}
        self._unreadable: dict[str, str] = {}
        self.run: Run = sync.run(self._loader.run())
        self.catalogue = replace(catalogue, since=self.run.created)
        self._refresh("opening")
        sync.close_with(self, store.close)  # scripts seldom close a trial

    def close(self) -> None:
        sync.run(self._store.close())

    def workers(self) -> list[str]:
        """Return the workers that have started, in order of rank."""
        if not self.catalogue.ranks:
            self.refresh_if_live()
        return [worker_name(rank) for rank in self.catalogue.ranks]

    def rank_of(self, worker: str | int) -> int:
        """Return the rank of `worker`. Raises InvalidWorker if the run has no such worker."""
        try:
            rank = worker if isinstance(worker, int) else worker_rank(worker)
        except ValueError:
            raise InvalidWorker(worker, self.workers()) from None  # type: ignore[arg-type]
        if rank not in self.catalogue.ranks:
            raise InvalidWorker(worker_name(rank), self.workers())
        return rank

    def refresh(self) -> None:
        """Move on to what the store holds now. Reads only what is new."""
        self._refresh("asked")

    def _refresh(self, depth: RefreshDepth) -> None:
        with self._refreshing:
            update = sync.run(self._loader.poll(depth))
            for key in update.recovered:
                self._unreadable.pop(key, None)
            self._unreadable.update(update.troubles)
            self.reader.keep(update.attached)
            if update.collections is not None:
                described = update.collections.collections
                self._described = {info.name: info for info in described}
            base = self.catalogue.view if update.base is None else update.base
            self._warm(base, touched_steps(update.facts))
            catalogue = advance(
                self.catalogue, update.facts, update.layouts, time.time(), base=update.base
            )
            check_absent_ranks(self._store.url, catalogue.view)
            self.catalogue = catalogue
            self._loader.confirm()

    def _spoiled(self, error: StoreError) -> None:
        """Report a missing or damaged segment: steps with data in it are no longer complete."""
        with self._refreshing:
            self._unreadable[error.key] = f"{error.key} cannot be read: {error}"
            self.catalogue = mark_damaged(self.catalogue, error.key)

    def troubles_of_objects(self) -> dict[str, str]:
        """Return, by key, the objects that could not be read."""
        absent: dict[str, str] = {}
        for attempt, rank, known in self.catalogue.view.ranks():
            for seq in islice(known.missing_manifests, _MOST_TOLD):
                key = manifest_key(worker_name(rank), attempt, seq)
                absent[key] = f"{key} is missing, or could not be read"
            if len(known.missing_manifests) > _MOST_TOLD:
                absent[key] += f"; so are {len(known.missing_manifests) - _MOST_TOLD} after it"
        for attempt, rank, known in self.catalogue.view.ranks():
            key = session_key(worker_name(rank), attempt)
            if known.session is not None and not known.session.is_recorded:
                absent[key] = f"{key} is missing, damaged, or not of the run that {RUN_KEY} tells"
        # What a query has found since the last refresh is with who looked for it.
        found = (self._snapshots.troubles, self.reader.troubles, self._loader.troubles)
        return {**absent, **self._unreadable, **{k: v for some in found for k, v in some.items()}}

    def _session_of(self, manifest: str) -> str:
        named = parse_manifest_key(manifest)
        return self.catalogue.view.session(named.attempt, named.rank) if named is not None else ""

    def prepare(self, catalogue: Catalogue, facts: Iterable[StepFacts]) -> None:
        """Fetch together what finding tensors of these steps needs, rather than one by one."""
        self._warm(catalogue.view, ((one.attempt, one.key) for one in facts))

    def check_layouts_read(
        self, catalogue: Catalogue, facts: StepFacts, rank: int | None = None
    ) -> None:
        """Raise CorruptObject if it is not known what that step holds, as a layout cannot be read."""
        digest = catalogue.unread(facts, rank)
        if digest:
            key = layout_key(digest)
            why = self._unreadable.get(key, "it cannot be read")
            detail = f"{why}; so it is not known what step {facts.step} holds"
            raise CorruptObject(self._store.url, key, "read", detail)

    def _warm(self, view: View, steps: Iterable[tuple[int, StepKey]]) -> None:
        chunks = {}
        for attempt, key in steps:
            chunk = view.sealed[attempt].chunk(key) if attempt in view.sealed else None
            if chunk is not None:
                chunks[chunk.ref.key] = chunk
        self._snapshots.warm(chunks.values())

    refresh_data = refresh

    def maybe_refresh(self, name: str | None = None) -> None:
        """Move on, unless `no_refresh` or the end of the job says that there is no need."""
        self.refresh_if_live()

    def refresh_if_live(self, depth: RefreshDepth = "following") -> bool:
        if self.catalogue.finished or not self.dynamic_refresh:
            return False
        self._refresh(depth)
        return True

    def ask(self, query: Callable[[Catalogue], T]) -> T:
        """Answer `query` from the catalogue; after one refresh if the step is not there yet."""
        try:
            return query(self.catalogue)
        except StepNotYetAvailable:
            if not self.refresh_if_live("close"):
                raise
            self._check_same()
        except StepUnavailable:
            if not self._loader.snapshot_may_be_stale or not self.refresh_if_live("sure"):
                raise
        return query(self.catalogue)

    def _check_same(self) -> None:
        if self._loader.replaced is not None:
            raise self._loader.replaced

    @property
    def loaded_all_steps(self) -> bool:
        """Return whether every rank has ended or was lost, and all that they wrote is in view."""
        if not self.catalogue.finished:
            self.refresh_if_live()
        return self.catalogue.finished

    def has_passed_step(self, step: int, mode: ModeKeys = GLOBAL) -> StepState:
        state = self.catalogue.state(step, mode)
        if state is StepState.NOT_YET_AVAILABLE and self.refresh_if_live():
            state = self.catalogue.state(step, mode)
        return state

    def wait_for_steps(
        self,
        required_steps: Iterable[int],
        mode: ModeKeys = GLOBAL,
        timeout_s: float | None = None,
    ) -> None:
        """Return when every step is AVAILABLE. Moves on even under `no_refresh`.

        StepUnavailable: it was passed over. NoMoreData: the job ended before it. WaitTimeout. Without
        a timeout it waits as long as a rank that may still write the step shows signs of life.
        """
        deadline = _deadline(timeout_s)
        for step in required_steps:
            for _ in self._polls(deadline, f"step {step} of mode {mode.name}"):
                state = self.catalogue.state(step, mode)
                if state is StepState.UNAVAILABLE and self._loader.snapshot_may_be_stale:
                    self._refresh("sure")
                    state = self.catalogue.state(step, mode)
                if state is StepState.AVAILABLE:
                    break
                if state is StepState.UNAVAILABLE:
                    last = max(self.catalogue.of_mode(mode), default=None)
                    if self.catalogue.finished and (last is None or step > last):
                        raise NoMoreData(step, mode, last)
                    raise StepUnavailable(step, mode)

    def next_saved_step(
        self, step: int, mode: ModeKeys = GLOBAL, timeout_s: float | None = None
    ) -> int | None:
        """Wait for the first AVAILABLE step from `step` on; None if the job ends before it."""
        for _ in self._polls(_deadline(timeout_s), f"a step from {step} on"):
            found = self.catalogue.next_step(step, mode)
            if found is None:
                if self.catalogue.finished and not self._loader.snapshot_may_be_stale:
                    break
            elif self.catalogue.state(found, mode) is StepState.AVAILABLE:
                return found
        return None

    def _polls(self, deadline: float, what: str) -> Iterator[None]:
        """Yield, and refresh before every further turn, less and less often."""
        pause, last = POLL_FIRST_S, False
        yield
        while not last:
            last = time.monotonic() >= deadline
            self._refresh("sure" if last or self.catalogue.finished else "following")
            yield
            self._check_same()
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
            pause = min(2 * pause, POLL_MOST_S)
        raise WaitTimeout(f"{self._store.url}: {what} did not come in time")


def _deadline(timeout_s: float | None) -> float:
    return float("inf") if timeout_s is None else time.monotonic() + timeout_s


@contextmanager
def no_refresh(
    trials: LiveTrial | Iterable[LiveTrial],
) -> Iterator[LiveTrial | Iterable[LiveTrial]]:
    """Keep trials where they are, whatever is asked of them within."""
    every = [trials] if isinstance(trials, LiveTrial) else list(trials)
    before = [trial.dynamic_refresh for trial in every]
    for trial in every:
        trial.dynamic_refresh = False
    try:
        yield trials
    finally:
        for trial, dynamic in zip(every, before, strict=True):
            trial.dynamic_refresh = dynamic
