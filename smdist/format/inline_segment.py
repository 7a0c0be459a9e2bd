"""A segment so small that it travels inside the manifest that names it: one put commits both.

Only statistics and single numbers do, so a rank that saves nothing else costs one request per
flush, and a trial has its values as soon as it has read the manifests. Tensors always get an
object of their own. In such a manifest the entries name the segment "."; `settle` gives them the
key of the manifest itself, by which readers find the data again.
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
    """A manifest whose entries name real keys, and the segment it carried (or nothing)."""

    manifest: RankManifest
    data: bytes


def can_embed(segment: Segment, most_bytes: int) -> bool:
    return 0 < segment.nbytes <= most_bytes and all(
        entry.offset < 0 or prod(entry.shape) == 1
        for layout in segment.layouts.values()
        for entry in layout.tensors
    )


def embed_segment(manifest: RankManifest, segment: Segment) -> RankManifest:
    """`manifest` with `segment` in it. Offsets are those within the segment, as ever."""
    steps = tuple(_renamed(entry, _HERE) if entry.segment else entry for entry in manifest.steps)
    return msgspec.structs.replace(manifest, steps=steps, attached=b"".join(segment.chunks))


def extract_segment(key: str, manifest: RankManifest) -> ExtractedSegment:
    """What a manifest read from `key` means."""
    if not manifest.attached:
        return ExtractedSegment(manifest, b"")
    steps = tuple(_renamed(e, key) if e.segment == _HERE else e for e in manifest.steps)
    bare = msgspec.structs.replace(manifest, steps=steps, attached=b"")
    return ExtractedSegment(bare, manifest.attached)


def _renamed(entry: StepEntry, segment: str) -> StepEntry:
    return msgspec.structs.replace(entry, segment=segment)
