"""What a run keeps in its store, as typed JSON, and under which key.

    run.json                                     Run           first rank to arrive
    sessions/<worker>/<attempt>.json             Session       each rank once, when its hook starts
    collections/<worker>.json                    Collections   each rank, when they change
    layouts/<digest>.json                        Layout        before the first manifest that names it
    segments/<worker>/<attempt>-<seq>-<life>.safetensors       before the manifest that names it
    manifests/<worker>/<attempt>-<seq>.json      RankManifest  the commit point of a rank
    heartbeats/<worker>/<attempt>.json           Heartbeat     every few seconds, overwritten in place
    thinned/<worker>/<attempt>.json              Thinned       when a budget changed what is saved
    spans/<worker>/<attempt>-<first>-<upto>.json RankSpan      after every 16th manifest; may be missing
    summaries/<worker>/<attempt>.json            RankSummary   after the last manifest; may be missing

A rank writes only its own keys (`run.json` and `layouts/` have the same bytes whoever writes them
first). The JSON is the format, versioned by `Run.format`; these classes are only its reader.
Unknown fields are ignored, so a newer writer may add some.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

import msgspec

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
    "heartbeat_key",
    "layout_key",
    "manifest_key",
    "parse_manifest_key",
    "parse_session_key",
    "parse_summary_key",
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
    launch: str  # what identifies the launcher's invocation, "" when nothing does
    restart: Number = 0  # how often the launcher restarted this job
    run_id: str = ""  # "" where it was not known yet

    @property
    def is_recorded(self) -> bool:
        """Not so for one that `session_from_manifest` made up."""
        return bool(self.host or self.started)

    def expected_ranks(self) -> tuple[int, ...]:
        """The ranks of this attempt that save."""
        if self.include_workers == "one":
            return (0,)
        if self.include_workers == "all":
            return tuple(range(self.world_size))
        return tuple(sorted({r for r in self.include_workers if int(r) < self.world_size}))  # type: ignore[misc]


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
    """A block of a step of this rank. A step has one, or several if it was written piecewise.

    `block` is the ordinal of its first journal record: unique in a session and in order of time.
    `closed`: with this block the step had everything that was planned for it. A step that was closed
    with nothing new to store has an entry with an empty `layout` and `segment`; a block that holds
    shapes alone may have an empty `segment` too. `planned` false: nothing was due, the script saved
    values of its own, so other ranks need not have the step. `continues`: an earlier manifest has begun
    the step.
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
    """Everything in the journal's records `[first, upto)` is in the store.

    `seq` counts from 0 per session without gaps. `state` holds as of this manifest; `reason` says
    what ended the rank. `attached` is a small segment, see smdist/format/inline_segment.py.
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
    """Manifests of a session that follow each other, while it runs: one request instead of many.

    Like a summary it says nothing that they do not say. See smdist/format/manifest_spans.py.
    """

    manifests: tuple[RankManifest, ...]  # seq `first` to `upto` - 1, by its key


class RankSummary(msgspec.Struct, frozen=True):
    """All manifests of a session that has ended, and the session: one request instead of many.

    It says nothing that they do not say, so reading it besides, instead or not at all gives the
    same view. Attached segments may be left out; entries then name the key of their manifest.
    """

    session: Session
    manifests: tuple[RankManifest, ...]  # seq 0 to the last

    @property
    def is_consistent(self) -> bool:
        """Whether it is what it should be; if not, the manifests are to be read."""
        own = self.session
        seqs = [manifest.seq for manifest in self.manifests]
        owners = {(one.session, one.attempt, one.rank) for one in self.manifests}
        return (
            seqs == list(range(len(seqs)))
            and owners == {(own.session, own.attempt, own.rank)}
            and self.manifests[-1].state != "active"
        )


def session_from_manifest(manifest: RankManifest) -> Session:
    """What a manifest tells of its session, whose own object cannot be read."""
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
    """From `mode_step` on one due step in `stride` is saved, `reduced`: statistics instead of raw.

    `share` is how much of the training time that was expected to take.
    """

    mode: str
    mode_step: Number
    step: Number
    stride: Number
    reduced: bool
    share: float
    time: Time


class SamplingChanges(msgspec.Struct, frozen=True):
    """What `overhead_budget` has changed in a session, in order."""

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
    """`life` is of the uploader process that writes it.

    A put of a killed uploader may still arrive after its successor has written the same `seq`, and
    must not replace what that one's manifest names.
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
    """What the key of a manifest names."""

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
