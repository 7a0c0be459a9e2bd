"""`smdist merge`: one snapshot of a run, now, by whoever asks for it."""

from __future__ import annotations

import asyncio

from smdist.cli.console import complain
from smdist.coordination.service.merge_once import MergeResult, merge_once
from smdist.errors import AlreadyCoordinated, SmdistError, Superseded
from smdist.messages import printable
from smdist.storage import open_store

__all__ = ["run"]

_REQUEST_S = 20.0  # for one request and its retries
_AT_ONCE = 32


def run(path: str, *, take_over: bool) -> int:
    """Exit code: 0 when the newest snapshot says all there is."""
    try:
        done = asyncio.run(_merge(path, take_over))
    except AlreadyCoordinated as error:
        complain(_refused(error))
        return 1
    except Superseded as error:
        complain(f"{error.url}: {error.by} has taken over, and writes it")
        return 1
    except (SmdistError, OSError) as error:
        complain(error)
        return 1
    print(_told(done))
    return 0


async def _merge(path: str, take_over: bool) -> MergeResult:
    store = open_store(path, deadline_s=_REQUEST_S, concurrency=_AT_ONCE)
    try:
        return await merge_once(store, concurrency=_AT_ONCE, take_over=take_over)
    finally:
        await store.close()


def _told(done: MergeResult) -> str:
    one = done.status
    ranks = sum(sum(line.ranks.values()) for line in one.attempts)
    attempts = f" in {len(one.attempts)} attempts" if len(one.attempts) > 1 else ""
    what = (
        f"{one.complete_steps} of {one.steps} steps complete, {ranks} "
        f"rank{'' if ranks == 1 else 's'}{attempts}"
    )
    lines = [f"{one.url}: {what}"]
    if done.written:
        how = "as of now: what ranks write from now on is read from them"
        how = "final: every rank has said its last word" if one.final else how
        lines.append(f"wrote snapshot {one.number} ({how})")
    else:
        lines.append(f"snapshot {one.number} says it all already; nothing was written")
    lines += [f"trouble: {text}" for text in one.troubles]
    return "\n".join(map(printable, lines))


def _refused(error: AlreadyCoordinated) -> str:
    return (
        f"{error.url} is being merged by {error.writer} (process {error.pid} on {error.host}); there "
        f"is nothing to do while that one is at work. If it died, its right ends in "
        f"{max(error.free_in_s, 0.0):.0f} s; --take-over does not wait for that"
    )
