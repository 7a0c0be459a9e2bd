"""Requests to S3 for 1000 saved steps of 8 ranks: smdist's, counted on their way, next to smdebug's.

    python -m benchmarks.s3_requests          prints rows as JSON

smdist: eight hooks of a job of eight ranks, each with its uploader process, through a proxy that counts.
How often they write depends on time (`linger_s`, 2 s), so the pace of the steps is part of the row.
smdebug 1.0.34 puts every file it writes as one object, and its S3 client takes no endpoint: it saves
into a directory here, one rank of it, and its files are counted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.environments import Unavailable, interpreter
from benchmarks.table import Row
from tests.servers.s3 import KEY, SECRET, start_rclone
from tests.support.proxy import proxied

RANKS, STEPS = 8, 1000  # no more than that

SMDEBUG = """
import sys
from pathlib import Path
import torch
import smdebug.pytorch as smd
out, steps, numbers = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "numbers"
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
reductions = smd.ReductionConfig(reductions=["min", "max", "mean", "std"], norms=["l2"])
hook = smd.Hook(out_dir=out, save_config=smd.SaveConfig(save_interval=1),
                reduction_config=reductions if numbers else None,
                include_regex=["weight", "bias", "gradient"])
hook.register_module(model)
for _ in range(steps):
    model(torch.randn(4, 16)).square().sum().backward()
hook.close()
print(sum(path.is_file() for path in Path(out).rglob("*")))
"""


def ours(steps: int, pace_s: float, out: str | None, *, numbers: bool) -> Counter[str]:
    """Requests by method, and "objects"."""
    import torch

    import smdist.pytorch as smd

    torch.set_num_threads(1)
    reductions = smd.ReductionConfig(reductions=["min", "max", "mean", "std"], norms=["l2"])
    with (
        tempfile.TemporaryDirectory(dir=out, prefix="smdist-bench-") as folder,
        start_rclone(Path(folder)) as server,
        proxied(server.port) as proxy,
    ):
        url = proxy.url(server.make_bucket("bench"))
        models = [
            torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
            for _ in range(RANKS)
        ]
        hooks = []
        for rank, model in enumerate(models):
            hook = smd.Hook(
                url,
                save_config=smd.SaveConfig(save_interval=1),
                reduction_config=reductions if numbers else None,
                include_regex=["weight", "bias", "gradient"],
                include_workers="all",
                rank=rank,
                world_size=RANKS,
                buffer_bytes=64 << 20,
                spool_dir=str(Path(folder) / "spools"),
                on_error="raise",
            )
            hook.register_module(model)
            hooks.append(hook)
        begin = time.monotonic()
        for step in range(steps):
            for model in models:
                model(torch.randn(4, 16)).square().sum().backward()
            time.sleep(max(0.0, begin + (step + 1) * pace_s - time.monotonic()))
        for hook in hooks:
            hook.close()
        assert server.folder is not None
        _wait_for_merge(server.folder / "bench")
        stored = sum(path.is_file() for path in (server.folder / "bench").rglob("*"))
        return Counter(method for method, _ in proxy.requests) + Counter(objects=stored)


def _wait_for_merge(bucket: Path) -> None:
    """The last uploader merges the run, and may be at it still; its last word is that it is done."""
    deadline = time.monotonic() + 60
    while not any('"released":true' in p.read_text() for p in bucket.rglob("merged/leases/*.json")):
        if time.monotonic() > deadline:
            raise TimeoutError("the run was not merged")
        time.sleep(0.05)


def theirs(steps: int, out: str | None, *, numbers: bool) -> int:
    """Files of one rank."""
    with tempfile.TemporaryDirectory(dir=out, prefix="smdist-bench-") as folder:
        what = "numbers" if numbers else "tensors"
        command = [str(interpreter("smdebug")), "-c", SMDEBUG, f"{folder}/run", str(steps), what]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(done.stderr.strip().splitlines()[-1])
        return int(done.stdout.splitlines()[-1])


def measure(steps: int, pace_s: float, out: str | None) -> list[Row]:
    rows = []
    for numbers in (False, True):
        what = "five reductions" if numbers else "tensors"
        base = f"requests for {steps} saved steps x {RANKS} ranks, {what}"
        found = ours(steps, pace_s, out, numbers=numbers)
        total = sum(count for method, count in found.items() if method != "objects")
        note = f"{found['PUT']} PUT, {found['GET']} GET and others; {found['objects']} objects; "
        note += f"{steps} steps in {steps * pace_s:.0f} s; {total / steps / RANKS:.3f} per step and rank"
        rows.append(Row(f"{base}: smdist", float(total), "requests", note=note))
        try:
            files = theirs(steps, out, numbers=numbers)
        except Unavailable as problem:
            rows.append(Row(f"{base}: smdebug 1.0.34", None, "requests", note=str(problem)))
            continue
        note = f"files of one rank, {files} for {steps} steps, times {RANKS}: each is a PUT on S3"
        rows.append(Row(f"{base}: smdebug 1.0.34", float(files * RANKS), "requests", note=note))
    return rows


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.s3_requests")
    parser.add_argument("--steps", type=int, default=40, help="twenty-five times as many are saved")
    parser.add_argument("--pace", type=float, default=0.05, help="seconds between steps")
    parser.add_argument("--rounds", type=int, help="not used")
    parser.add_argument("--out", help="folder for the server's objects")
    given = parser.parse_args(arguments)
    os.environ.update(AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET)
    os.environ.update(AWS_EC2_METADATA_DISABLED="true", AWS_REGION="us-east-1")
    steps = min(STEPS, 25 * given.steps)
    rows = measure(steps, given.pace, given.out)
    sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
