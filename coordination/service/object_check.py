"""Find stored objects that a merged view names and that are gone, so that a merge can say so.

A view is made of manifests and says nothing about whether segments and layouts still exist. Called by
`merge_once` for `smdist merge`: costs one listing of all segments, so uploaders do not do it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from smdist.coordination.view.run_view import StepKey, View
from smdist.coordination.view.step_index import StepIndex
from smdist.format.manifest import layout_key
from smdist.identity import ModeKeys
from smdist.storage.store import Store

__all__ = ["MissingObjects", "find_missing_objects"]


@dataclass(frozen=True)
class MissingObjects:
    """Objects that are gone: key -> number of steps; `complete_steps` lack one and count as complete."""

    keys: dict[str, int]
    complete_steps: int


async def find_missing_objects(
    store: Store, view: View, index: StepIndex, layouts: Collection[str]
) -> MissingObjects:
    """List the segments of a run and return what `view` names and is not there.

    `layouts` are the digests of those that could be read, `index` holds the steps of `view`.
    """
    # Listed after the view was read: segments are stored before the manifests that name them.
    stored = set(await store.list("segments/"))
    users: dict[str, set[tuple[int, StepKey]]] = {}
    for attempt, rank, _ in view.ranks():
        for entry in view.entries(attempt, rank):
            step = (attempt, (entry.mode, entry.mode_step))
            if entry.segment.startswith("segments/") and entry.segment not in stored:
                users.setdefault(entry.segment, set()).add(step)
            if entry.layout and entry.layout not in layouts:
                users.setdefault(layout_key(entry.layout), set()).add(step)
    keys = {key: len(steps) for key, steps in sorted(users.items())}
    affected = set[tuple[int, StepKey]]().union(*users.values())
    return MissingObjects(keys, sum(_is_complete(index, *step) for step in affected))


def _is_complete(index: StepIndex, attempt: int, key: StepKey) -> bool:
    mode, mode_step = key
    facts = index.find(mode_step, ModeKeys(mode))
    return facts is not None and facts.attempt == attempt and facts.complete
