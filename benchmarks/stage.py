"""Where a case is played: folders or an S3 server for its runs, and the processes of its peers."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.cases import Case
from benchmarks.environments import Unavailable
from benchmarks.pipe import Failed
from benchmarks.teams import Team, child_named

__all__ = ["Place", "left_out", "places", "teams"]

Staged = tuple["Place", Path]
Before = Callable[[Path, Path], None]
Teams = tuple[dict[str, Team], dict[str, str]]


class Place(NamedTuple):
    folder: Path  # what is stored shows here as files
    url: str
    environment: dict[str, str]
    server: int  # process id, 0: none

    def run(self, name: str) -> tuple[str, Path]:
        return f"{self.url}/{name}", self.folder / name


@contextlib.contextmanager
def places(where: str, out: str | None, before: Before | None = None) -> Iterator[Staged]:
    """Where runs go ("local" or "s3"), and where logs do.

    `before` is given the folder that holds runs (of S3: a bucket "before"), while no server knows it.
    """
    with contextlib.ExitStack() as stack:
        top = Path(tempfile.mkdtemp(prefix="smdist-bench-", dir=out))
        stack.callback(shutil.rmtree, top, ignore_errors=True)
        logs = top / "logs"
        logs.mkdir()
        if where == "local":
            if before is not None:
                before(top / "runs", logs)
            yield Place(top / "runs", str(top / "runs"), {}, 0), logs
            return
        if before is not None:
            before(top / "server" / "data" / "before", logs)
        from tests.servers.s3 import KEY, SECRET, start_rclone

        server = stack.enter_context(start_rclone(top / "server"))
        bucket = server.make_bucket("bench")
        environment = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
            "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        }
        assert server.folder is not None
        place = Place(server.folder / bucket, f"s3://{bucket}", environment, child_named("rclone"))
        yield place, logs


@contextlib.contextmanager
def teams(case: Case, place: Place, logs: Path) -> Iterator[Teams]:
    """Those that can be set up, and of the others why not."""
    found: dict[str, Team] = {}
    missing: dict[str, str] = {}
    try:
        for peer in case.peers:
            team = _team(case, peer, place, logs)
            if isinstance(team, str):
                missing[peer] = team
            else:
                found[peer] = team
        yield found, missing
    finally:
        for team in found.values():
            team.end()


def _team(case: Case, peer: str, place: Place, logs: Path) -> Team | str:
    team: Team | None = None
    try:
        team = Team(
            peer,
            case.model,
            threads=case.threads,
            ranks=case.ranks,
            logs=logs,
            environment=place.environment,
        )
        team.ask("steps", count=3)
    except (Unavailable, Failed) as problem:
        if team is not None:
            team.end()
        return left_out(peer, problem)
    return team


def left_out(peer: str, problem: Exception) -> str:
    """The reason in one line; on the terminal all of it."""
    print(f"left out: {peer}: {problem}", file=sys.stderr, flush=True)
    return str(problem).splitlines()[-1]
