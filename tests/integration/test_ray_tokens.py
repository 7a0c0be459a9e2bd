"""Tokens of Ray: the local one has its own, whatever the account holds; a cluster's is the user's."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from smdist.coordination.ray_actor.local_head import LOOPBACK
from tests.integration.test_ray_cli import BIN, record, session, well
from tests.servers.ray_cluster import Cluster, environment, start_cluster
from tests.support.waiting import until

pytestmark = pytest.mark.ray

TOKEN, OTHER = "5" * 64, "7" * 64


def account(kind: str, home: Path) -> dict[str, str]:
    """The environment of somebody whose account has never seen Ray, or holds a token of it."""
    env = {k: v for k, v in environment(HOME=str(home)).items() if not k.startswith("RAY_AUTH")}
    if kind == "token in a file":
        (home / ".ray").mkdir(parents=True)
        (home / ".ray" / "auth_token").write_text(TOKEN)
    if kind == "token in the environment":
        env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    return env


def run(command: list[str | Path], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**env, "COLUMNS": "200", "PYTHONWARNINGS": "ignore"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def smdist(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return run([BIN / "smdist", "coordinator", *words], env)


def python(code: str, env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-c", code, *words], env)


# -- a Ray of one's own --------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of the local Ray; pytest's own path is too long for its sockets."""
    path = Path(tempfile.mkdtemp(prefix="smt-", dir="/tmp"))
    try:
        yield path
    finally:
        smdist(environment(SMDIST_RAY_DIR=str(path)), "stop")
        shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize("kind", ["nothing", "token in a file", "token in the environment"])
def test_a_local_ray_has_a_token_of_its_own(kind: str, folder: Path, tmp_path: Path) -> None:
    env = account(kind, tmp_path / "home") | {"SMDIST_RAY_DIR": str(folder)}
    place = tmp_path / "run"
    place.mkdir()
    said = well(smdist(env, "start", "--watch", str(place)))
    said += well(smdist(env, "status"))
    head = record(folder)
    file = folder / "auth_token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    token = file.read_text()
    assert token not in said
    assert whispered(token, folder, head.pid) == [file]

    # What the account has is no key to it.
    code = (
        "import sys, ray\n"
        "ray.init(sys.argv[1], logging_level=40)\n"
        "print(ray.util.list_named_actors(all_namespaces=True))"
    )
    stranger = {**env, **LOOPBACK, "RAY_NUM_REDIS_GET_RETRIES": "1"}
    refused = python(code, stranger, head.address)
    assert refused.returncode != 0
    assert "AuthenticationError" in refused.stderr
    assert "coordinator-" not in refused.stdout
    known = {**stranger, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    assert "coordinator-" in well(python(code, known, head.address))

    assert "stopped the local Ray" in well(smdist(env, "stop"))
    assert session(head.pid) == []
    assert not file.exists()


def whispered(token: str, folder: Path, leader: int) -> list[Path]:
    """Where anybody could find it: command lines, environments, files of the local Ray."""
    places = [path for path in folder.rglob("*") if path.is_file()]
    places += [Path(f"/proc/{pid}", name) for pid in session(leader) for name in VISIBLE]
    assert len(session(leader)) > 3
    return [path for path in places if token.encode() in path.read_bytes()]


VISIBLE = ("cmdline", "environ")


def test_local_ray_that_rejects_us_can_be_stopped(folder: Path, tmp_path: Path) -> None:
    env = account("token in a file", tmp_path / "home") | {"SMDIST_RAY_DIR": str(folder)}
    well(smdist(env, "start", "--watch", str(tmp_path)))
    head = record(folder)
    (folder / "auth_token").write_text(OTHER)
    lost = smdist(env, "status")
    assert lost.returncode == 1
    assert "rejected our token. Its token has changed. Run: smdist coordinator stop" in lost.stderr
    assert "Traceback" not in lost.stderr
    assert "stopped the local Ray, which did not answer" in well(smdist(env, "stop"))
    assert session(head.pid) == []


def test_failed_start_ends_its_ray(folder: Path, tmp_path: Path) -> None:
    env = account("nothing", tmp_path) | {"SMDIST_RAY_DIR": str(folder)}
    code = (
        "from smdist.coordination.ray_actor import local_head\n"
        "from smdist.coordinator import attach\n"
        "with attach('local'):\n"
        "    print(local_head.find().pid, flush=True)\n"
        "    raise RuntimeError('no coordinator was started')"
    )
    failed = python(code, env)
    assert "no coordinator was started" in failed.stderr
    assert session(int(failed.stdout)) == []


def test_stop_ends_the_ray_of_a_killed_start(folder: Path, tmp_path: Path) -> None:
    env = account("nothing", tmp_path) | {"SMDIST_RAY_DIR": str(folder)}
    command = [str(BIN / "smdist"), "coordinator", "start", "--watch", str(tmp_path)]
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as starting:
        until((folder / "head.json").exists, "Ray is started")
        starting.kill()
    left = json.loads(until((folder / "head.json").read_bytes, "the record"))
    assert left["address"] == "", "it was killed too late for this test"
    assert session(left["pid"])
    assert "stopped the local Ray, which did not answer" in well(smdist(env, "stop"))
    assert session(left["pid"]) == []


def test_ray_imported_for_clusters_is_reported(folder: Path, tmp_path: Path) -> None:
    env = account("nothing", tmp_path) | {"SMDIST_RAY_DIR": str(folder)}
    code = "import ray\nfrom smdist.coordinator import attach\nwith attach(): pass"
    failed = python(code, env)
    assert "Set it before the import, or use another process" in failed.stderr
    assert os.listdir(folder) == [], "a Ray was started for nothing"


# -- a cluster -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with start_cluster(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) as one:
        yield one


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_clusters_use_the_users_token(scheme: str, cluster: Cluster, tmp_path: Path) -> None:
    host = cluster.address.partition(":")[0]
    address = f"ray://{host}:{cluster.client_port}" if scheme else cluster.address
    nothing = account("nothing", tmp_path / "home")
    right = {**nothing, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    where = ("--address", address, "--watch", str(tmp_path / "run"))
    if not scheme:  # with it, the same would only take longer
        well(smdist(right, "start", *where))
        well(smdist(right, "status", *where))
        well(smdist(right, "stop", *where))
    wrong = smdist({**right, "RAY_AUTH_TOKEN": OTHER}, "status", *where)
    missing = smdist(nothing, "status", *where)
    unread = smdist({**nothing, "RAY_AUTH_MODE": "token"}, "status", *where)
    for done, said in (
        (wrong, "rejected our token. Set RAY_AUTH_TOKEN_PATH"),
        (missing, "requires a token and we have none. Set RAY_AUTH_MODE=token"),
        (unread, "requires a token and we have none. Set RAY_AUTH_MODE=token"),
    ):
        assert done.returncode == 1
        assert f"smdist: the Ray at {address} {said}" in done.stderr
        assert "Traceback" not in done.stderr


def test_one_process_can_use_cluster_and_local_ray(
    cluster: Cluster, folder: Path, tmp_path: Path
) -> None:
    code = """
import os, sys
from smdist.coordinator import attach, coordinators
from smdist.errors import CoordinationError
before = {k: v for k, v in os.environ.items() if k.startswith("RAY_AUTH")}
for address in ("local", sys.argv[1], "local", sys.argv[1]):
    with attach(address) as ray:
        assert coordinators(ray) == []
        assert {k: v for k, v in os.environ.items() if k.startswith("RAY_AUTH")} == before
        try:
            with attach("local"):
                raise AssertionError("two at a time")
        except CoordinationError as error:
            assert "already connected to a Ray" in str(error), error
print("both")
"""
    env = account("token in the environment", tmp_path) | {"SMDIST_RAY_DIR": str(folder)}
    assert "both" in well(python(code, env, cluster.address))
    assert os.listdir(tmp_path) == [], "Ray has written a token of its own"
