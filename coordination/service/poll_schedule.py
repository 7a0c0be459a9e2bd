"""Decide when a rank is asked for its next manifest. Pure: `now` is passed in.

Three clocks meet here: ours, the rank's (its manifests and heartbeats carry times), and the pace at
which the rank has written so far.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from smdist.coordination.view.run_view import RankView
from smdist.format.manifest import Owner, RankManifest, manifest_key
from smdist.identity import worker_name

__all__ = [
    "LIVE",
    "MERGE_ONCE",
    "PollIntervals",
    "RankTrack",
    "WatchPolicy",
    "resume_track",
]

_OLD_S = 60.0  # a rank that started earlier has written more than a few manifests


@dataclass(frozen=True)
class WatchPolicy:
    """What differs between watching a live run and merging it once."""

    waits_for_restart: bool  # a failed job may be started again: its run has not ended yet
    reads_final_heartbeats: bool  # they say how long a rank that has ended was alive
    waits_for_silence: bool  # heartbeats and gaps are looked at after a rank was silent for a while


LIVE = WatchPolicy(True, True, True)
MERGE_ONCE = WatchPolicy(False, False, False)


@dataclass(frozen=True)
class PollIntervals:
    """How often objects are read, in seconds."""

    interval_s: float = 1.0  # least time between two reads of a rank that writes
    max_expected_s: float = 10.0  # most time between them, however seldom the rank writes
    max_idle_s: float = 30.0  # most time between two reads of a rank that writes nothing
    heartbeat_s: float = 15.0  # after so long without a manifest the heartbeat is read
    discover_s: float = 5.0  # listing of sessions, once the job runs
    gap_check_s: float = 60.0  # silence after which a rank's manifests may have a gap
    startup_s: float = 60.0  # how long after a change of ranks more are expected
    max_silent_s: float = 60.0  # most time between two reads of a rank without any sign of life

    def silent_wait_s(self, silence_s: float) -> float:
        """Return how long to wait before reading a rank again that was silent for `silence_s`."""
        return min(silence_s / 8, self.max_silent_s)


@dataclass
class ReadSchedule:
    """When to read a rank next, and how much at once."""

    due_at: float = 0.0
    heartbeat_due_at: float = 0.0
    gap_check_at: float = 0.0
    gap_check_s: float = 0.0
    window: int = 1  # manifests to read at once
    failures: int = 0
    listed: bool = False  # the manifests were listed once: there may have been a backlog


@dataclass
class RankTrack:
    """How far the manifests of one rank in one attempt were read, and when to read on.

    Times of the writer's clock: `written_at`, `heartbeat_at`, `reported_at`. All others are ours.
    """

    attempt: int
    rank: int
    seq: int = 0  # the next manifest
    final: bool = False
    written_at: float = 0.0  # newest manifest
    gaps: tuple[float, ...] = ()  # seconds between the last few
    read_at: float = 0.0  # when the newest manifest was read
    heartbeat_at: float = 0.0  # newest heartbeat
    reported_at: float = 0.0  # newest sign of life
    hinted: int = -1  # a manifest that an uploader says is there
    next_unreadable: bool = False  # the next manifest is there and damaged
    final_heartbeat_read: bool = False
    lost: bool = False  # final, says its uploader, but recovered data may follow
    alive_at: float = 0.0  # newest sign of life
    first_seen_at: float = 0.0
    session: str = ""  # of its manifests, if that is known
    foreign: bool = False  # the session names another run, and is read again later
    schedule: ReadSchedule = field(default_factory=ReadSchedule)

    def __post_init__(self) -> None:
        self.alive_at = max(self.alive_at, self.read_at)
        self.first_seen_at = self.first_seen_at or self.read_at

    @property
    def owner(self) -> Owner:
        return (self.attempt, self.rank)

    @property
    def ended(self) -> bool:
        """Return whether nothing more can come."""
        return self.final and not self.lost

    @property
    def worker(self) -> str:
        return worker_name(self.rank)

    @property
    def prefix(self) -> str:
        return f"manifests/{self.worker}/{self.attempt:06d}-"

    def key(self, seq: int) -> str:
        return manifest_key(self.worker, self.attempt, seq)

    def has_backlog(self, now: float, many: int) -> bool:
        """Return whether listing pays off: probably at least `many` manifests are waiting.

        Without a known session no span can be verified, so a listing saves nothing.
        """
        if self.final or not self.session:
            return False
        old = self.seq == 0 and now - self.reported_at >= _OLD_S
        waiting = max(self.schedule.window, self.hinted - self.seq + 1)
        return (old and not self.schedule.listed) or waiting >= many

    def accept(self, manifest: RankManifest, now: float) -> None:
        """Move on behind `manifest`."""
        self.seq = manifest.seq + 1
        if self.written_at:
            self.gaps = (*self.gaps[-2:], max(0.0, manifest.time - self.written_at))
        self.written_at, self.read_at, self.alive_at = manifest.time, now, now
        self.reported_at = max(self.reported_at, manifest.time)
        self.final, self.lost = manifest.state != "active", manifest.state == "lost"
        self.final_heartbeat_read = False
        self.next_unreadable = False
        self.schedule.failures, self.schedule.gap_check_s = 0, 0.0

    def expected_at(self, now: float, max_s: float) -> float:
        """Return when the next manifest is expected; clocks of two machines differ.

        The shortest of the last few gaps counts: a pause of the job says nothing about what follows.
        """
        gap_s = min(min(self.gaps, default=0.0), max_s)
        return min(max(self.written_at + gap_s, now), now + gap_s)

    def after_success(self, now: float, intervals: PollIntervals) -> None:
        expected_at = self.expected_at(now, intervals.max_expected_s)
        self.schedule.due_at = max(expected_at, now + intervals.interval_s)

    def after_miss(self, now: float, intervals: PollIntervals) -> None:
        gap_s = min(self.gaps, default=0.0)
        silence_s = now - self.read_at
        wait_s = max(silence_s, gap_s) / 8
        max_s = max(intervals.max_idle_s, intervals.silent_wait_s(now - self.alive_at))
        if now < self.written_at + gap_s:  # read early, in case the rank writes faster now
            wait_s = self.written_at + gap_s - now
            max_s = max(intervals.max_expected_s, silence_s)
        self.schedule.window = 1
        self.schedule.due_at = now + min(max(wait_s, intervals.interval_s), max_s)

    def after_failure(self, now: float, intervals: PollIntervals) -> None:
        self.schedule.failures += 1
        wait_s = intervals.interval_s * 2.0 ** min(self.schedule.failures, 16)
        self.schedule.due_at = now + min(wait_s, intervals.max_idle_s)


def resume_track(attempt: int, rank: int, known: RankView, now: float) -> RankTrack:
    """Return a track that continues behind what is known of the rank."""
    track = RankTrack(attempt, rank, read_at=now)
    track.seq = known.seen[0][1] if known.seen and known.seen[0][0] == 0 else 0
    if known.head is not None:
        track.written_at = track.reported_at = known.head.time
        track.final, track.lost = known.head.state != "active", known.head.state == "lost"
    if known.heartbeat is not None:
        track.heartbeat_at = known.heartbeat.time
        track.reported_at = max(track.reported_at, track.heartbeat_at)
    if known.session is not None:
        track.reported_at = max(track.reported_at, known.session.started)
        track.foreign = not known.session.is_recorded
        track.session = "" if track.foreign else known.session.session
    if known.seen and known.seen[-1][1] != track.seq:
        # Missing manifests are read once more, and skipped at once if they are still missing.
        track.final, track.next_unreadable = False, True
    return track
