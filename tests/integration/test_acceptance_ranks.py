"""Real jobs of several ranks: what a trial says is what the ranks kept for themselves, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from smdist.coordination.view.membership import MissingReason, RankStatus
from smdist.errors import InvalidWorker, NoMoreData, StepNotYetAvailable, StepUnavailable
from smdist.identity import modes
from smdist.trials import Trial, create_trial
from tests.faults.audit import assert_in_run, audit, unexplained
from tests.faults.launcher import REPOSITORY, Launcher, drained, launching
from tests.faults.places import Place, at, make_place, moto, place, rclone
from tests.support.waiting import until

__all__ = ["moto", "place", "rclone"]  # fixtures

pytestmark = pytest.mark.ranks

RANKS, STEPS = 4, 4
EVERYTHING = ["weights", "biases", "gradients", "losses", "outputs"]

# Several runs one after the other in one job: starting it costs more than all of them.
JOB = """
import json, os, sys
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import smdist.pytorch as smd

folder, plan = Path(sys.argv[1]), json.loads(sys.argv[2])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.fc2 = nn.Linear(5, 3, bias=False)

    def forward(self, x):
        return self.fc2(self.norm(self.fc1(x)).relu())


def children():
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.append(int(path.parent.name))
    return found


def one_run(name, options, early):
    before = set(children())  # the last uploader of a run merges it, and may do so still
    # Built before the process group is there in the first run: ranks are known late.
    every = smd.SaveConfig(save_interval=1)
    hook = smd.Hook(plan["out"].replace("NAME", name), save_config=every, **options)
    if early:
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = Net()
    wrapped = DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hook.register_module(wrapped)
    hook.register_loss(criterion)
    generator = torch.Generator().manual_seed(rank)
    kept, local = {}, {}

    def keep(step, name, value):
        kept[f"{step} {name}"] = np.array(value.detach().numpy() if torch.is_tensor(value) else value)

    for module_name, module in model.named_children():
        def after_forward(module, args, output, module_name=module_name):
            keep(step, f"{module_name}_output_0", output)
        module.register_forward_hook(after_forward)
    for parameter_name, parameter in model.named_parameters():
        def before_reduction(grad, parameter_name=parameter_name):
            local[parameter_name] = grad.clone()
        parameter.register_hook(before_reduction)

    for step in range(plan["steps"]):
        hook.set_mode(smd.modes.TRAIN)
        optimizer.zero_grad()
        for parameter_name, parameter in model.named_parameters():
            keep(step, f"Net_{parameter_name}", parameter)
        x = torch.randn(6, 7, generator=generator)
        y = torch.randint(0, 3, (6,), generator=generator)
        output = wrapped(x)
        loss = criterion(output, y)
        loss.backward()
        for parameter_name, parameter in model.named_parameters():
            synced = options.get("stage_gradients") == "synced"
            gradient = parameter.grad if synced else local[parameter_name]
            keep(step, f"gradient/Net_{parameter_name}", gradient)
        keep(step, "Net_output_0", output)
        keep(step, "CrossEntropyLoss_output_0", loss)
        optimizer.step()
        number = float(loss) * (rank + 1)
        hook.save_scalar("weighted", number)
        keep(step, "scalar/weighted", np.float64(number))
    np.savez(folder / f"{name}-{rank}.npz", **kept)
    spools = [path.name for path in folder.glob("spools/*/*")]
    dist.barrier()
    own = [pid for pid in children() if pid not in before]
    told = {"children": own, "worker": hook.worker, "spools": spools}
    (folder / f"{name}-{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    hook.close()
    dist.barrier()


for number, (name, options) in enumerate(plan["runs"].items()):
    one_run(name, {**plan["options"], **options}, early=number == 0)
dist.destroy_process_group()
"""

RUNS: dict[str, dict[str, Any]] = {
    # First: nothing of another run may be about when its processes are counted.
    "one": {"include_workers": "one"},
    "local": {"include_workers": "all"},
    "synced": {"include_workers": "all", "stage_gradients": "synced"},
    "listed": {"include_workers": [1, 3]},
}
IN_A_BUCKET = ("one", "local")


def torchrun(script: Path, *words: str, options: tuple[str, ...] = (), ranks: int = RANKS) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "--monitor-interval=0.1", *options]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    environ["SMDIST_SPOOL_DIR"] = str(script.parent / "spools")
    done = subprocess.run(
        [*command, str(script), *words],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=environ,
    )
    assert done.returncode == 0, f"{script.parent}\n{done.stderr}"
    return done.stderr


class Told(msgspec.Struct, frozen=True):
    """What a rank saw around itself while its hook was open."""

    children: list[int]
    worker: str
    spools: list[str]


class Finished(NamedTuple):
    folder: Path
    place: Place

    def out_dir(self, run: str) -> str:
        return self.place.beside(run)

    def objects(self, run: str) -> Path:
        return self.place.objects(self.out_dir(run))

    def kept(self, run: str, rank: int) -> dict[tuple[int, str], np.ndarray[Any, Any]]:
        found = {}
        with np.load(self.folder / f"{run}-{rank}.npz") as kept:
            for key in kept.files:
                step, _, name = key.partition(" ")
                found[int(step), name] = kept[key]
        return found

    def told(self, run: str, rank: int) -> Told:
        return msgspec.json.decode((self.folder / f"{run}-{rank}.json").read_bytes(), type=Told)


@pytest.fixture(scope="module", params=["directory", pytest.param("rclone", marks=pytest.mark.s3)])
def job(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Finished]:
    """One torchrun of four ranks that made all the runs."""
    folder = tmp_path_factory.mktemp("job")
    place = make_place(request.param, request, folder)
    script = folder / "job.py"
    script.write_text(JOB)
    runs = {run: RUNS[run] for run in (RUNS if place.server is None else IN_A_BUCKET)}
    options = {"include_collections": EVERYTHING}
    plan = {"steps": STEPS, "runs": runs, "options": options, "out": place.beside("NAME")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in place.environ.items():
            patch.setenv(name, value)
        torchrun(script, str(folder), msgspec.json.encode(plan).decode())
        drained(folder / "spools")
        yield Finished(folder, place)


def assert_same(trial: Trial, job: Finished, run: str, rank: int) -> None:
    """The trial has of this rank what it kept, nothing else, and every bit of it is the same."""
    kept = job.kept(run, rank)
    worker = f"worker_{rank}"
    for (step, name), value in kept.items():
        found = trial.tensor(name).value(step, mode=modes.TRAIN, worker=worker)
        where = f"{name} of {worker} at step {step} in {job.out_dir(run)}"
        assert (found.dtype, found.shape) == (value.dtype, value.shape), where
        assert found.tobytes() == value.tobytes(), where
    every = trial.values(workers=[rank], mode=modes.TRAIN)
    assert {(step, name) for name, steps in every.items() for step in steps} == set(kept)


@pytest.mark.parametrize(
    ("job", "run"),
    at(("directory", "local"), ("directory", "synced"), ("rclone", "local")),
    indirect=["job"],
)
def test_all_ranks_agree_to_the_bit(job: Finished, run: str) -> None:
    audit(job.objects(run))
    with create_trial(job.out_dir(run)) as trial:
        assert trial.workers() == [f"worker_{rank}" for rank in range(RANKS)]
        assert trial.num_workers == RANKS
        assert trial.steps() == trial.steps(modes.TRAIN) == list(range(STEPS))
        assert trial.loaded_all_steps
        assert not trial.troubles()
        assert [trial.missing(step) for step in trial.steps()] == [{}] * STEPS
        for rank in range(RANKS):
            assert_same(trial, job, run, rank)
            assert trial.ranks()[rank].status is RankStatus.ENDED
        gradients = trial.tensor("gradient/Net_fc1.weight").stack(STEPS - 1)
        equal = [np.array_equal(gradients[0], other) for other in gradients[1:]]
        assert equal == [run == "synced"] * (RANKS - 1)


def test_one_rank_saves_and_the_others_do_nothing(job: Finished) -> None:
    with create_trial(job.out_dir("one")) as trial:
        assert trial.workers() == ["worker_0"]
        assert trial.steps() == list(range(STEPS))
        assert_same(trial, job, "one", 0)
        with pytest.raises(InvalidWorker):
            trial.tensor("Net_fc1.weight").value(0, worker="worker_1")
    assert len(job.told("one", 0).children) == 1
    for rank in range(1, RANKS):
        assert job.told("one", rank).children == [], "it has started a process"
        assert job.told("one", rank).worker == f"worker_{rank}"
    for rank in range(RANKS):
        assert all("-worker_0-" in name for name in job.told("one", rank).spools)
    stored = job.objects("one")
    owners = {path.stem for path in (stored / "collections").iterdir()}
    owners |= {path.name for path in stored.glob("[smh]e*s/*") if path.is_dir()}
    owners |= {path.name for path in (stored / "manifests").iterdir()}
    assert owners == {"worker_0"}


@pytest.mark.parametrize("job", ["directory"], indirect=True)
def test_a_list_of_ranks(job: Finished) -> None:
    audit(job.objects("listed"))
    with create_trial(job.out_dir("listed")) as trial:
        assert trial.workers() == ["worker_1", "worker_3"]
        assert trial.steps() == list(range(STEPS))
        for rank in (1, 3):
            assert_same(trial, job, "listed", rank)
    assert {path.name for path in (job.objects("listed") / "manifests").iterdir()} == {
        "worker_1",
        "worker_3",
    }
    assert [len(job.told("listed", rank).children) for rank in range(RANKS)] == [0, 1, 0, 1]


# -- ranks that do not do the same -----------------------------------------------------------------


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with launching() as launcher:
        yield launcher


UNEVEN = """
import os
from pathlib import Path

arguments = order.arguments
if arguments["ends"] == "never":
    os._exit(0)
def before_step(step):
    if step == 5:
        wait_for(Path(arguments["go"]))
hook = train(order, before_step=before_step, close=False)
if arguments["ends"] == "close":
    hook.close()
    wait_for(Path(arguments["done"]))  # lives on, and has nothing to say
"""


def test_ranks_that_leave_early_never_come_or_do_less(
    launcher: Launcher, place: Place, tmp_path: Path
) -> None:
    out_dir, root = place.out_dir, tmp_path / "spools"
    go, done = tmp_path / "go", tmp_path / "done"
    print(f"run in {tmp_path}")  # noqa: T201
    plan = [("steps", 8), ("close", 2), ("steps", 3), ("never", 0)]
    ranks = [
        launcher.start(
            tmp_path / f"rank-{rank}",
            UNEVEN,
            place.environ,
            rank=rank,
            world=4,
            steps=steps,
            ends=ends,
            go=str(go),
            done=str(done),
            hook={"out_dir": out_dir, "spool_dir": str(root), "linger_s": 0.01},
        )
        for rank, (ends, steps) in enumerate(plan)
    ]
    ranks[0].wait_for("step 4")
    ranks[1].wait_for("trained")
    assert ranks[2].wait() == 0, repr(ranks[2])
    until(lambda: all("-worker_0-" in spool for spool in glob(f"{root}/*/*/spool.json")), "drain")
    began = time.monotonic()
    with create_trial(out_dir) as trial:
        assert time.monotonic() - began < 30

        def there() -> bool:
            trial.refresh()
            begun = 4 in trial.steps(show_incomplete_steps=True)
            return begun and 0 not in trial.missing(4)

        until(there, "the whole of step 4")
        assert trial.workers() == ["worker_0", "worker_1", "worker_2"]
        assert trial.num_workers == 4
        assert trial.steps() == []
        assert not trial.loaded_all_steps
        never = {3: MissingReason.NEVER_STARTED}
        assert trial.missing(1) == never
        assert trial.missing(2) == {1: MissingReason.ENDED, **never}
        assert trial.missing(4) == {
            1: MissingReason.ENDED,
            2: MissingReason.ENDED,
            **never,
        }
        with pytest.raises(StepNotYetAvailable):
            trial.tensor("Net_fc1.weight").value(6)
        go.touch()
    assert ranks[0].wait() == 0, repr(ranks[0])
    drained(root)
    with create_trial(out_dir, lost_after_s=0.0) as trial:
        assert trial.loaded_all_steps, "it waits for a rank that never came"
        assert trial.steps(show_incomplete_steps=True) == list(range(8))
        assert {r: report.status for r, report in trial.ranks().items()} == {
            0: RankStatus.ENDED,
            1: RankStatus.ENDED,
            2: RankStatus.ENDED,
            3: RankStatus.NEVER_STARTED,
        }
        trial.wait_for_steps([7], timeout_s=10)
        with pytest.raises(NoMoreData):
            trial.wait_for_steps([8], timeout_s=10)
        with pytest.raises((NoMoreData, StepUnavailable)):
            trial.tensor("Net_fc1.weight").value(8)
        found = audit(place.objects())
        for rank, started in enumerate(ranks[:3]):
            assert_in_run(trial, started, rank, started.evidence())
            assert not unexplained(found, rank, started.evidence())
    done.touch()
    assert ranks[1].wait() == 0, repr(ranks[1])
