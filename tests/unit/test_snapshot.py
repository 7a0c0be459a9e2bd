"""A view that was packed and loaded is the same view."""

from __future__ import annotations

from hypothesis import given

from smdist.coordination.merge import Fact, View, fold
from smdist.coordination.snapshot import Packed, load_view, pack
from smdist.storage import MemoryStore, sync
from tests.unit.test_merge import facts


def put(store: MemoryStore, packed: Packed) -> None:
    for key, data in packed.objects:
        sync.run(store.put(key, [data]))
    sync.run(store.put(packed.head_key, [packed.head]))


def packed_of(view: View, previous: Packed | None = None, number: int = 1) -> Packed:
    return pack(
        view,
        previous,
        run_id="run",
        epoch=1,
        number=number,
        writer="w",
        now=10.0,
        interval_s=2.0,
        final=False,
        layouts={},
    )


@given(facts)
def test_what_was_packed_is_loaded_as_it_was(some: list[Fact]) -> None:
    view = fold(some)
    before = view.canonical()
    packed = packed_of(view)
    store = MemoryStore()
    put(store, packed)
    assert packed.view.canonical() == before
    assert sync.run(load_view(store, packed.pointer)).view.canonical() == before
