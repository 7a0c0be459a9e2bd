"""The JSON objects of a run and their keys in the store.

    run.json                                     Run           by the first rank
    sessions/<worker>/<attempt>.json             Session       each rank once, when its hook starts
    collections/<worker>.json                    Collections   each rank, when they change
    layouts/<digest>.json                        Layout        before the first manifest that names it
    segments/<worker>/<attempt>-<seq>-<life>.safetensors       before the manifest that names it
    manifests/<worker>/<attempt>-<seq>.json      RankManifest  the commit point of a rank
    heartbeats/<worker>/<attempt>.json           Heartbeat     every few seconds, overwritten
    thinned/<worker>/<attempt>.json              Thinned       when a budget changed what is saved
    spans/<worker>/<attempt>-<first>-<upto>.json RankSpan      after every 16th manifest; may be missing
    summaries/<worker>/<attempt>.json            RankSummary   after the last manifest; may be missing

A rank writes only its own keys (`run.json` and `layouts/` have the same bytes from any rank). The JSON
is the format, versioned by `Run.format`; these classes only read and write it. Unknown fields are
ignored, so a newer writer may add some.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from smdist.format.intervals import Intervals, to_intervals
from smdist.identity import ModeKeys, StepRef, worker_name
from smdist.limits import (
    Bytes,
    Digest,
    IncludeWorkers,
    Mode,
    Number,
    OptionalNumber,
    Rank,
    Seconds,
    SegmentKey,
    Time,
    Worker,
    WorldSize,
)

__all__ = [
    "FORMAT",
    "RUN_KEY",
    "CollectionInfo",
    "Collections",
    "Dropped",
    "Heartbeat",
    "ManifestId",
    "Owner",
    "RankManifest",
    "RankSpan",
    "RankState",
    "RankSummary",
    "Run",
    "SamplingChange",
    "SamplingChanges",
    "Session",
    "StepEntry",
    "collections_key",
    "expected_ranks",
    "heartbeat_key",
    "layout_key",
    "manifest_key",
    "parse_manifest_key",
    "parse_session_key",
    "parse_summary_key",
    "rank_saves",
    "sampling_changes_key",
    "segment_key",
    "session_from_manifest",
    "session_key",
    "span_key",
    "summary_key",
]

FORMAT = 1
RUN_KEY = "run.json"

RankState = Literal["active", "ended", "lost"]

Owner = tuple[int, int]
"""Attempt and rank: whose object it is."""


class Run(msgspec.Struct, frozen=True):
    run_id: str
    created: Time
    framework: str
    format: Number = FORMAT


class Session(msgspec.Struct, frozen=True):
    """One process of one rank, from the construction of its hook to its end."""

    session: str  # unique
    rank: Rank
    world_size: WorldSize
    attempt: Number
    include_workers: IncludeWorkers | tuple[Number, ...]  # "one", "all", or ranks
    started: Time
    host: str
    pid: Number
    launch: str  # identifies the launcher's invocation; "" if unknown
    restart: Number = 0  # how often the launcher restarted this job
    run_id: str = ""  # "" if not known yet

    @property
    def is_recorded(self) -> bool:
        """Return False for a session that was derived by `session_from_manifest`."""
        return bool(self.host or self.started)

    def expected_ranks(self) -> Intervals:
        """Return the ranks of this attempt that save."""
        return expected_ranks(self.world_size, self.include_workers)


def rank_saves(rank: int, include_workers: str | Sequence[int]) -> bool:
    """Return whether `include_workers` ("one", "all" or ranks) names `rank`: only then it joins a run."""
    if isinstance(include_workers, str):
        return include_workers == "all" or rank == 0
    return rank in include_workers


def expected_ranks(world_size: int, include_workers: str | Sequence[int]) -> Intervals:
    """Return the ranks of a world for which `rank_saves` holds. The world may be of any size."""
    if include_workers == "all":
        return ((0, world_size),) if world_size else ()
    if include_workers == "one":
        return ((0, 1),)
    return to_intervals(int(rank) for rank in include_workers if int(rank) < world_size)


class CollectionInfo(msgspec.Struct, frozen=True):
    name: str
    include_regex: tuple[str, ...] = ()
    tensor_names: tuple[str, ...] = ()
    save_config: dict[str, object] = {}
    reduction_config: dict[str, object] = {}


class Collections(msgspec.Struct, frozen=True):
    worker: str
    collections: tuple[CollectionInfo, ...]


class StepEntry(msgspec.Struct, frozen=True, array_like=True):
    """A block of a step of this rank. A step that was written in pieces has several.

    block:      ordinal of its first journal record: unique in a session, ascending in time
    closed:     with this block the step is complete. An entry that only closes a step has an empty
                `layout` and `segment`; a block of shapes alone may have an empty `segment`.
    planned:    False if nothing was due and only the script saved values, so that other ranks need
                not have the step
    continues:  an earlier manifest has begun the step
    """

    mode: Mode
    mode_step: Number
    step: Number
    block: Number
    closed: bool
    layout: Digest
    segment: SegmentKey
    offset: Bytes  # of the block, from the start of the object
    began: Time
    time: Time
    planned: bool = True
    continues: bool = False

    @property
    def ref(self) -> StepRef:
        return StepRef(ModeKeys(self.mode), self.mode_step, self.step)


class Dropped(msgspec.Struct, frozen=True, array_like=True):
    mode: Mode
    mode_step: Number
    step: Number
    names: tuple[str, ...]
    nbytes: Bytes
    reason: str


class RankManifest(msgspec.Struct, frozen=True):
    """Commits that everything in the journal records `[first, upto)` is in the store.

    `seq` counts from 0 per session without gaps. `state` is that of the rank at this manifest;
    `reason` tells what ended it. `attached` is a small segment (smdist/format/inline_segment.py).
    """

    session: str
    rank: Rank
    world_size: WorldSize
    attempt: Number
    include_workers: IncludeWorkers | tuple[Number, ...]
    seq: Number
    first: Number
    upto: Number
    state: RankState
    time: Time
    steps: tuple[StepEntry, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    troubles: tuple[str, ...] = ()
    reason: str = ""
    attached: bytes = b""

    @property
    def worker(self) -> str:
        return worker_name(self.rank)


class RankSpan(msgspec.Struct, frozen=True):
    """Consecutive manifests of a running session: one request instead of many.

    It contains nothing but these manifests. See smdist/format/manifest_spans.py.
    """

    manifests: tuple[RankManifest, ...]  # seq `first` to `upto` - 1, by its key


class RankSummary(msgspec.Struct, frozen=True):
    """A session that has ended and all its manifests: one request instead of many.

    It contains nothing else, so a reader may use it or the manifests. Embedded segments may be
    left out; entries then name the key of their manifest.
    """

    session: Session
    manifests: tuple[RankManifest, ...]  # seq 0 to the last

    @property
    def is_consistent(self) -> bool:
        """Check that all manifests are present and of this session; if not, read the manifests."""
        own = self.session
        seqs = [manifest.seq for manifest in self.manifests]
        owners = {(one.session, one.attempt, one.rank) for one in self.manifests}
        return (
            seqs == list(range(len(seqs)))
            and owners == {(own.session, own.attempt, own.rank)}
            and self.manifests[-1].state != "active"
        )


def session_from_manifest(manifest: RankManifest) -> Session:
    """Derive a session from one of its manifests, when the session object cannot be read."""
    return Session(
        session=manifest.session,
        rank=manifest.rank,
        world_size=manifest.world_size,
        attempt=manifest.attempt,
        include_workers=manifest.include_workers,
        started=0.0,
        host="",
        pid=0,
        launch="",
    )


class SamplingChange(msgspec.Struct, frozen=True):
    """From `mode_step` on, one of `stride` due steps is saved. `reduced`: statistics, not raw values.

    `share` is the expected share of the training time.
    """

    mode: str
    mode_step: Number
    step: Number
    stride: Number
    reduced: bool
    share: float
    time: Time


class SamplingChanges(msgspec.Struct, frozen=True):
    """The changes that `overhead_budget` made in a session, in order."""

    worker: Worker
    attempt: OptionalNumber  # -1 in the journal of a rank that has not joined the run yet
    budget: float
    changes: tuple[SamplingChange, ...]


class Heartbeat(msgspec.Struct, frozen=True):
    session: str
    rank: Rank
    attempt: Number
    time: Time
    interval_s: Seconds
    step: OptionalNumber  # last global step seen in the journal, -1 for none
    pending_bytes: Bytes


def session_key(worker: str, attempt: int) -> str:
    return f"sessions/{worker}/{attempt:06d}.json"


def collections_key(worker: str) -> str:
    return f"collections/{worker}.json"


def layout_key(digest: str) -> str:
    return f"layouts/{digest}.json"


def segment_key(worker: str, attempt: int, seq: int, life: str) -> str:
    """Return the key of a segment; `life` identifies the uploader process that writes it.

    A put of a killed uploader may arrive after its successor has written the same `seq`. It must
    not replace the segment that the successor's manifest names.
    """
    return f"segments/{worker}/{attempt:06d}-{seq:08d}-{life}.safetensors"


def manifest_key(worker: str, attempt: int, seq: int) -> str:
    return f"manifests/{worker}/{attempt:06d}-{seq:08d}.json"


def heartbeat_key(worker: str, attempt: int) -> str:
    return f"heartbeats/{worker}/{attempt:06d}.json"


def summary_key(worker: str, attempt: int) -> str:
    return f"summaries/{worker}/{attempt:06d}.json"


def span_key(worker: str, attempt: int, first: int, upto: int) -> str:
    return f"spans/{worker}/{attempt:06d}-{first:08d}-{upto:08d}.json"


def sampling_changes_key(worker: str, attempt: int) -> str:
    return f"thinned/{worker}/{attempt:06d}.json"


class ManifestId(NamedTuple):
    """The attempt, rank and number in the key of a manifest."""

    attempt: int
    rank: int
    seq: int


_OWNER_KEY = re.compile(r"(sessions|summaries)/worker_(\d+)/(\d+)\.json")
_MANIFEST_KEY = re.compile(r"manifests/worker_(\d+)/(\d+)-(\d+)\.json")


def parse_session_key(key: str) -> Owner | None:
    """Return the attempt and rank of a session's key; None for any other key."""
    return _parse_owner(key, "sessions")


def parse_summary_key(key: str) -> Owner | None:
    """Return the attempt and rank of a summary's key; None for any other key."""
    return _parse_owner(key, "summaries")


def parse_manifest_key(key: str) -> ManifestId | None:
    """Return what the key of a manifest names; None for any other key."""
    match = _MANIFEST_KEY.fullmatch(key)
    return ManifestId(int(match[2]), int(match[1]), int(match[3])) if match else None


def _parse_owner(key: str, folder: str) -> Owner | None:
    match = _OWNER_KEY.fullmatch(key)
    return (int(match[3]), int(match[2])) if match and match[1] == folder else None
