"""Small segments travel in their manifest, and stay what they are."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load

from smdist.format.inline_segment import can_embed, extract_segment
from smdist.format.manifest import RankManifest, manifest_key
from smdist.format.segment import Segment
from smdist.format.stored_json import decode
from smdist.identity import ModeKeys
from smdist.storage import MemoryStore
from smdist.storage import loop_thread as sync
from tests.support.run_builder import Array, RunBuilder, Saved

TRAIN = ModeKeys.TRAIN
KEY = manifest_key("worker_0", 0, 0)
MEASURED = Saved(np.arange(5.0), raw=False, reductions=())


def written(tensors: dict[str, Array | Saved], most_bytes: int) -> tuple[MemoryStore, bytes]:
    store = MemoryStore()
    writer = RunBuilder(store).rank(0)
    writer.attach_bytes = most_bytes
    writer.step(TRAIN, 0, tensors).end()
    return store, sync.run(store.get(KEY))


def test_the_manifest_alone_holds_a_readable_segment() -> None:
    store, data = written({"loss": np.array(0.5), "weight": MEASURED}, 1 << 16)
    assert not sync.run(store.list("segments/"))
    assert load(decode(data, RankManifest, KEY).attached)["train/0/loss"] == 0.5


@pytest.mark.parametrize("tensor", [np.zeros(2), np.zeros((3, 1)), np.zeros(0)])
def test_tensors_get_an_object_of_their_own(tensor: Array) -> None:
    store, data = written({"loss": np.array(0.5), "t": tensor}, 1 << 16)
    assert len(sync.run(store.list("segments/"))) == 1
    assert decode(data, RankManifest, KEY).attached == b""


def test_limit_zero_embeds_nothing() -> None:
    store, data = written({"loss": np.array(0.5)}, 0)
    assert len(sync.run(store.list("segments/"))) == 1
    assert extract_segment(KEY, decode(data, RankManifest, KEY)).data == b""
    assert not can_embed(Segment("", (), 0, (), {}), 1 << 16)


def test_extraction_changes_only_the_segment_key() -> None:
    _, data = written({"loss": np.array(0.5)}, 1 << 16)
    stored = decode(data, RankManifest, KEY)
    settled, segment = extract_segment(KEY, stored)
    assert {entry.segment for entry in settled.steps} == {KEY}
    assert (settled.upto, settled.state, settled.attached) == (stored.upto, "ended", b"")
    assert segment == stored.attached
