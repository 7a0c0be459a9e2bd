"""Check that an intact object belongs to the run, session, rank and number that its key promises.

A checksum only proves that an object is what was once stored under its key, in this run or in an
earlier one. The session id ties objects together: it is unique, and every object of a rank carries it.

A session may name another run than `run.json` does and still be right. Where a server ignores
conditional puts, a slower rank may replace `run.json` just after others have read it. So such a session
is held back (`foreign_run`) and accepted once a manifest names it, too (`session_of_manifest`).

Pure. Called by `smdist.storage.run_objects` and by the readers of a run.
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

__all__ = [
    "check_session_id",
    "check_session_owner",
    "check_summary",
    "foreign_run",
    "session_of_manifest",
]


# Their keys name several manifests; the caller checks that these are the ones.
_KEYS_OF_SEVERAL = ("spans/", "summaries/")


def foreign_run(session: Session, run_id: str) -> str:
    """Return why `session` seems to belong to another run, or "".

    An empty `run_id` means that the id of this run is not known: nothing is foreign then.
    """
    if not run_id or session.run_id in ("", run_id):
        return ""
    return f"it is of run {session.run_id}, and {RUN_KEY} names {run_id}"


def session_of_manifest(manifest: RankManifest, held_back: Session | None) -> Session:
    """Return the session that wrote `manifest`.

    That is `held_back` if it has the same id, else what the manifest tells of its session.
    """
    if held_back is not None and held_back.session == manifest.session:
        return held_back
    return session_from_manifest(manifest)


def check_session_owner(session: Session, owner: tuple[int, int], key: str, url: str) -> None:
    """Raise CorruptObject unless `session` is of the attempt and rank `owner`."""
    if (session.attempt, session.rank) != owner:
        detail = f"it is of attempt {session.attempt}, rank {session.rank}"
        raise CorruptObject(url, key, "read", detail)


def check_session_id(value: RankManifest | Heartbeat, session: str, key: str, url: str) -> None:
    """Raise CorruptObject if `value` is of another session, or does not belong under `key`.

    An empty `session` means that the session of the rank is not known.
    """
    worker = worker_name(value.rank)
    if isinstance(value, RankManifest):
        own_key = manifest_key(worker, value.attempt, value.seq)
    else:
        own_key = heartbeat_key(worker, value.attempt)
    if own_key != key and not key.startswith(_KEYS_OF_SEVERAL):
        raise CorruptObject(url, key, "read", f"it says that it is {own_key}")
    if session not in ("", value.session):
        known = session_key(worker, value.attempt)
        detail = f"it is of session {value.session}, and {known} names {session}"
        raise CorruptObject(url, key, "read", detail)


def check_summary(summary: RankSummary, run_id: str, key: str, url: str) -> None:
    """Raise CorruptObject if `summary` is of another run or lacks manifests of its session."""
    why = foreign_run(summary.session, run_id)
    if not why and not summary.is_consistent:
        why = "it does not have all manifests of its session"
    if why:
        raise CorruptObject(url, key, "read", why)
