"""Merges a run as a coordinator does: reads what is new, packs it, puts it, moves the pointer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from smdist.coordination.snapshot.pack import POINTER_KEY, PackedSnapshot, load_view, pack
from smdist.coordination.view.run_view import View, merge
from smdist.format.layout import Layout
from smdist.format.stored_json import encode
from smdist.storage import loop_thread as sync
from smdist.storage.store import Store
from smdist.trials.run_loader import RunLoader


@dataclass
class SnapshotWriter:
    store: Store
    epoch: int = 1
    number: int = 0
    view: View = field(default_factory=View)
    packed: PackedSnapshot | None = None
    layouts: dict[str, Layout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._loader = RunLoader(self.store)

    def write(
        self, *, final: bool = False, age_s: float = 0.0, interval_s: float = 60.0
    ) -> SnapshotWriter:
        news = sync.run(self._loader.poll())
        self._loader.confirm()
        self.layouts |= news.layouts
        self.number += 1
        self.packed = pack(
            merge(self.view, news.facts),
            self.packed,
            run_id="run",
            epoch=self.epoch,
            number=self.number,
            writer="w",
            now=time.time() - age_s,
            interval_s=interval_s,
            final=final,
            layouts=self.layouts,
        )
        self.view = self.packed.view
        for key, data in self.packed.objects:
            sync.run(self.store.put(key, [data]))
        sync.run(self.store.put(self.packed.head_key, [self.packed.head]))
        sync.run(self.store.put(POINTER_KEY, [encode(self.packed.pointer, POINTER_KEY)]))
        return self

    def restart(self) -> SnapshotWriter:
        """Forget everything but the pointer, and go on from what it names."""
        assert self.packed is not None
        loaded = sync.run(load_view(self.store, self.packed.pointer))
        self.view, self.layouts, self.packed = loaded.view, dict(loaded.layouts), None
        return self
