"""What 50 ms on every request to S3 cost the training thread of a job that saves every step.

    python -m benchmarks.s3_latency [MODEL]         prints rows as JSON

Runs into a directory and runs to an S3 server behind a proxy that holds up every request take turns, with
a second run into a directory to show how much two runs of the same kind differ. What is measured is
time inside the hook's callbacks, the whole of what a step pays; the first saved step is told apart, since a
rank enters the run in it, over the network.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.pipe import ROOT
from benchmarks.table import Row
from tests.servers.s3 import KEY, SECRET, start_rclone

LATENCY_S = 0.05
WARM_UP = 8
LOCAL, AGAIN, REMOTE = "directory", "directory again", f"S3, {LATENCY_S * 1e3:.0f} ms a request"


class Ran(NamedTuple):
    """Milliseconds inside the hook."""

    first: float
    others: list[float]
    blocked_s: float


def run(out_dir: str, spools: Path, model: str, steps: int, pace_s: float, clock: str) -> Ran:
    import smdist.pytorch as smd
    from benchmarks.models import MODELS
    from benchmarks.timing import CLOCKS, HookClock

    job = MODELS[model]()
    hook = smd.Hook(
        out_dir,
        save_config=smd.SaveConfig(save_interval=1),
        include_regex=r"(weight|bias|parts\.\d+)$",
        spool_dir=str(spools),
        linger_s=0.2,
        on_error="raise",
    )
    hook.register_module(job.model)
    times = []
    with HookClock(CLOCKS[clock]) as inside:
        for _ in range(WARM_UP + steps):
            begin = time.monotonic()
            job.step()
            times.append(inside.take() / 1e6)
            # These models are quicker than any real one; what else a job would do in a step.
            time.sleep(max(0.0, pace_s - (time.monotonic() - begin)))
    usage = hook.usage()
    assert usage is not None
    hook.close()
    return Ran(times[0], times[WARM_UP:], usage.blocked_s)


@contextlib.contextmanager
def late(port: int) -> Iterator[int]:
    """A port behind which the server is far away. A process: a thread would be felt in training."""
    code = (
        "import sys; from tests.support.proxy import *\n"
        f"with proxied({port}) as proxy:\n"
        f"    proxy.inject(Latency({LATENCY_S}))\n"
        "    print(proxy.port, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, cwd=ROOT) as made:
        assert made.stdin is not None
        assert made.stdout is not None
        try:
            yield int(made.stdout.readline())
        finally:
            made.stdin.close()


def measure(model: str, rounds: int, steps: int, pace_s: float, clock: str) -> list[Row]:
    import torch

    torch.set_num_threads(1)
    found: dict[str, list[Ran]] = {LOCAL: [], REMOTE: [], AGAIN: []}
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="smdist-bench-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        spools = Path(tempfile.mkdtemp(prefix="smdist-bench-", dir="/dev/shm"))
        stack.callback(shutil.rmtree, spools, ignore_errors=True)
        server = stack.enter_context(start_rclone(folder / "server"))
        server.make_bucket("bench")
        port = stack.enter_context(late(server.port))
        for i in range(rounds):
            names = list(found)
            for name in names[i % 3 :] + names[: i % 3]:
                out_dir = str(folder / f"{name}-{i}")
                if name == REMOTE:
                    out_dir = f"s3://bench/run-{i}?endpoint_url=http://127.0.0.1:{port}"
                found[name].append(run(out_dir, spools, model, steps, pace_s, clock))
    return rows_of(model, found)


def rows_of(model: str, found: dict[str, list[Ran]]) -> list[Row]:
    from benchmarks.timing import median, p99

    rows, base = [], f"latency, {model}, every step"
    for name, ran in found.items():
        times = [ms for one in ran for ms in one.others]
        medians = [median(one.others) for one in ran]
        waited = sum(one.blocked_s for one in ran)
        note = f"waited {waited:.1f} s for room" if waited else ""
        spread = (min(medians), max(medians))
        rows.append(
            Row(f"{base}: inside hook, {name}", median(times), "ms", p99(times), None, note, spread)
        )
    for name in (REMOTE, AGAIN):
        pairs = [
            median(a.others) / median(b.others)
            for a, b in zip(found[name], found[LOCAL], strict=True)
        ]
        spread = (min(pairs), max(pairs))
        rows.append(Row(f"{base}: {name} / {LOCAL}", median(pairs), "x", spread=spread))
    for name in (LOCAL, REMOTE):
        firsts = [one.first for one in found[name]]
        note = "once: the buffer is made, the uploader started"
        spread = (min(firsts), max(firsts))
        what = f"{base}: first saved step, {name}"
        rows.append(Row(what, median(firsts), "ms", None, None, note, spread))
    return rows


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.s3_latency")
    parser.add_argument("model", nargs="?", default="narrow")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="five times as many per run")
    parser.add_argument("--pace", type=float, default=0.01, help="seconds of a step, at least")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--out", help="not used")
    given = parser.parse_args(arguments)
    os.environ.update(AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET)
    os.environ.update(AWS_EC2_METADATA_DISABLED="true", AWS_REGION="us-east-1")
    rows = measure(given.model, given.rounds, 5 * given.steps, given.pace, given.clock)
    sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
