"""Whether an object that is whole is the one that belongs there: of this run, of that session.

A checksum tells that an object is what was once stored under its key, in this run or in another one.
What ties objects to each other is the session: unique, and told by each of them. A session of another run is
believed if manifests are of it, too: where a server ignores conditions, a slower rank may replace
`run.json` just after others have read it.
"""

from __future__ import annotations

from smdist.errors import CorruptObject
from smdist.format.manifest import (
    RUN_KEY,
    Heartbeat,
    RankManifest,
    RankSummary,
    Session,
    heartbeat_key,
    manifest_key,
    session_from_manifest,
    session_key,
)
from smdist.identity import worker_name

__all__ = ["attested", "check_owner", "doubt", "of_session", "whole_summary"]


_OF_SEVERAL = ("spans/", "summaries/")  # it is seen elsewhere that they are of one rank, in order


def doubt(session: Session, run_id: str) -> str:
    """Why it may be of something else; "" if it is not. `run_id` "" where it is not known."""
    if not run_id or session.run_id in ("", run_id):
        return ""
    return f"it is of run {session.run_id}, and {RUN_KEY} tells {run_id}"


def attested(manifest: RankManifest, suspect: Session | None) -> Session:
    """The session of a rank by its first manifest: the one that was doubted, or what can be told of it."""
    if suspect is not None and suspect.session == manifest.session:
        return suspect
    return session_from_manifest(manifest)


def check_owner(session: Session, owner: tuple[int, int], key: str, url: str) -> None:
    """CorruptObject when it is of another attempt and rank."""
    if (session.attempt, session.rank) != owner:
        detail = f"it is of attempt {session.attempt}, rank {session.rank}"
        raise CorruptObject(url, key, "read", detail)


def of_session(manifest: RankManifest | Heartbeat, session: str, key: str, url: str) -> None:
    """CorruptObject when it is of another session, rank, attempt or number than `key` says.

    `session` "" where it is not known.
    """
    own = worker_name(manifest.rank)
    if isinstance(manifest, RankManifest):
        place = manifest_key(own, manifest.attempt, manifest.seq)
    else:
        place = heartbeat_key(own, manifest.attempt)
    if place != key and not key.startswith(_OF_SEVERAL):
        raise CorruptObject(url, key, "read", f"it says that it is {place}")
    if session not in ("", manifest.session):
        told = session_key(worker_name(manifest.rank), manifest.attempt)
        detail = f"it is of session {manifest.session}, and {told} tells {session}"
        raise CorruptObject(url, key, "read", detail)


def whole_summary(summary: RankSummary, run_id: str, key: str, url: str) -> RankSummary:
    why = doubt(summary.session, run_id)
    if not why and not summary.is_consistent:
        why = "it does not have all manifests of its session"
    if why:
        raise CorruptObject(url, key, "read", why)
    return summary
