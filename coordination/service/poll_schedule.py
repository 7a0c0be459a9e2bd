"""When a rank is asked for its next manifest. Pure: `now` is passed in.

Three clocks meet here: ours, the rank's (its manifests and heartbeats carry times), and the rhythm
in which the rank has written so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from smdist.format.manifest import RankManifest, manifest_key
from smdist.identity import worker_name

if TYPE_CHECKING:
    from smdist.coordination.view.run_view import RankView

__all__ = ["PollIntervals", "RankTrack", "resume_track"]

_OLD_S = 60.0  # a rank that began earlier has written more than a few


@dataclass(frozen=True)
class PollIntervals:
    """How often things are asked for, in seconds."""

    interval_s: float = 1.0  # a rank that writes, at the most
    expect_s: float = 10.0  # a rank that writes, at the least, however seldom it does
    most_s: float = 30.0  # a rank that writes nothing, at the least
    beat_s: float = 15.0  # the heartbeat of a rank that wrote nothing for that long
    discover_s: float = 5.0  # the listing of sessions, once the job runs
    seek_s: float = 60.0  # the manifests of a rank that seems to have a gap
    young_s: float = 60.0  # how long after a change of ranks more are expected
    silent_s: float = 60.0  # a rank of which there is no sign at all, at the least

    def silence(self, since_s: float) -> float:
        """How long to wait before asking again one that gave no sign `since_s` ago."""
        return min(since_s / 8, self.silent_s)


@dataclass
class RankTrack:
    """How far the manifests of one rank in one attempt were read."""

    attempt: int
    rank: int
    seq: int = 0  # the next one
    final: bool = False
    written_at: float = 0.0  # the newest one, by its writer's clock
    gaps: tuple[float, ...] = ()  # between the last few
    heard_at: float = 0.0  # the newest one, by our clock
    beaten_at: float = 0.0  # the newest heartbeat, by its writer's clock
    seen_at: float = 0.0  # newest sign of life, by its writer's clock
    due_at: float = 0.0
    beat_due_at: float = 0.0
    seek_due_at: float = 0.0
    seek_s: float = 0.0
    window: int = 1
    failures: int = 0
    hinted: int = -1  # a manifest that is said to be there
    torn: bool = False  # the next one is there and makes no sense
    farewell: bool = False  # it is final, and its last heartbeat was read
    lost: bool = False  # it is final, by the word of its uploader: a recovery may add to it
    alive_at: float = 0.0  # newest sign of life, by our clock
    met_at: float = 0.0  # by our clock
    session: str = ""  # whose manifests they are, if that is known
    foreign: bool = False  # the session was of another run, and is read again
    listed: bool = False  # once, since we came: they may have piled up before

    def __post_init__(self) -> None:
        self.alive_at = max(self.alive_at, self.heard_at)
        self.met_at = self.met_at or self.heard_at

    @property
    def ended(self) -> bool:
        return self.final and not self.lost

    @property
    def worker(self) -> str:
        return worker_name(self.rank)

    @property
    def prefix(self) -> str:
        return f"manifests/{self.worker}/{self.attempt:06d}-"

    def key(self, seq: int) -> str:
        return manifest_key(self.worker, self.attempt, seq)

    def behind(self, now: float, many: int) -> bool:
        """Whether so many manifests are expected that it is worth listing them.

        Of a rank whose session is not known no span is believed, so a listing saves nothing.
        """
        if self.final or not self.session:
            return False
        old = self.seq == 0 and now - self.seen_at >= _OLD_S
        return (old and not self.listed) or max(self.window, self.hinted - self.seq + 1) >= many

    def took(self, manifest: RankManifest, now: float) -> None:
        self.seq = manifest.seq + 1
        if self.written_at:
            self.gaps = (*self.gaps[-2:], max(0.0, manifest.time - self.written_at))
        self.written_at, self.heard_at, self.alive_at = manifest.time, now, now
        self.seen_at = max(self.seen_at, manifest.time)
        self.final, self.lost = manifest.state != "active", manifest.state == "lost"
        self.farewell = False
        self.torn, self.failures, self.seek_s = False, 0, 0.0

    def expected_at(self, now: float, most_s: float) -> float:
        """When the next manifest is to be expected; clocks of two machines differ.

        By the shortest of the last few gaps: a pause of the job says nothing of what follows it.
        """
        gap_s = min(min(self.gaps, default=0.0), most_s)
        return min(max(self.written_at + gap_s, now), now + gap_s)

    def after_success(self, now: float, rhythm: PollIntervals) -> None:
        expected_at = self.expected_at(now, rhythm.expect_s)
        self.due_at = max(expected_at, now + rhythm.interval_s)

    def after_miss(self, now: float, rhythm: PollIntervals) -> None:
        gap_s = min(self.gaps, default=0.0)
        silence = now - self.heard_at
        wait_s = max(silence, gap_s) / 8
        most_s = max(rhythm.most_s, rhythm.silence(now - self.alive_at))
        if now < self.written_at + gap_s:  # it was asked before its time, in case it writes faster
            wait_s, most_s = self.written_at + gap_s - now, max(rhythm.expect_s, silence)
        self.window = 1
        self.due_at = now + min(max(wait_s, rhythm.interval_s), most_s)

    def after_failure(self, now: float, rhythm: PollIntervals) -> None:
        self.failures += 1
        self.due_at = now + min(rhythm.interval_s * 2.0 ** min(self.failures, 16), rhythm.most_s)


def resume_track(attempt: int, rank: int, known: RankView, now: float) -> RankTrack:
    """Behind what is known of the rank."""
    track = RankTrack(attempt, rank, heard_at=now)
    track.seq = known.seen[0][1] if known.seen and known.seen[0][0] == 0 else 0
    if known.head is not None:
        track.written_at = track.seen_at = known.head.time
        track.final, track.lost = known.head.state != "active", known.head.state == "lost"
    if known.heartbeat is not None:
        track.beaten_at = known.heartbeat.time
        track.seen_at = max(track.seen_at, track.beaten_at)
    if known.session is not None:
        track.seen_at = max(track.seen_at, known.session.started)
        track.foreign = not known.session.is_recorded
        track.session = "" if track.foreign else known.session.session
    if known.seen and known.seen[-1][1] != track.seq:
        # What is lacking is asked for once more, and passed over at once if it is still not there.
        track.final, track.torn = False, True
    return track
