"""Small segments that are stored inside the manifest that names them, so that one put commits both.

Only statistics and single numbers are embedded. A rank that saves nothing else costs one request per
flush, and a trial has the values as soon as it has read the manifests. Tensors always get an object of
their own. Entries of such a manifest name the segment "."; `extract_segment` replaces that with the key
of the manifest, under which readers find the data again.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import msgspec

from smdist.format.manifest import RankManifest, StepEntry
from smdist.format.segment import Segment

__all__ = ["ExtractedSegment", "can_embed", "embed_segment", "extract_segment"]

_HERE = "."


class ExtractedSegment(NamedTuple):
    """A manifest whose entries name real keys, and the segment that was embedded in it, if any."""

    manifest: RankManifest
    data: bytes


def can_embed(segment: Segment, max_bytes: int) -> bool:
    return 0 < segment.nbytes <= max_bytes and all(
        entry.offset < 0 or prod(entry.shape) == 1
        for layout in segment.layouts.values()
        for entry in layout.tensors
    )


def embed_segment(manifest: RankManifest, segment: Segment) -> RankManifest:
    """Return `manifest` with `segment` in it. Offsets stay relative to the segment."""
    steps = tuple(_renamed(entry, _HERE) if entry.segment else entry for entry in manifest.steps)
    return msgspec.structs.replace(manifest, steps=steps, attached=b"".join(segment.chunks))


def extract_segment(key: str, manifest: RankManifest) -> ExtractedSegment:
    """Separate the manifest that was read from `key` and the segment in it."""
    if not manifest.attached:
        return ExtractedSegment(manifest, b"")
    steps = tuple(_renamed(e, key) if e.segment == _HERE else e for e in manifest.steps)
    bare = msgspec.structs.replace(manifest, steps=steps, attached=b"")
    return ExtractedSegment(bare, manifest.attached)


def _renamed(entry: StepEntry, segment: str) -> StepEntry:
    return msgspec.structs.replace(entry, segment=segment)
