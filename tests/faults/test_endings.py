"""Ways for a training process to end, or not to: each leaves a whole run that says what happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from smdist.coordination.view.membership import MissingReason, RankStatus
from smdist.identity import modes
from smdist.trials import create_trial
from tests.faults.audit import assert_in_run, audit, unexplained
from tests.faults.launcher import REPOSITORY, Launcher, drained, spools
from tests.faults.test_bad_places import fill, trouble_of
from tests.support.waiting import until

TRAIN = modes.TRAIN

# Something happens to the fourth step, between its forward and its backward.
WITHIN = """
import os, signal, sys
from pathlib import Path
from torch import nn

def happens():
    {happens}

class Criterion(nn.CrossEntropyLoss):
    calls = 0
    def forward(self, *args):
        Criterion.calls += 1
        if Criterion.calls == 4:
            happens()
        return super().forward(*args)

Criterion.__name__ = "CrossEntropyLoss"
nn.CrossEntropyLoss = Criterion
{before}
train(order)
"""


class Ending(NamedTuple):
    happens: str
    code: int
    status: RankStatus
    reason: str
    fourth: MissingReason  # why the step in which it happened is not complete
    before: str = ""


LOST = "died without closing its hook"
WITHIN_IT = "the process ended within step 3"
ENDINGS = {
    "SIGTERM": Ending(
        "os.kill(os.getpid(), signal.SIGTERM)",
        -signal.SIGTERM,
        RankStatus.LOST,
        LOST,
        MissingReason.LOST_WITHIN,
    ),
    "SIGTERM with a handler": Ending(
        "os.kill(os.getpid(), signal.SIGTERM)",
        143,
        RankStatus.ENDED,
        WITHIN_IT,
        MissingReason.ENDED_WITHIN,
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))",
    ),
    "SIGINT": Ending(
        "os.kill(os.getpid(), signal.SIGINT)",
        -signal.SIGINT,
        RankStatus.ENDED,
        "KeyboardInterrupt",
        MissingReason.ENDED_WITHIN,
        "signal.signal(signal.SIGINT, signal.default_int_handler)",
    ),
    "SIGSEGV": Ending(
        "os.kill(os.getpid(), signal.SIGSEGV)",
        -signal.SIGSEGV,
        RankStatus.LOST,
        LOST,
        MissingReason.LOST_WITHIN,
    ),
    "exception": Ending(
        "raise ValueError('no such label')",
        1,
        RankStatus.ENDED,
        "ValueError: no such label",
        MissingReason.ENDED_WITHIN,
    ),
    "os._exit": Ending("os._exit(7)", 7, RankStatus.LOST, LOST, MissingReason.LOST_WITHIN),
    "sys.exit": Ending("sys.exit(5)", 5, RankStatus.ENDED, WITHIN_IT, MissingReason.ENDED_WITHIN),
    "abort": Ending(
        "os.abort()", -signal.SIGABRT, RankStatus.LOST, LOST, MissingReason.LOST_WITHIN
    ),
}


def test_endings_within_a_step(launcher: Launcher, tmp_path: Path) -> None:
    """All at once: each takes little but the start of its uploader."""
    print(f"runs in {tmp_path}")  # noqa: T201
    root = tmp_path / "spools"
    processes = {
        name: launcher.start(
            tmp_path / name,
            WITHIN.format(happens=ending.happens, before=ending.before),
            steps=8,
            hook={"out_dir": str(tmp_path / name / "out"), "spool_dir": str(root)},
        )
        for name, ending in ENDINGS.items()
    }
    for name, ending in ENDINGS.items():
        assert processes[name].wait() == ending.code, f"{name}: {processes[name]!r}"
    drained(root)
    for name, ending in ENDINGS.items():
        started, out_dir = processes[name], tmp_path / name / "out"
        found = audit(out_dir)
        with create_trial(out_dir) as trial:
            assert trial.loaded_all_steps, name
            report = trial.ranks()[0]
            assert report.status is ending.status, name
            assert ending.reason in report.reason, name
            assert trial.steps(TRAIN, show_incomplete_steps=True) == [0, 1, 2, 3], name
            missing = {0: ending.fourth}
            assert [trial.missing(step, TRAIN) for step in range(4)] == [{}, {}, {}, missing], name
            assert_in_run(trial, started, 0, started.evidence())
            assert not unexplained(found, 0, started.evidence()), name
            assert not trial.troubles(), name


# -- forks -----------------------------------------------------------------------------------------

LOADS = """
import os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset

data = DataLoader(TensorDataset(torch.arange(16.0)), batch_size=4, num_workers=2)

def before_step(step):
    assert [batch[0].sum().item() for batch in data] == [6.0, 22.0, 38.0, 54.0]
    if step == 2:
        child = os.fork()
        if child == 0:
            sys.exit(0)  # with all the handlers that the parent has registered for its end
        assert os.waitpid(child, 0)[1] == 0
    if step == 3:
        child = os.fork()
        if child == 0:
            import torch.nn as nn
            model.fc1.weight.data.zero_()
            model(torch.ones(4, 64)).sum().backward()  # nothing of this is to be saved
            hook.save_scalar("child", 1.0)
            hook.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

import smdist.pytorch as smd
made = []
class Hook(smd.Hook):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        made.append(self)
    def register_module(self, module, **kwargs):
        super().register_module(module, **kwargs)
        global hook, model
        hook, model = self, module
smd.Hook = Hook
train(order, before_step=before_step)
assert len(made) == 1
"""


def test_forks_leave_the_run_alone(launcher: Launcher, tmp_path: Path) -> None:
    out_dir, root = tmp_path / "out", tmp_path / "spools"
    started = launcher.start(
        tmp_path / "rank",
        LOADS,
        steps=5,
        hook={"out_dir": str(out_dir), "spool_dir": str(root), "linger_s": 0.01},
    )
    assert started.wait() == 0, repr(started)
    drained(root)
    found = audit(out_dir)
    with create_trial(out_dir) as trial:
        assert trial.steps(TRAIN) == [0, 1, 2, 3, 4]
        assert trial.ranks()[0].status is RankStatus.ENDED
        assert trial.workers() == ["worker_0"]
        assert len(trial.attempts()) == 1
        assert not trial.has_tensor("scalar/child")
        assert_in_run(trial, started, 0, started.evidence())
        assert not unexplained(found, 0, started.evidence())


# -- a full buffer ---------------------------------------------------------------------------------

BLOCKED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
train(order, before_step=lambda step: step == 2 and wait_for(Path(order.arguments["go"])))
"""


def settled(count: Callable[[], int]) -> Callable[[], bool]:
    """Whether a count has not changed for a hundred looks at it."""
    seen = [-1, 0]

    def look() -> bool:
        now = count()
        seen[:] = [now, seen[1] + 1 if now == seen[0] else 0]
        return seen[1] > 100

    return look


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ended_while_it_waits_for_room(
    launcher: Launcher, tmp_path: Path, small_disk: Path, number: signal.Signals
) -> None:
    out_dir, root, go = small_disk / "out", tmp_path / "spools", tmp_path / "go"
    started = launcher.start(
        tmp_path / "rank",
        BLOCKED,
        steps=100,
        width=200,
        go=str(go),
        hook={
            "out_dir": str(out_dir),
            "spool_dir": str(root),
            "linger_s": 0.01,
            "buffer_bytes": 2 << 20,
            "close_timeout_s": 1.0,
        },
    )
    started.wait_for("step 1")
    until(lambda: list(out_dir.glob("manifests/*/*")), "the first manifest", about=lambda: started)
    ballast = fill(small_disk)
    go.touch()
    until(lambda: "space" in trouble_of(root), "the uploader to be stopped", about=lambda: started)
    until(lambda: "training waits for room" in started.stderr, "the rank to say that it waits")
    until(settled(lambda: len(started.evidence())), "the buffer to be full")
    assert started.code is None, repr(started)
    started.kill(number)
    assert started.wait() == -number, repr(started)
    ballast.unlink()
    drained(root)
    found = audit(out_dir)
    with create_trial(out_dir) as trial:
        report = trial.ranks()[0]
        if number is signal.SIGINT:
            assert report.status is RankStatus.ENDED
            assert "KeyboardInterrupt" in report.reason
            assert "smdist recover" in started.stderr  # one second was not enough
        else:
            assert report.status is RankStatus.LOST
        assert_in_run(trial, started, 0, started.evidence())
        assert not unexplained(found, 0, started.evidence())
        last = max(one.step for one in started.evidence())
        within = {
            signal.SIGINT: MissingReason.ENDED_WITHIN,
            signal.SIGKILL: MissingReason.LOST_WITHIN,
        }
        assert trial.missing(last, TRAIN) in ({0: within[number]}, {})
        assert all(trial.missing(step, TRAIN) == {} for step in range(last))


# The store is full from here on, and then somebody kills the job.
KILLED_BESIDE_A_FULL_STORE = """
import os, signal, sys
from pathlib import Path
import numpy, torch
import smdist.pytorch as smd
out_dir = Path(sys.argv[1])
hook = smd.Hook(
    out_dir,
    save_config=smd.SaveConfig(save_interval=1),
    include_collections=["weights"],
    spool_dir=sys.argv[2],
    linger_s=0.05,
)
model = torch.nn.Linear(3, 2)
hook.register_module(model)
model(torch.ones(1, 3))
hook.step()
assert hook.flush(60)
with (out_dir.parent / "ballast").open("wb", buffering=0) as file:
    try:
        while file.write(bytes(4096)):
            pass
    except OSError:
        pass
for _ in range(3):
    model(torch.ones(1, 3))
    hook.save_tensor("large", numpy.ones(20_000))
    hook.step()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_whoever_reads_the_output_of_a_killed_job_does_not_wait_for_the_upload(
    tmp_path: Path, small_disk: Path
) -> None:
    out_dir, root = small_disk / "out", tmp_path / "spools"
    job = subprocess.run(
        [sys.executable, "-c", KILLED_BESIDE_A_FULL_STORE, str(out_dir), str(root)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,  # pipes: this returns when nobody holds them any more
        text=True,
        timeout=120,
        check=False,
    )
    assert job.returncode == -signal.SIGKILL, job.stderr
    (spool,) = spools(root)
    (line,) = [line for line in job.stderr.splitlines() if "in the background" in line]
    assert str(out_dir) in line
    assert f"smdist recover {spool}" in line
    assert (spool / "uploader.log").exists()
    (small_disk / "ballast").unlink()
    drained(root)
    with create_trial(out_dir) as trial:
        assert trial.steps(TRAIN, show_incomplete_steps=True) == trial.steps(TRAIN)
        assert len(trial.tensor("large").steps()) == 3
