"""`smdist trial`, `smdist sql` and `smdist merge`: describe a run, ask it, merge it once."""

from __future__ import annotations

import asyncio

from smdist.cli.console import complain
from smdist.coordination.service.merge_once import MergeResult, merge_once
from smdist.errors import AlreadyCoordinated, SmdistError, Superseded
from smdist.messages import count_of, printable
from smdist.storage import open_store
from smdist.tables.answer_text import render

__all__ = ["ask", "describe", "merge"]

_REQUEST_S = 20.0  # for one request and its retries
_CONCURRENCY = 32
_MAX_MISSING = 10  # objects to name


def describe(path: str) -> int:
    """Print what a run holds; return the exit code."""
    from smdist.trials import create_trial

    try:
        with create_trial(path) as trial:
            print(trial.describe())
    except SmdistError as error:
        complain(error)
        return 1
    return 0


def ask(path: str, text: str, output: str) -> int:
    """Print the answer to a question in SQL; return the exit code."""
    from smdist.trials import create_trial

    try:
        with create_trial(path) as trial:
            print(render(trial.sql(text), output), end="")
            for trouble in trial.troubles().get("", ()):
                complain(trouble)
    except SmdistError as error:
        complain(error)
        return 2
    return 0


def merge(path: str, *, take_over: bool) -> int:
    """Merge a run and print the result; return the exit code, 0 if the newest snapshot has all."""
    try:
        result = asyncio.run(_merge(path, take_over))
    except AlreadyCoordinated as error:
        complain(
            f"{error.url} is being merged by {error.writer} (process {error.pid} on {error.host}). If "
            f"that process died, retry in {max(error.free_in_s, 0.0):.0f} s or use --take-over."
        )
        return 1
    except Superseded as error:
        complain(f"{error.url}: {error.by} has taken over and writes the snapshot.")
        return 1
    except (SmdistError, OSError) as error:
        complain(error)
        return 1
    print("\n".join(map(printable, _result_lines(result))))
    return 0


async def _merge(path: str, take_over: bool) -> MergeResult:
    store = open_store(path, deadline_s=_REQUEST_S, concurrency=_CONCURRENCY)
    try:
        return await merge_once(
            store, concurrency=_CONCURRENCY, take_over=take_over, check_objects=True
        )
    finally:
        await store.close()


def _result_lines(result: MergeResult) -> list[str]:
    run, missing = result.status, result.missing
    ranks = sum(sum(line.ranks.values()) for line in run.attempts)
    attempts = f" in {len(run.attempts)} attempts" if len(run.attempts) > 1 else ""
    complete = run.complete_steps - (missing.complete_steps if missing is not None else 0)
    steps = f"{complete} of {run.steps} steps complete"
    lines = [f"{run.url}: {steps}, {count_of(ranks, 'rank')}{attempts}"]
    if result.written:
        how = "as of now: ranks may write more"
        if run.final:
            how = "final: every rank has ended"
        elif missing is not None and missing.keys:
            how = "not final: objects are missing"
        lines.append(f"wrote snapshot {run.number} ({how})")
    else:
        lines.append(f"snapshot {run.number} is up to date; nothing was written")
    lines += [f"trouble: {text}" for text in run.troubles]
    gone = list(missing.keys.items()) if missing is not None else []
    lines += [f"missing: {key} ({count_of(steps, 'step')})" for key, steps in gone[:_MAX_MISSING]]
    if len(gone) > _MAX_MISSING:
        lines.append(f"missing: {len(gone) - _MAX_MISSING} more objects")
    return lines
