"""What capture costs the training thread, the step, and memory. One measurement per process:

    python -m benchmarks.capture_cost inside mlp full

It uses the hook as a script does, with its uploader process and a directory to store into. Whatever is
compared takes turns (A B A B ...), so that a busy machine hits all alike. Prints rows as JSON.

    inside MODEL full|five   time inside the hook's callbacks in a captured step, over a memcpy of the
                             same bytes (weights and gradients) made after each step
    not_due                  step time with a hook on which nothing is due, less step time without
    memory                   what the training process and the uploader have resident
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from benchmarks.machine import status_bytes
from benchmarks.table import Row

if TYPE_CHECKING:  # loaded when `memory` has looked at what there is without
    from smdist.pytorch import Hook

FIVE = ("min", "max", "mean", "std", "l2")
WARM_UP = 8
MB = 1e6


class Options(NamedTuple):
    rounds: int
    steps: int
    clock: str
    out: str | None


@contextmanager
def _folder(options: Options) -> Iterator[Path]:
    """A place for runs; its spools are in memory, as they are by default."""
    path = Path(tempfile.mkdtemp(prefix="smdist-bench-", dir=options.out))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _hook(folder: Path, interval: int, how: str = "full", **more: Any) -> Hook:
    """Weights and gradients; step 0 is always captured, as with any interval."""
    import smdist.pytorch as smd

    reductions = smd.ReductionConfig(reductions=["min", "max", "mean", "std"], norms=["l2"])
    return smd.Hook(
        out_dir=folder / f"run-{time.monotonic_ns()}",
        save_config=smd.SaveConfig(save_interval=interval),
        reduction_config=reductions if how == "five" else None,
        include_regex=r"(weight|bias|parts\.\d+)$",
        on_error="raise",
        **more,
    )


def inside(options: Options, model: str, how: str) -> list[Row]:
    from benchmarks.models import MODELS, count_bytes
    from benchmarks.timing import CLOCKS, HookClock, Memcpy, median, p99

    _use_one_thread()
    job, now = MODELS[model](), CLOCKS[options.clock]
    nbytes = count_bytes(job.model)
    memcpy, huge_memcpy = Memcpy(nbytes, now), Memcpy(nbytes, now, huge=True)
    warm_up = max(WARM_UP, 3 * _steps_behind(nbytes))
    hooked: list[float] = []
    copied: list[float] = []
    huge: list[float] = []
    calls, blocked_s = 0, 0.0
    with _folder(options) as folder:
        for _ in range(options.rounds):
            hook = _hook(folder, 1, how)
            hook.register_module(job.model)
            with HookClock(now) as clock:
                for step in range(warm_up + options.steps):
                    job.step()
                    calls, ns = clock.calls, clock.take()
                    copy_ns, huge_ns = memcpy(), huge_memcpy()
                    _let_catch_up(hook, nbytes)
                    if step >= warm_up:
                        hooked.append(ns / 1e6)
                        copied.append(copy_ns / 1e6)
                        huge.append(huge_ns / 1e6)
            usage = hook.usage()
            assert usage is not None
            blocked_s += usage.blocked_s
            hook.close()
            shutil.rmtree(hook.out_dir)
    tensors = sum(1 for _ in job.model.parameters())
    what = {"full": "full capture", "five": "five reductions"}[how]
    base = f"{what}, {model}: {2 * tensors} tensors, {nbytes / MB:.0f} MB"
    per_call_us = 1e3 * median(hooked) / (2 * tensors)
    note = f"{calls} callbacks, {per_call_us:.1f} us per tensor"
    if blocked_s:
        note += f"; waited {blocked_s:.1f} s for room"
    big = nbytes > 20 * MB
    bar = {"full": 1.25, "five": 3.0}[how] if big else None

    def over(title: str, others: list[float]) -> Row:
        """Medians are divided, per round for the spread: single samples are too noisy."""
        starts = range(0, len(hooked), options.steps)
        found = [
            median(hooked[at : at + options.steps]) / median(others[at : at + options.steps])
            for at in starts
        ]
        ratios = [a / b for a, b in zip(hooked, others, strict=True)]
        value, spread = median(hooked) / median(others), (min(found), max(found))
        return Row(f"{base}: hook / {title}", value, "x", p99(ratios), bar, spread=spread)

    return [
        Row(f"{base}: inside hook", median(hooked), "ms", p99(hooked), None, note),
        Row(f"{base}: memcpy", median(copied), "ms", p99(copied)),
        over("memcpy", copied),
        over("memcpy, huge pages", huge),
    ]


def _use_one_thread() -> None:
    """Threads that wait for each other on a busy machine would drown everything else."""
    import torch

    torch.set_num_threads(1)


def _steps_behind(nbytes: int) -> int:
    """How many the uploader may be behind: it gathers a segment before it writes."""
    return max(2, (64 << 20) // nbytes)


def _let_catch_up(hook: Hook, nbytes: int) -> None:
    """Wait until the uploader is not far behind: these models step faster than any real job."""
    most, deadline = _steps_behind(nbytes), time.monotonic() + 60
    while (usage := hook.usage()) is not None and time.monotonic() < deadline:
        if usage.captured_steps - usage.stored_steps <= most:
            return
        time.sleep(0.001)


def not_due(options: Options) -> list[Row]:
    """One model steps in turn with the hook's callback on it and without.

    Twins of a model, which this once compared, differ by tens of microseconds without any hook.
    """
    from benchmarks.models import MODELS
    from benchmarks.timing import CLOCKS, HookClock, median, p99

    _use_one_thread()
    now, job = CLOCKS[options.clock], MODELS["narrow"]()
    callbacks = job.model._forward_pre_hooks
    added: list[float] = []
    inside_us: list[float] = []
    rounds, inside_rounds, without = [], [], []
    count = 40 * options.steps
    with _folder(options) as folder:
        for _ in range(options.rounds):
            hook = _hook(folder, 10**9)
            hook.register_module(job.model)
            for _ in range(WARM_UP):
                job.step()
            usage = hook.usage()
            assert usage is not None
            assert usage.captured_steps == 1
            time.sleep(0.5)  # the uploader starts and stores step 0 meanwhile
            hung = dict(callbacks)
            for turn in range(count):
                times = {}
                for hooked in (turn % 2 == 0, turn % 2 == 1):
                    callbacks.clear()
                    callbacks.update(hung if hooked else {})
                    begin = now()
                    job.step()
                    times[hooked] = (now() - begin) / 1e3
                added.append(times[True] - times[False])
                without.append(times[False])
            callbacks.update(hung)
            rounds.append(median(added[-count:]))
            with HookClock(now) as clock:
                for _ in range(count):
                    job.step()
                    inside_us.append(clock.take() / 1e3)
            inside_rounds.append(median(inside_us[-count:]))
            hook.close()
    note = f"of steps of {median(without):.0f} us; 100 parameters"
    found, spread = (min(inside_rounds), max(inside_rounds)), (min(rounds), max(rounds))
    return [
        Row("not due: inside hook", median(inside_us), "us", p99(inside_us), 20.0, "", found),
        Row("not due: added to a step", median(added), "us", p99(added), 20.0, note, spread),
    ]


def memory(options: Options) -> list[Row]:
    from benchmarks.models import MODELS

    _use_one_thread()
    job = MODELS["mlp"]()
    for _ in range(WARM_UP):
        job.step()
    before = status_bytes()
    from smdist.workers.spool.ack_page import AckPage

    # In memory, so that the buffer is told apart from everything else that is mapped.
    with _folder(options) as folder, _folder(options._replace(out="/dev/shm")) as spools:
        hook = _hook(folder, 1, spool_dir=spools)
        hook.register_module(job.model)
        seen = []
        for _ in range(WARM_UP + options.steps):
            job.step()
            if places := [*spools.rglob("ack_page")]:
                pid = AckPage(places[0]).uploader_pid
                seen += [status_bytes(pid)] if pid else []
        after, usage = status_bytes(), hook.usage()
        hook.close()
    assert usage is not None
    own, buffer = _own(after) - _own(before), after["RssShmem"] - before["RssShmem"]
    note = f"limit {usage.buffer_limit_bytes / MB:.0f} MB"
    mapped = f"with the buffer as far as it maps it {max(s['VmRSS'] for s in seen) / MB:.0f} MB"
    return [
        Row("memory: training process, without the buffer", own / MB, "MB", None, 60.0),
        Row("memory: the buffer", buffer / MB, "MB", None, None, note),
        Row("memory: uploader", max(map(_own, seen)) / MB, "MB", None, 90.0, mapped),
    ]


def _own(status: dict[str, int]) -> int:
    return status["RssAnon"] + status["RssFile"]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.capture_cost")
    parser.add_argument("measurement", choices=["inside", "not_due", "memory"])
    parser.add_argument("of", nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--out", help="folder to store runs in")
    given = parser.parse_args(arguments)
    options = Options(given.rounds, given.steps, given.clock, given.out)
    rows: list[Row] = globals()[given.measurement](options, *given.of)
    sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
