"""Open the trial of a run, by the path it was written to."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from smdist.coordination.view.membership import LivenessTimeouts
from smdist.errors import ConfigurationError, NoSuchRun, TrialError
from smdist.storage import is_remote, open_store
from smdist.storage import loop_thread as sync
from smdist.trials.catalogue import Catalogue
from smdist.trials.segment_reader import AT_ONCE
from smdist.trials.trial import Trial

if TYPE_CHECKING:
    from smdist.storage.store import Store

__all__ = ["LocalTrial", "S3Trial", "create_trial"]

_POLL_S = 0.2
_DEADLINE_S = 20.0  # of one request and its retries, over a network


def create_trial(
    path: str | os.PathLike[str] | None = None,
    name: str | None = None,
    range_steps: tuple[int | None, int | None] | None = None,
    *,
    out_dir: str | os.PathLike[str] | None = None,
    attempt: int | None = None,
    lost_after_s: float = 60.0,
    lagging_after_s: float = 30.0,
    wait_s: float = 0.0,
    parallel: bool = True,
    check: bool = True,
    index_mode: bool = True,
    cache: bool = True,
) -> Trial:
    """Open the trial of the run at `path` (or `out_dir`): a directory or an s3:// URL.

    `range_steps` `(first, end)` leaves out other global steps, `end` too. `attempt` shows that start
    of the job alone; without it each step is shown from the newest attempt that has it. A rank of
    which nothing was heard for `lost_after_s` counts as lost. NoSuchRun when there is no run, after
    waiting `wait_s` for its first rank. It opens while the job runs, whichever ranks are there.

    The last four are taken for the sake of older scripts and change nothing.
    """
    where = path if path is not None else out_dir
    if where is None or (path is not None and out_dir is not None):
        raise ConfigurationError("create_trial() needs the path of a run: one of path and out_dir")
    text = os.fspath(where).strip()
    catalogue = Catalogue(
        attempt=attempt,
        range_steps=_range(range_steps),
        timeouts=LivenessTimeouts(lost_after_s, lagging_after_s),
    )
    store = open_store(text, deadline_s=_DEADLINE_S, concurrency=AT_ONCE)
    deadline = time.monotonic() + wait_s
    place = text.partition("?")[0] if is_remote(text) else text
    label = name or os.path.basename(place.rstrip("/")) or text
    try:
        while (trial := _open(store, label, text, catalogue)) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise NoSuchRun(store.url)
            time.sleep(min(_POLL_S, left))
        if attempt is not None and attempt not in trial.catalogue.view.attempts:
            known = ", ".join(map(str, sorted(trial.catalogue.view.attempts))) or "none yet"
            raise TrialError(f"{store.url} has no attempt {attempt}; it has {known}")
    except BaseException:
        sync.run(store.close())
        raise
    return trial


def LocalTrial(name: str, dirname: str | os.PathLike[str], **options: Any) -> Trial:
    """Call `create_trial` for a directory, with the arguments of smdebug."""
    return create_trial(dirname, name, **options)


def S3Trial(name: str, bucket_name: str, prefix_name: str, **options: Any) -> Trial:
    """Call `create_trial` for a prefix of a bucket, with the arguments of smdebug."""
    return create_trial(f"s3://{bucket_name}/{prefix_name.strip('/')}", name, **options)


def _open(store: Store, name: str, path: str, catalogue: Catalogue) -> Trial | None:
    try:
        return Trial(store, name, path, catalogue)
    except NoSuchRun:
        return None


def _range(steps: Any) -> tuple[int | None, int | None]:
    if steps is None:
        return (None, None)
    try:
        first, end = steps
    except (TypeError, ValueError):
        raise ConfigurationError(f"range_steps={steps!r} must be (first, end)") from None
    for bound in (first, end):
        if bound is not None and (not isinstance(bound, int) or bound < 0):
            raise ConfigurationError(f"range_steps={steps!r}: {bound!r} is no step number")
    if first is not None and end is not None and first >= end:
        raise ConfigurationError(f"range_steps={steps!r}: the first must be below the end")
    return (first, end)
