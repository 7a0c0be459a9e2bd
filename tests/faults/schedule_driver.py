"""Carries out one schedule: starts its processes, does a supervisor's work, and judges the result.

As a program, with a plan (JSON) as its argument, it carries out that one and shows what went on:
this is how to repeat a failure and to shrink it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import msgspec

from smdist.workers.upload.process import EXIT_DATA_PENDING
from smdist.workers.upload.recover import find_spools
from tests.faults.launcher import Launcher, Started, launching
from tests.faults.schedule_audit import Told, audit
from tests.faults.schedule_plan import Plan, draw
from tests.faults.schedule_proxy import ScheduleProxy, Traffic, scheduling
from tests.servers.s3 import KEY, SECRET, Server, start_moto, start_rclone
from tests.support.waiting import until

__all__ = ["Bench", "Failed", "bench", "carry_out"]

MOST_LIVES = 30
KILLED = -9


@dataclass(frozen=True)
class Bench:
    """What schedules share."""

    server: Server
    proxy: ScheduleProxy
    launcher: Launcher


@contextlib.contextmanager
def bench(name: str, folder: Path) -> Iterator[Bench]:
    """With "rclone", which is quick, or with "moto", which keeps conditions."""
    start = {"rclone": start_rclone, "moto": start_moto}[name]
    small = {"S3_UPLOAD_PART_MIN_SIZE": "1024", "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": "1000000"}
    with (
        mock.patch.dict(os.environ, small),
        start(folder) as server,
        scheduling(server.port) as proxy,
        launching("schedule_processes.py") as launcher,
    ):
        yield Bench(server, proxy, launcher)


class Failed(AssertionError):
    """Says how to see it again."""


def carry_out(plan: Plan, bench: Bench, folder: Path) -> Counter[str]:
    """What was done to it. Leaves nothing behind unless it fails."""
    schedule = _Schedule(plan, bench, folder)
    try:
        schedule.run()
        schedule.judge()
    except Exception as error:
        raise Failed(schedule.story(error)) from error
    finally:
        schedule.traffic.over = True
    shutil.rmtree(folder)
    numbers = Counter(lives=schedule.lives, spans=schedule.spans)
    return schedule.traffic.deeds + numbers + Counter(schedule.traffic.counts)


class _Schedule:
    def __init__(self, plan: Plan, bench: Bench, folder: Path) -> None:
        self.plan, self.bench, self.folder = plan, bench, folder
        folder.mkdir(parents=True)
        self.bucket = bench.server.make_bucket(f"schedule-{plan.number}-{os.urandom(4).hex()}")
        self.traffic: Traffic = bench.proxy.follow(self.bucket, plan)
        self.lives = self.spans = 0
        self.rank: Started | None = None
        self.codes: list[str] = []

    def run(self) -> None:
        out_dir = self.bench.proxy.url(self.bucket)
        rank = self.rank = self._start("rank", out_dir=out_dir)
        self.traffic.rank = rank.pid
        until(lambda: rank.marks() or rank.code is not None, "the spool", 60, lambda: rank)
        spool = rank.marks()[0].removeprefix("spool ")
        if not self._attend(spool):
            (self.folder / "rank" / "unattended").touch()
            rank.wait()
            while not self._life("recovery", spool):
                pass
        rank.wait()
        assert rank.code in (0, KILLED), rank
        assert not rank.stderr, rank

    def _attend(self, spool: str) -> bool:
        """A supervisor's work: another uploader whenever one dies, as long as the rank lives."""
        assert self.rank is not None
        while True:
            if self._life("uploader", spool):
                return True
            if self.codes[-1] == f"uploader {EXIT_DATA_PENDING}" or self.rank.code is not None:
                return False

    def _life(self, script: str, spool: str) -> bool:
        self.lives += 1
        assert self.lives <= MOST_LIVES, "it does not come to an end"
        process = self._start(script, spool=spool)
        self.traffic.uploader = process.pid
        code = process.wait(90)
        self.bench.proxy.settle(self.traffic)
        self.codes.append(f"{script} {code}")
        assert code in (0, EXIT_DATA_PENDING, KILLED), process
        # As a supervisor has it: one that has removed its spool was done, whatever it did after that.
        return code == 0 or not Path(spool).exists()

    def _start(self, script: str, **arguments: str) -> Started:
        environ = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": str(self.folder / "no-config"),
            "AWS_SHARED_CREDENTIALS_FILE": str(self.folder / "no-credentials"),
        }
        name = script if script == "rank" else f"{script}-{self.lives}"
        return self.bench.launcher.start(
            self.folder / name,
            f"{script}(order)",
            environ,
            plan=msgspec.to_builtins(self.plan),
            **arguments,
        )

    def judge(self) -> None:
        assert self.rank is not None
        assert not find_spools([self.folder / "rank"]), "a spool is left"
        assert not self.bench.server.uploads(self.bucket), "an upload is left"
        stored = self._objects() / "run"
        self.spans = len(list(stored.glob("spans/*/*.json")))
        audit(stored, self.plan, Told(self.rank.evidence(), self.rank.marks()))

    def _objects(self) -> Path:
        """The bucket as a folder."""
        server = self.bench.server
        if server.folder is not None:
            return server.folder / self.bucket
        client, folder = server.client(), self.folder / "objects"
        for entry in client.list_objects_v2(Bucket=self.bucket).get("Contents", []):
            path = folder / entry["Key"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(client.get_object(Bucket=self.bucket, Key=entry["Key"])["Body"].read())
        return folder

    def story(self, error: Exception) -> str:
        lines = [f"{type(error).__name__}: {error}", f"in {self.folder}, bucket {self.bucket}"]
        lines += [f"  {line}" for line in self.traffic.seen]
        lines.append(f"exit codes: {self.codes}, rank {self.rank and self.rank.code}")
        lines += [f"rank: {mark}" for mark in (self.rank.marks() if self.rank else [])]
        for path in sorted(self.folder.glob("*/stderr")):
            lines += [f"{path.parent.name}: {line}" for line in path.read_text().splitlines()]
        plan = msgspec.json.encode(self.plan).decode()
        lines.append(f"python -m tests.faults.schedule_driver {self.bench.server.name} '{plan}'")
        return "\n".join(lines)


def _main(name: str, given: str, count: int) -> None:
    if ":" in given and "{" not in given:  # seed:number
        plan = draw(*(int(part) for part in given.split(":")))
    else:
        plan = msgspec.json.decode(given.encode(), type=Plan)
    folder = Path(tempfile.mkdtemp(prefix="smdist-schedule-"))
    with bench(name, folder / "server") as made:
        for i in range(count):
            done = carry_out(plan, made, folder / str(i))
            sys.stdout.write(f"{msgspec.json.encode(plan).decode()}\n{dict(done)}\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 1)
