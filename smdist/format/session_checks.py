"""Check that an intact object belongs to the run, session, rank and number that its key promises.

A checksum only proves that an object is what was once stored under its key, in this run or in an
earlier one. The session id ties objects together: it is unique, and every object of a rank carries it.

A session that names another run than `run.json` is not believed, and everything of its rank is damaged.
On servers that ignore conditional puts a slow rank may replace `run.json` just after others have joined.
Their uploaders then store their sessions again, so readers read such a session again at later polls.

Pure. Called by `smdist.storage.run_objects` and by the readers of a run.
"""

from __future__ import annotations

import msgspec

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
    "contradiction",
    "session_stand_in",
]


# Their keys name several manifests; the caller checks that these are the ones.
_KEYS_OF_SEVERAL = ("spans/", "summaries/")


def contradiction(session: Session, run_id: str, manifests: str = "") -> str:
    """Return how `session` contradicts the run, or the session id of its manifests; else "".

    `run_id` and `manifests` are empty where they are not known.
    """
    if run_id and session.run_id not in ("", run_id):
        return f"it is of run {session.run_id}, and {RUN_KEY} names {run_id}"
    if manifests not in ("", session.session):
        return f"it is session {session.session}, and the manifests are of {manifests}"
    return ""


def session_stand_in(manifest: RankManifest, *, foreign: bool) -> Session:
    """Return a stand-in for a session that cannot be read, or that is `foreign`: of another run.

    Checksums of tensors are bound to the id of their session. The stand-in of a foreign session has
    another id, so that no value of that rank can be read.
    """
    session = session_from_manifest(manifest)
    if foreign:
        return msgspec.structs.replace(session, session=f"{session.session} of another run")
    return session


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
    why = contradiction(summary.session, run_id)
    if not why and not summary.is_consistent:
        why = "it does not have all manifests of its session"
    if why:
        raise CorruptObject(url, key, "read", why)
