"""Which attempt of a run a starting rank belongs to, and whether it may join the run at all. Pure.

An attempt is one start of the whole job. Ranks must agree on its number without talking to each
other: each looks at the sessions it finds in the store and decides for every one of them whether
it belongs to the start this rank is part of (`relation`):

- OTHER: a session of this very rank (a process has one, so that was an earlier process), another
  world size, a launch that is surely another one, another count of restarts, or a process that ended
  on this machine before this one began.
- SAME: equal launch and equal count of restarts.
- UNKNOWN: nothing tells.

A rank joins the newest attempt with a SAME session that is newer than its own last one. Else it
joins the newest attempt if it has no part in it and nothing there is OTHER. Else it opens the next.
All ranks of a new start find only OTHER in the newest attempt, so all open the same number, or join
who was faster; a rank that finds nothing but UNKNOWN was preceded by a rank that knew more.

Traps this is built around:

- torchrun's restart count is the agent's own. When one machine's workers fail, its agent counts, and
  the agents of the other machines restart theirs without counting. So counts are compared on one
  machine only, and no attempt number is computed from them.
- A launch id may be used twice: a run id written into a script, a batch job that runs the script
  twice. A rank that finds itself in an attempt of its own launch is in a new start.
- Clocks of machines differ, so across machines only a long time counts (`LONG_BEFORE_S`): a session
  from before this process began is of an earlier start, as ranks meet before their first step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from smdist.format.manifest import Session
from smdist.workers.join.launcher_identity import REQUEUE

__all__ = ["LONG_BEFORE_S", "SameLaunch", "StartingRank", "choose_attempt", "may_join", "relation"]

LONG_BEFORE_S = 600.0

# Launchers that start a rank again on their own under the same id.
_RESTARTING = frozenset({"given", "torchelastic", "agent", "sagemaker", "horovod"})
# Of these, the ones that end all ranks together: a dead sibling means that its attempt is over.
_ENDING_TOGETHER = frozenset({"torchelastic", "agent", "sagemaker", "horovod"})


@dataclass(frozen=True, slots=True)
class StartingRank:
    """The process that asks. `began` is its own start by the wall clock, 0.0 when unknown."""

    rank: int
    world_size: int
    host: str
    pid: int
    launch: str
    restart: int = 0
    began: float = 0.0


class SameLaunch(Enum):
    SAME = "same"
    OTHER = "other"
    UNKNOWN = "unknown"


def choose_attempt(
    me: StartingRank, sessions: Iterable[Session], gone: Collection[str] = frozenset()
) -> int:
    """Return the attempt number of `me`. `gone` are sessions whose process has surely ended."""
    attempts: dict[int, list[Session]] = {}
    for session in sessions:
        attempts.setdefault(session.attempt, []).append(session)
    if not attempts:
        return 0
    newest = max(attempts)
    own = max((a for a, group in attempts.items() if _has(group, me.rank)), default=-1)
    for attempt in sorted((a for a in attempts if a > own), reverse=True):
        if any(relation(me, s, gone) is SameLaunch.SAME for s in attempts[attempt]):
            return attempt
    if newest > own and _can_join(me, attempts[newest], gone):
        return newest
    return newest + 1


def may_join(
    me: StartingRank,
    sessions: Sequence[Session],
    gone: Collection[str] = frozenset(),
    *,
    resume: bool = False,
) -> bool:
    """Whether `me` belongs to the run that these sessions are of.

    Yes for a run nobody has a session in, with `resume`, for a rank of a launch that is already in
    it, and for a rank that its launcher started again. No for a second start in the same place.
    """
    if resume or not sessions:
        return True
    mine = [s for s in sessions if s.rank == me.rank and s.session not in gone]
    if any((s.host, s.pid) == (me.host, me.pid) for s in mine):
        return False  # a second hook of this very process: no launcher started it again
    if any(_is_restart_of(me, s) for s in sessions):
        return True
    own = max((s.attempt for s in sessions if s.rank == me.rank), default=-1)
    if any(relation(me, s, gone) is SameLaunch.SAME for s in sessions if s.attempt > own):
        return True
    newest = max(s.attempt for s in sessions)
    return own < 0 and _can_join(me, [s for s in sessions if s.attempt == newest], gone)


def relation(me: StartingRank, session: Session, gone: Collection[str]) -> SameLaunch:
    """Whether `session` is of the same start of the job as `me`."""
    if session.rank == me.rank or session.world_size != me.world_size:
        return SameLaunch.OTHER
    here = session.host == me.host
    # On one machine there is one clock. The process may have died a moment ago in our own start.
    ended_before = here and session.session in gone and session.started < me.began
    if me.launch and session.launch == me.launch:
        kind = _kind(me.launch)
        if here or kind != "torchelastic":
            if session.restart != me.restart or (ended_before and kind in _ENDING_TOGETHER):
                return SameLaunch.OTHER
            return SameLaunch.SAME
        if session.restart // REQUEUE != me.restart // REQUEUE:
            return SameLaunch.OTHER
    elif (
        _id_is_global(me.launch)
        or _id_is_global(session.launch)
        or (_kind(me.launch) != "agent" and session.restart != me.restart)
    ):
        return SameLaunch.OTHER
    if ended_before or (not here and session.started < me.began - LONG_BEFORE_S):
        return SameLaunch.OTHER
    return SameLaunch.UNKNOWN


def _can_join(me: StartingRank, group: Iterable[Session], gone: Collection[str]) -> bool:
    return not any(relation(me, s, gone) is SameLaunch.OTHER for s in group)


def _is_restart_of(me: StartingRank, session: Session) -> bool:
    """Whether `me` is a later start of the same job, by its launcher's word."""
    if me.launch == session.launch and _kind(me.launch) in _RESTARTING:
        return True
    unsure = not _id_is_global(me.launch) and not _id_is_global(session.launch)
    same_job = unsure or _job(me.launch) == _job(session.launch)
    return same_job and me.restart > session.restart


def _has(sessions: Iterable[Session], rank: int) -> bool:
    return any(s.rank == rank for s in sessions)


def _kind(launch: str) -> str:
    return launch.partition(":")[0]


def _id_is_global(launch: str) -> bool:
    """Whether all ranks of a launch have this very id, so that another id is another launch."""
    return _kind(launch) not in ("", "agent", "parent")


def _job(launch: str) -> str:
    """Without the step of a SLURM job: a requeued job counts its steps anew."""
    kind, _, text = launch.partition(":")
    if kind == "slurm" or text.startswith("slurm-"):
        return f"{kind}:{text.rpartition('.')[0]}"
    return launch
