"""What the launcher decides before there is a Ray, and the wheel it would send."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import msgspec
import pytest

import smdist
from smdist import processes
from smdist.coordination.ray_actor import code_package, launcher, local_head
from smdist.coordination.ray_actor.coordinator import (
    CoordinatorInfo,
    Settings,
    actor_name,
    canonical_url,
)
from smdist.coordination.ray_actor.launcher import Attachment
from smdist.errors import ConfigurationError, CoordinationError

# -- names ---------------------------------------------------------------------------------------


def test_a_url_has_one_actor_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert actor_name("jobs") == actor_name(f"{tmp_path}/jobs/") == actor_name("./jobs")
    assert actor_name(f"file://{tmp_path}/jobs") == actor_name("jobs")
    assert actor_name("s3://bucket/jobs/") == actor_name("s3://bucket/jobs")
    assert actor_name("s3://bucket//jobs") == actor_name("s3://bucket/jobs")
    assert canonical_url("s3://bucket/") == "s3://bucket"
    assert actor_name("s3://bucket/jobs") != actor_name("s3://bucket/job")
    assert actor_name("jobs").startswith("coordinator-v1-")


def test_a_url_keeps_its_endpoint() -> None:
    url = "s3://bucket/jobs?endpoint_url=http://127.0.0.1:9000"
    assert canonical_url("s3://bucket/jobs/?endpoint_url=http://127.0.0.1:9000") == url
    assert actor_name(url) != actor_name("s3://bucket/jobs")


@pytest.mark.parametrize("name", ["interval_s", "lost_after_s", "lagging_after_s", "lease_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_settings_are_checked(name: str, value: float) -> None:
    given: dict[str, Any] = {name: value}
    with pytest.raises(ConfigurationError, match=name):
        Settings("jobs", **given)


# -- addresses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["nowhere", "host:", ":6379", "host:port", "ray://host", ""])
def test_invalid_address_is_rejected(address: str) -> None:
    with pytest.raises(ConfigurationError, match="no address of a Ray"), launcher.attach(address):
        pass


def test_job_server_address_names_the_right_command() -> None:
    with (
        pytest.raises(ConfigurationError, match="ray job submit --address http://head:8265"),
        launcher.attach("http://head:8265"),
    ):
        pass


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_missing_ray_is_reported_at_once(scheme: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"{scheme}127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CoordinationError, match="no Ray answers at"), launcher.attach(address):
            pass


def test_local_ray_is_not_used_as_a_cluster() -> None:
    """Ray would, and then look for it on another interface until somebody interrupts it."""
    assert launcher._choose_cluster([]) == "auto"
    assert launcher._choose_cluster(["10.0.0.1:6379"]) == "auto"
    assert launcher._choose_cluster(["127.0.0.1:39261", "10.0.0.1:6379"]) == "10.0.0.1:6379"
    assert launcher._choose_cluster(["127.0.0.1:1", "10.0.0.1:2", "10.0.0.1:3"]) == "auto"
    with pytest.raises(CoordinationError, match="leave --address out"):
        launcher._choose_cluster(["127.0.0.1:39261", "127.0.0.1:41234"])


@pytest.mark.parametrize("content", [None, b"no zip", b""])
def test_invalid_wheel_is_rejected_before_anything_starts(
    content: bytes | None, tmp_path: Path
) -> None:
    path = tmp_path / "smdist.whl"
    if content is not None:
        path.write_bytes(content)
    done = without_ray("coordinator", "start", "--watch", "jobs", "--wheel", str(path))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"smdist: --wheel {path} is no wheel")


def test_wheel_of_another_package_is_rejected(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(ConfigurationError, match="no wheel of smdist"):
        code_package.check_wheel(tmp_path / "other.whl")
    with ZipFile(tmp_path / "smdist.whl", "w") as archive:
        archive.writestr("smdist/__init__.py", "")
    code_package.check_wheel(tmp_path / "smdist.whl")


@pytest.mark.parametrize("address", ["", "ray://head:10001"])
def test_other_settings_name_the_command_that_stops_it(address: str) -> None:
    attached = Attachment(None, address or "127.0.0.1:1", local=not address)
    info = CoordinatorInfo("name", Settings("/jobs"), "", "", 1, "", 0.0, stopped=False)
    other = f" --address {address}" if address else ""
    with pytest.raises(CoordinationError, match=f"coordinator stop{other} --watch /jobs$"):
        launcher._check_same_settings(attached, info, Settings("/jobs", interval_s=9))


def without_ray(*command: str) -> subprocess.CompletedProcess[str]:
    """The command line in an environment that has no Ray, and where none could start."""
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'ray':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name='ray')\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from smdist.cli import main\n"
        f"sys.argv[1:] = {list(command)!r}\n"
        "main()\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("address", ["local", "auto"])
def test_without_ray_the_extra_is_named(address: str) -> None:
    done = without_ray("coordinator", "start", "--address", address, "--watch", "jobs")
    assert done.returncode == 1
    assert "pip install 'smdist[ray]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_is_there_without_ray() -> None:
    done = without_ray("coordinator", "--help")
    assert done.returncode == 0
    assert "start" in done.stdout


def test_invalid_numbers_are_rejected_before_anything_starts() -> None:
    done = without_ray("coordinator", "start", "--watch", "jobs", "--lost-after", "0")
    assert done.returncode == 2
    assert "lost_after_s must be greater than 0" in done.stderr


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("s3://b/x", "'b' is not a bucket name"),
        ("s3://", "'' is not a bucket name"),
        ("s3://bucket/x?foo=1", "unknown key 'foo'"),
        ("gs://bucket/x", "not gs://"),
        (__file__, "is a file"),
    ],
)
def test_invalid_url_is_rejected_before_anything_starts(place: str, said: str) -> None:
    done = without_ray("coordinator", "start", "--watch", place)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("smdist: ")
    assert said in line


# -- the local Ray -------------------------------------------------------------------------------


def test_folder_leaves_room_for_socket_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "x" * 80)
    assert len(str(local_head.folder({}))) <= 45
    with pytest.raises(CoordinationError, match="too long"):
        local_head.folder({"SMDIST_RAY_DIR": "/tmp/" + "x" * 80})
    assert local_head.folder({"SMDIST_RAY_DIR": "/tmp/mine"}) == Path("/tmp/mine")


def test_folder_of_somebody_else_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link, say, that somebody else has put there."""
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    monkeypatch.setattr(local_head, "folder", lambda: link)
    with pytest.raises(CoordinationError, match="not a folder of this user"):
        local_head.start()


def test_record_of_a_dead_process_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may be somebody else's by now, whom nobody may end."""
    monkeypatch.setattr(local_head, "folder", lambda: tmp_path)
    (tmp_path / "head.json").write_text(
        f'{{"address": "127.0.0.1:1", "pid": {os.getpid()}, "ticks": 1, "log": ""}}'
    )
    assert local_head.find() is None
    assert local_head.stop() is False
    assert not (tmp_path / "head.json").exists()


@pytest.mark.parametrize("leader", ["killed", "another"])
def test_processes_of_a_killed_head_are_ended(
    leader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_head, "folder", lambda: tmp_path)
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as head:
        assert head.stdout is not None
        child, ticks = int(head.stdout.readline()), processes.start_ticks(head.pid)
        try:
            head.kill()
            head.wait()
            # Another one's: whatever has its number has begun before it.
            since = ticks if leader == "killed" else ticks + 10_000
            known = local_head.LocalRay("127.0.0.1:1", head.pid, since, "")
            (tmp_path / "head.json").write_bytes(msgspec.json.encode(known))
            assert local_head.stop() == (leader == "killed")
            deadline = time.monotonic() + 20
            while leader == "killed" and processes.is_alive(child):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert processes.is_alive(child) == (leader == "another")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


# -- code for a cluster --------------------------------------------------------------------------


@pytest.mark.slow
def test_the_copied_package_runs_by_itself(tmp_path: Path) -> None:
    code_package.copy_package(tmp_path / "site")
    code = (
        "import smdist\n"
        "from smdist.coordination.ray_actor.code_package import digest\n"
        "import smdist.workers.upload.uploader, smdist.trials, smdist.cli\n"
        "print(smdist.__file__, smdist.__version__, digest())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert printed == [
        str(tmp_path / "site" / "smdist" / "__init__.py"),
        smdist.__version__,
        code_package.digest(),
    ]


def test_the_copy_holds_code_only(tmp_path: Path) -> None:
    package = code_package.copy_package(tmp_path)
    files = [path for path in package.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".py", ".pyi", ".so", ".typed"}
    assert (package / "workers" / "upload" / "uploader.py").is_file()
    assert not [path for path in package.rglob("*") if path.is_symlink()]


def test_requirements_name_what_a_cluster_may_lack() -> None:
    needed = {code_package._module(text) for text in code_package.requirements()}
    assert {*code_package._NEEDED, "aiobotocore"} <= needed
