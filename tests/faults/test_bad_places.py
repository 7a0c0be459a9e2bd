"""Places that cannot be written, or not any more; and settings that make no sense."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import smdist.pytorch as smd
from smdist.coordination.view.membership import MissingReason, RankStatus
from smdist.errors import ConfigurationError, RunExists, StoreForbidden, UnknownKey
from smdist.identity import modes
from smdist.trials import create_trial
from smdist.workers.upload.recover import recover
from tests.faults.audit import assert_in_run, audit, unexplained
from tests.faults.launcher import REPOSITORY, Launcher, ack_page_of, drained, ended, spools
from tests.faults.places import Place
from tests.support.torch_jobs import beside_waiting
from tests.support.waiting import until

TRAIN = modes.TRAIN


def tree(folder: Path) -> dict[str, int]:
    """Everything below a folder, with its size."""
    found = {}
    for parent, folders, names in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *names)):
            with contextlib.suppress(FileNotFoundError):
                found[str(path.relative_to(folder))] = path.lstat().st_size
    return found


def trouble_of(root: Path) -> str:
    for spool in spools(root):
        with ack_page_of(spool) as ack_page:
            return ack_page.last_error
    return ""


# -- a full disk -----------------------------------------------------------------------------------


def fill(folder: Path, leave: int = 0) -> Path:
    """Take all room there is in a small file system, but for some bytes."""
    ballast = folder / "ballast"
    descriptor = os.open(ballast, os.O_WRONLY | os.O_CREAT)
    try:
        while os.write(descriptor, bytes(4096)) == 4096:
            pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    finally:
        os.close(descriptor)
    if leave:
        os.truncate(ballast, ballast.stat().st_size - leave)
    return ballast


WAITS = """
from pathlib import Path
train(order, before_step=lambda step: step == 3 and wait_for(Path(order.arguments["go"])))
"""


def test_a_full_disk_holds_nothing_up_and_loses_nothing(
    launcher: Launcher, tmp_path: Path, small_disk: Path
) -> None:
    out_dir, root, go = small_disk / "out", tmp_path / "spools", tmp_path / "go"
    started = launcher.start(
        tmp_path / "rank",
        WAITS,
        steps=8,
        width=200,
        go=str(go),
        hook={"out_dir": str(out_dir), "spool_dir": str(root), "linger_s": 0.01},
    )
    started.wait_for("step 2")
    until(lambda: list(out_dir.glob("manifests/*/*")), "the first manifest", about=lambda: started)
    ballast = fill(small_disk)
    go.touch()
    started.wait_for("trained")  # training does not wait for the disk
    until(lambda: "space" in trouble_of(root), "the uploader to say what is wrong")
    until(lambda: "choose another out_dir" in started.stderr, "and to say it to people")
    assert started.code is None
    ballast.unlink()
    assert started.wait() == 0, repr(started)
    drained(root)
    assert "the store works again" in started.stderr
    found = audit(out_dir)
    with create_trial(out_dir) as trial:
        assert trial.steps(TRAIN) == list(range(8))
        assert_in_run(trial, started, 0, started.evidence())
        assert not unexplained(found, 0, started.evidence())


LEAVES = """
from pathlib import Path
from smdist.errors import DrainTimeout
hook = train(
    order,
    before_step=lambda step: step == 3 and wait_for(Path(order.arguments["go"])),
    close=False,
)
try:
    hook.close(timeout=1.0)
except DrainTimeout as error:
    print(error)
"""


def test_a_disk_that_stays_full_leaves_a_spool_to_send(
    launcher: Launcher, tmp_path: Path, small_disk: Path
) -> None:
    out_dir, root, go = small_disk / "out", tmp_path / "spools", tmp_path / "go"
    started = launcher.start(
        tmp_path / "rank",
        LEAVES,
        steps=6,
        width=200,
        go=str(go),
        hook={
            "out_dir": str(out_dir),
            "spool_dir": str(root),
            "linger_s": 0.01,
            "on_error": "raise",
            "drain_deadline_s": 8.0,
        },
    )
    started.wait_for("step 2")
    until(lambda: list(out_dir.glob("manifests/*/*")), "the first manifest", about=lambda: started)
    ballast = fill(small_disk)
    go.touch()
    assert started.wait() == 0, repr(started)
    said = (started.folder / "stdout").read_text()
    assert re.search(r"[\d.]+ (bytes|[KM]iB)", said), f"close() does not say how much: {said}"
    assert str(out_dir) in said
    (spool,) = spools(root)
    assert f"smdist recover {spool}" in said, f"close() does not say how to send it: {said}"
    until(lambda: "smdist recover" in started.stderr, "the uploader to give up")
    assert f"smdist recover {spool}" in started.stderr
    ended(root)  # it has spoken, and holds the spool for a moment longer
    ballast.unlink()
    command = [sys.executable, "-c", "from smdist.cli import main; main()", "recover", str(spool)]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run(command, check=True, env=environ, capture_output=True)
    assert not spools(root)
    audit(out_dir)
    with create_trial(out_dir) as trial:
        assert trial.steps(TRAIN) == list(range(6))
        assert_in_run(trial, started, 0, started.evidence())


# -- places that are wrong from the beginning ------------------------------------------------------


def refused_places(folder: Path, read_only: Path) -> list[Path]:
    (folder / "file").write_text("mine")
    return [folder / "file", folder / "file" / "below", read_only / "out"]


def test_places_that_cannot_be_written(tmp_path: Path, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for out_dir in refused_places(tmp_path, small_disk):
        for rank, world_size in ((0, 1), (None, None)):
            with pytest.raises(StoreForbidden, match=re.escape(str(out_dir))):
                smd.Hook(out_dir, rank=rank, world_size=world_size)
    assert (tmp_path / "file").read_text() == "mine"
    assert not tree(small_disk)


def test_a_disk_that_turns_read_only(launcher: Launcher, tmp_path: Path, small_disk: Path) -> None:
    out_dir, root, go = small_disk / "out", tmp_path / "spools", tmp_path / "go"
    started = launcher.start(
        tmp_path / "rank",
        WAITS,
        steps=5,
        go=str(go),
        hook={"out_dir": str(out_dir), "spool_dir": str(root), "linger_s": 0.01},
    )
    started.wait_for("step 2")
    until(lambda: list(out_dir.glob("manifests/*/*")), "the first manifest", about=lambda: started)

    def remounted(how: str) -> bool:
        command = ["mount", "-o", f"remount,{how}", str(small_disk)]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    until(lambda: remounted("ro"), "a moment in which no file is open for writing")
    go.touch()
    started.wait_for("trained")
    until(lambda: "Read-only" in trouble_of(root), "the uploader to say what is wrong")
    assert remounted("rw")
    assert started.wait() == 0, repr(started)
    drained(root)
    audit(out_dir)
    with create_trial(out_dir) as trial:
        assert_in_run(trial, started, 0, started.evidence())


def test_a_directory_that_holds_a_run(launcher: Launcher, tmp_path: Path) -> None:
    hook = {"out_dir": str(tmp_path / "out"), "spool_dir": str(tmp_path / "spools")}
    started = launcher.start(tmp_path / "rank", steps=1, hook=hook)
    assert started.wait() == 0, repr(started)
    drained(tmp_path / "spools")
    before = tree(tmp_path / "out")
    with pytest.raises(RunExists, match="resume=True"):
        smd.Hook(tmp_path / "out")
    assert tree(tmp_path / "out") == before
    # Files of others are no run: nothing of them is touched, and nothing refuses to begin.
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "notes.txt").write_text("mine")
    hook["out_dir"] = str(shared)
    started = launcher.start(tmp_path / "beside", steps=1, hook=hook)
    assert started.wait() == 0, repr(started)
    assert (shared / "notes.txt").read_text() == "mine"


# -- settings --------------------------------------------------------------------------------------


def json_hook(folder: Path, **parameters: Any) -> smd.Hook:
    path = folder / "config.json"
    document = {"LocalPath": str(folder / "out"), "HookParameters": parameters}
    path.write_text(json.dumps(document))
    return smd.Hook.create_from_json_file(path)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "interval": (
        lambda folder: smd.Hook(folder / "out", save_config=smd.SaveConfig(save_interval=0)),
        "save_interval",
    ),
    "interval in JSON": (lambda folder: json_hook(folder, save_interval="0"), "save_interval"),
    "regex": (lambda folder: smd.Hook(folder / "out", include_regex=["(relu"]), r"\(relu"),
    "regex in JSON": (lambda folder: json_hook(folder, include_regex="(relu"), r"\(relu"),
    "key in JSON": (lambda folder: json_hook(folder, save_intervall="3"), "save_interval'"),
    "on_full": (lambda folder: smd.Hook(folder / "out", on_full="wait"), "on_full"),  # type: ignore[arg-type]
    "workers": (lambda folder: smd.Hook(folder / "out", include_workers="some"), "include_workers"),
    "buffer": (lambda folder: smd.Hook(folder / "out", buffer_bytes=0), "buffer_bytes"),
    "scheme": (lambda folder: smd.Hook("ftp://there"), "ftp"),
    "empty": (lambda folder: smd.Hook(""), "out_dir"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_settings_are_refused_at_once(tmp_path: Path, what: str) -> None:
    make, names = WRONG[what]
    with pytest.raises(ConfigurationError, match=names):
        make(tmp_path)
    assert not (tmp_path / "out").exists()


def test_unknown_keys_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownKey, match="did you mean 'save_interval'"):
        json_hook(tmp_path, save_intervall="3")
    with pytest.raises(TypeError, match="save_intervall"):
        smd.Hook(tmp_path / "out", save_intervall=3)  # type: ignore[call-arg]


# -- names -----------------------------------------------------------------------------------------

NAMES = [
    "a/b/c",
    "../../outside",
    "/etc/smdist",
    "..",
    ".",
    ".statistics",
    ".crc32c",
    "x/.padding",
    "Case",
    "case",
    "CASE",
    "größe/重み/🦜",
    "e\u0301 and \u00e9",
    "n" * 300,
    "n" * 301,
    "with space\tand\nline",
    "back\\slash",
    "con",
    "percent%2F..%2F",
    '{"json": [1]}',
    "nul\0byte",
    "__metadata__",
]

NAMED = """
import numpy as np
import smdist.pytorch as smd
hook = smd.Hook(
    order.arguments["out_dir"], include_collections=["weights"], spool_dir=order.arguments["root"]
)
hook.set_mode(smd.modes.TRAIN)
import torch
model = torch.nn.Linear(2, 2)
hook.register_module(model)
for step in range(2):
    model(torch.ones(1, 2))
    for number, name in enumerate(order.arguments["names"]):
        hook.save_tensor(name, np.array([number, step, 7], dtype=np.int32), name or "default")
        hook.save_scalar(name, number + step / 2)
hook.close()
print(hook.errors)
"""


def test_names_of_every_kind_come_back(launcher: Launcher, place: Place, tmp_path: Path) -> None:
    out_dir = place.beside("a/b/out")
    arguments: dict[str, Any] = {"out_dir": out_dir, "names": NAMES}
    arguments["root"] = str(tmp_path / "spools")
    (tmp_path / "a").mkdir()
    outside = set(tree(tmp_path.parent)) | {f"{tmp_path.name}/rank"}
    etc = set(os.listdir("/etc"))
    started = launcher.start(tmp_path / "rank", NAMED, place.environ, **arguments)
    assert started.wait() == 0, repr(started)
    assert (started.folder / "stdout").read_text() == "0\n", started.stderr
    drained(tmp_path / "spools")
    allowed: tuple[str, ...] = (
        f"{tmp_path.name}/a/b",
        f"{tmp_path.name}/rank",
        f"{tmp_path.name}/spools",
    )
    if place.server is not None and place.server.folder is not None:
        server = place.server.folder.relative_to(tmp_path.parent)
        within = [server / place.bucket / "a/b/out", server.parent / "rclone.log"]
        within += [parent for path in within[:1] for parent in path.parents]
        outside |= {str(path) for path in within}
        allowed = (*allowed[1:], *map(str, within[:2]))
    written = set(tree(tmp_path.parent)) - outside
    assert not [path for path in written if not path.startswith(allowed)]
    assert set(os.listdir("/etc")) == etc
    with create_trial(out_dir) as trial:
        assert not trial.troubles()
        expected = {*NAMES, *(f"scalar/{name}" for name in NAMES), "Linear_weight"}
        assert set(trial.tensor_names()) == expected
        for number, name in enumerate(NAMES):
            for step in range(2):
                value = trial.tensor(name).value(step, mode=TRAIN)
                assert value.tolist() == [number, step, 7], name
                scalar = trial.tensor(f"scalar/{name}").value(step, mode=TRAIN)
                assert float(scalar) == number + step / 2, name
            assert name in trial.tensor_names(collection=name)
    audit_names(place.objects(out_dir))


def audit_names(out_dir: Path) -> None:
    from safetensors import safe_open

    found: set[str] = set()
    for segment in out_dir.glob("segments/*/*"):
        with safe_open(segment, framework="numpy") as opened:
            found.update(opened.keys())
    assert {f"train/1/{n}" for n in NAMES if not n.startswith(".")} <= found
    keys = [path.relative_to(out_dir).as_posix() for path in out_dir.rglob("*") if path.is_file()]
    assert all(re.fullmatch(r"[a-z]+(/[a-z0-9_.-]+)+|run\.json", key) for key in keys), keys


# -- a buffer that is too small --------------------------------------------------------------------


@pytest.fixture
def small_memory(small_disk: Path) -> Path:
    """Stands for a /dev/shm of 8 MB."""
    return small_disk


OVERFLOWS = """
import smdist.workers.hook.buffer_location as memory
from pathlib import Path
memory._MEMORY = Path(order.arguments["memory"])
train(order)
"""


def test_too_little_shared_memory_becomes_disk(
    launcher: Launcher, tmp_path: Path, small_memory: Path
) -> None:
    (tmp_path / "disk").mkdir()
    started = launcher.start(
        tmp_path / "rank",
        OVERFLOWS,
        {"TMPDIR": str(tmp_path / "disk")},
        steps=6,
        width=600,
        memory=str(small_memory),
        hook={"out_dir": str(tmp_path / "out"), "linger_s": 30.0},
    )
    assert started.wait() == 0, repr(started)
    drained(tmp_path / "disk")
    assert started.stderr.count("Raise the shared memory") == 1, started.stderr
    assert len(beside_waiting(started.stderr.splitlines())) == 1, started.stderr
    audit(tmp_path / "out")
    with create_trial(tmp_path / "out") as trial:
        assert trial.steps(TRAIN) == list(range(6))
        assert_in_run(trial, started, 0, started.evidence())


FILLED_LATER = """
from pathlib import Path
import smdist.workers.hook.capture_session as outlet
from smdist.workers.hook.buffer_location import Placement
memory, disk = Path(order.arguments["memory"]), Path(order.arguments["disk"])
# As it was chosen when there was room; somebody else has taken it since.
outlet.choose_spool = lambda *_, **__: Placement(memory, disk, "memory", None)
train(order)
"""


def test_shared_memory_that_others_fill_overflows_to_disk(
    launcher: Launcher, tmp_path: Path, small_memory: Path
) -> None:
    fill(small_memory, leave=5 << 20)
    started = launcher.start(
        tmp_path / "rank",
        FILLED_LATER,
        steps=5,
        width=400,
        memory=str(small_memory),
        disk=str(tmp_path / "disk"),
        hook={"out_dir": str(tmp_path / "out"), "linger_s": 30.0, "buffer_bytes": 32 << 20},
    )
    assert started.wait() == 0, repr(started)
    drained(small_memory)
    assert not tree(tmp_path / "disk"), "the overflow was left behind"
    assert started.stderr.count("goes to disk") == 1, started.stderr
    assert len(beside_waiting(started.stderr.splitlines())) <= 2, started.stderr
    audit(tmp_path / "out")
    with create_trial(tmp_path / "out") as trial:
        assert not trial.dropped(), started.stderr
        assert trial.steps(TRAIN) == list(range(5))
        assert_in_run(trial, started, 0, started.evidence())


def test_drops_are_recorded(launcher: Launcher, tmp_path: Path) -> None:
    """Two steps of weights do not fit, and the uploader lingers."""
    started = launcher.start(
        tmp_path / "rank",
        steps=6,
        width=400,
        hook={
            "out_dir": str(tmp_path / "out"),
            "spool_dir": str(tmp_path / "spools"),
            "linger_s": 30.0,
            "buffer_bytes": 4 << 20,
            "on_full": "drop",
        },
    )
    assert started.wait() == 0, repr(started)
    drained(tmp_path / "spools")
    found = audit(tmp_path / "out")
    noted = {(one.step, one.name) for one in started.evidence()}
    stored = {(one.mode_step, one.name) for one in found}
    with create_trial(tmp_path / "out") as trial:
        dropped = {(drop.mode_step, name) for drop in trial.dropped() for name in drop.names}
        assert dropped
        assert all("full" in drop.reason for drop in trial.dropped())
        assert not dropped & stored
        assert dropped | stored == noted, "neither stored nor said to be dropped"
        for step in range(6):
            lacks = any(number == step for number, _ in dropped)
            expected = {0: MissingReason.DROPPED} if lacks else {}
            assert trial.missing(step, TRAIN) == expected
        kept = [one for one in started.evidence() if (one.step, one.name) in stored]
        assert_in_run(trial, started, 0, kept)
    assert started.stderr.count("not captured") == 1, started.stderr


NOBODY = """
from functools import partial
import smdist.workers.hook.capture_session as outlet
supervisor = outlet.Supervisor
outlet.Supervisor = lambda spool, **more: supervisor(
    spool, python="/bin/false", most_rapid_deaths=2, **more
)
outlet.CaptureLimits = partial(outlet.CaptureLimits, block_timeout_s=60.0)
hook = train(order, close=False)
print(hook.usage().blocked_s)
hook.close()
"""


def test_training_does_not_wait_for_an_uploader_that_never_comes(
    launcher: Launcher, tmp_path: Path
) -> None:
    out_dir, root = tmp_path / "out", tmp_path / "spools"
    started = launcher.start(
        tmp_path / "rank",
        NOBODY,
        steps=8,
        width=200,
        hook={"out_dir": str(out_dir), "spool_dir": str(root), "buffer_bytes": 2 << 20},
    )
    assert started.wait() == 0, repr(started)
    assert float((started.folder / "stdout").read_text()) < 30, "it waited for room"
    (spool,) = spools(root)
    assert f"smdist recover {spool}" in started.stderr
    assert recover(spool, pytest.fail).state == "ended"
    found = audit(out_dir)
    stored = {(one.mode_step, one.name) for one in found}
    with create_trial(out_dir) as trial:
        dropped = {(drop.mode_step, name) for drop in trial.dropped() for name in drop.names}
        assert dropped | stored == {(one.step, one.name) for one in started.evidence()}
        assert trial.missing(0, TRAIN) == {}
        assert trial.missing(7, TRAIN) == {0: MissingReason.DROPPED}


# -- a full disk under the journal -----------------------------------------------------------------

# One journal file fits there, a second one does not: the script goes on until it is needed.
FULL_JOURNAL = """
import subprocess, sys, time
import numpy, torch
import smdist.pytorch as smd
out_dir, spools, room = sys.argv[1:]
hook = smd.Hook(
    out_dir,
    save_config=smd.SaveConfig(save_interval=1),
    include_collections=["weights", "gradients"],
    spool_dir=spools,
    buffer_bytes=64 << 20,
    linger_s=0.05,
)
model = torch.nn.Linear(3, 2)
hook.register_module(model)
value, step = numpy.ones(60), 0
while step == 0 or hook.usage().dropped_tensors < 20:
    model(torch.ones(1, 3)).sum().backward()
    for _ in range(100):
        hook.save_tensor("value", value)
    step += 1
dropped = hook.usage().dropped_tensors
if room == "again":
    subprocess.run(["mount", "-o", "remount,size=64m", spools], check=True)
    whole = 0
    while whole < 3:  # it is tried twice a second
        time.sleep(0.01)  # so that what is dropped meanwhile is little enough to be listed
        model(torch.ones(1, 3)).sum().backward()
        step += 1
        whole = whole + 1 if hook.usage().dropped_tensors == dropped else 0
        dropped = hook.usage().dropped_tensors
print(step, hook.usage().dropped_tensors)
hook.close()
"""


@pytest.mark.parametrize("room", ["again", "never"])
def test_a_full_disk_under_the_journal_does_not_touch_training(
    tmp_path: Path, small_disk: Path, room: str
) -> None:
    out_dir = tmp_path / "out"
    job = subprocess.run(
        [sys.executable, "-c", FULL_JOURNAL, str(out_dir), str(small_disk), room],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert job.returncode == 0, job.stderr
    steps, dropped = map(int, job.stdout.split())
    assert job.stderr.count("free some disk space") == (1 if room == "again" else 2), job.stderr
    drained(small_disk)
    with create_trial(out_dir) as trial:
        listed = sum(len(drop.names) for drop in trial.dropped())
        last = trial.steps(show_incomplete_steps=True)[-1]
        if room == "again":
            assert listed == dropped
            assert last == steps - 1
            assert trial.missing(last) == {}
            assert trial.ranks()[0].status is RankStatus.ENDED
        else:
            assert "could not be written" in job.stderr
            assert trial.ranks()[0].status is RankStatus.LOST
