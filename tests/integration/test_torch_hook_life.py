"""The life of a PyTorch hook: construction, errors, copies, forks, ends."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smdist.pytorch as smd
from smdist import kernel
from smdist.coordination.view.membership import RankStatus
from smdist.errors import (
    ConfigurationError,
    InvalidCollectionConfiguration,
    RunExists,
    StoreError,
)
from smdist.workers.hook import capture_session as session
from smdist.workers.torch_adapter import parameters as torch_parameters
from smdist.workers.upload.process import Supervisor
from tests.support.torch_jobs import ALL, Net, beside_waiting, hooked, read, train

REPOSITORY = Path(__file__).parents[2]


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    parameters: list[Any] = list(net.parameters())
    return [
        *(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in net.modules()),
        *(len(p._post_accumulate_grad_hooks or ()) for p in parameters),
        len(optimizer._optimizer_step_pre_hooks),
        len(optimizer._optimizer_step_post_hooks),
    ]


@pytest.mark.parametrize("step_on", ["forward", "optimizer", "manual"])
def test_close_leaves_everything_as_it_was(tmp_path: Path, step_on: Any) -> None:
    net, loss = Net(), nn.MSELoss()
    optimizer = torch.optim.Adam(net.parameters())
    before = state_of(net, optimizer)
    with hooked(tmp_path / "run", save_all=True) as hook:
        hook.register_module(net, step_on=step_on)
        hook.register_loss(loss)
        hook.register_optimizer(optimizer)
        train(net, 2, loss, optimizer)
        assert state_of(net, optimizer) != before
        hook.close()
        hook.close()
        assert state_of(net, optimizer) == before
        assert not loss._forward_hooks
        train(net, 2, loss, optimizer)
        hook.save_scalar("late", 1)
        hook.register_module(net)
        hook.step()
    assert state_of(net, optimizer) == before
    trial = read(tmp_path / "run")
    assert trial.loaded_all_steps
    assert not trial.has_tensor("scalar/late")


def test_nothing_happens_when_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("USE_SMDIST", "USE_SMDEBUG"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "0")
            net = Net()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            before = state_of(net, optimizer)
            with hooked(tmp_path / "run", save_all=True) as hook:
                hook.register_module(net)
                hook.register_loss(nn.MSELoss())
                hook.register_optimizer(optimizer)
                hook.get_collection("weights").include("x")
                assert state_of(net, optimizer) == before
                train(net, 2, optimizer=optimizer)
                hook.save_scalar("x", 1)
                hook.save_tensor("y", torch.ones(1))
                hook.set_mode(smd.modes.EVAL)
                hook.step()
            assert not (tmp_path / "run").exists()


def test_a_dry_run_plans_and_writes_nothing(tmp_path: Path) -> None:
    net = Net()
    with hooked(tmp_path / "run", save_all=True, dry_run=True) as hook:
        hook.register_module(net)
        train(net, 2)
        hook.save_scalar("x", 1)
        sink: Any = hook._core.session.open()
        assert sink.tensors > 20
        assert hook.usage() is None
    assert not (tmp_path / "run").exists()


def test_a_place_that_holds_a_run_is_refused_when_the_hook_is_built(tmp_path: Path) -> None:
    program = f"""
import torch, smdist.pytorch as smd
hook = smd.Hook({str(tmp_path / "run")!r})
hook.save_scalar("x", 1)
hook.step()
hook.close()
"""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    with pytest.raises(RunExists, match="resume=True"):
        smd.Hook(tmp_path / "run", rank=0, world_size=1)
    with pytest.raises(RunExists, match="resume=True"):
        smd.Hook(tmp_path / "run")
    with hooked(tmp_path / "run", resume=True) as hook:
        hook.save_scalar("x", 2)
        hook.step()
    trial = read(tmp_path / "run")
    assert len(trial.attempts()) == 2
    assert int(trial.tensor("scalar/x").value(0)) == 2
    with pytest.raises(RunExists, match="resume=True"):  # a cell of a notebook, run again
        smd.Hook(tmp_path / "run")


@pytest.mark.parametrize("where", ["/proc/nowhere", "file/below", "file"])
@pytest.mark.parametrize("name", ["spool_dir", "SMDIST_SPOOL_DIR"])
def test_a_place_to_buffer_in_that_is_none_is_refused_when_the_hook_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: str
) -> None:
    (tmp_path / "file").write_text("")
    given = {}
    if name == "spool_dir":
        given["spool_dir"] = tmp_path / where
    else:
        monkeypatch.setenv(name, str(tmp_path / where))
    with pytest.raises(ConfigurationError, match=f"{name}=.*use a directory"):
        smd.Hook(tmp_path / "run", **given)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_rank_without_a_place_to_buffer_in_does_not_enter_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net, spools = Net(), tmp_path / "spools"
    with hooked(tmp_path / "run", spool_dir=spools / "below", on_error="warn") as hook:
        assert not spools.exists()
        spools.write_text("")
        hook.register_module(net)
        train(net, 2)
        assert hook.errors == 1
    assert not list((tmp_path / "run").rglob("*.json"))
    assert "spool_dir=" in caplog.text
    assert "Not a directory" in caplog.text
    assert "keep removing it" not in caplog.text


def test_relative_places_are_those_of_where_the_hook_was_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("built", "later"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "built")
    net = Net()
    with hooked(Path("run"), spool_dir="spools", include_collections=["weights"]) as hook:
        monkeypatch.chdir(tmp_path / "later")
        hook.register_module(net)
        train(net, 1)
        assert list((tmp_path / "built" / "spools").rglob("spool.json"))
        assert hook.out_dir == str(tmp_path / "built" / "run")
    assert read(tmp_path / "built" / "run").steps() == [0]
    assert not list((tmp_path / "later").iterdir())


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"rank": "first"}, "rank='first' is not a whole number; give one of at least 0"),
        ({"rank": 1.5}, "rank=1.5"),
        ({"rank": -1, "world_size": 2}, "rank=-1 is too small"),
        ({"world_size": "two"}, "world_size='two' is not a whole number; give one of at least 1"),
        ({"world_size": 0}, "world_size=0 is too small"),
        ({"attempt": "x"}, "attempt='x' is not a whole number"),
        ({"spool_dir": 3}, "spool_dir=3 cannot hold"),
        ({"spool_dir": ""}, "spool_dir='' cannot hold"),
    ],
)
def test_a_process_that_is_nobody_is_refused_when_the_hook_is_built(
    tmp_path: Path, given: dict[str, Any], names: str
) -> None:
    with pytest.raises(ConfigurationError, match=names):
        smd.Hook(tmp_path / "run", **given)


def test_a_rank_may_come_as_text(tmp_path: Path) -> None:
    with hooked(tmp_path / "run", rank="1", world_size="2", include_workers="all") as hook:
        assert hook.worker == "worker_1"


def test_a_full_disk_under_the_spool_is_met_before_the_run(
    tmp_path: Path, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free - (64 << 10)))
    net = Net()
    with hooked(tmp_path / "run", spool_dir=small_disk, on_error="warn") as hook:
        hook.register_module(net)
        train(net, 1)
    assert not list((tmp_path / "run").rglob("*.json"))
    assert "no room for the journal" in caplog.text
    assert [path.name for path in small_disk.iterdir()] == ["ballast"]


@pytest.mark.parametrize("settled", [True, False])
def test_that_nobody_saves_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settled: bool
) -> None:
    net = Net()
    known = {"rank": 0, "world_size": 1} if settled else {}
    with hooked(tmp_path / "run", include_workers=[5, 7], **known) as hook:
        hook.register_module(net)
        train(net, 3)
    assert [
        r.getMessage() for r in caplog.records if "include_workers=[5, 7]" in r.getMessage()
    ] == [
        "include_workers=[5, 7] names no rank of this job, which has 1 (0 to 0): nothing is saved at all"
    ]


def test_an_unwritable_place_is_refused_when_the_hook_is_built(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((ConfigurationError, StoreError)):
        smd.Hook(tmp_path / "file" / "run", rank=0, world_size=1)
    # A rank that does not save has no business there.
    smd.Hook(tmp_path / "file" / "run", rank=1, world_size=2).close()


def test_wrong_settings_are_refused_when_the_hook_is_built(tmp_path: Path) -> None:
    for wrong in (
        {"on_full": "explode"},
        {"stage_gradients": "later"},
        {"include_regex": "("},
        {"include_workers": "some"},
        {"save_config": {"save_interval": 0}},
        {"save_config": smd.SaveConfig(save_interval=1, start_step=10, end_step=5)},
        {"save_config": smd.SaveConfig({smd.modes.EVAL: {"start_step": 5, "end_step": 5}})},
        {"close_timeout_s": -1},
        {"close_timeout_s": "soon"},
        {"close_timeout_s": float("nan")},
        {"rank": 5, "world_size": 2},
    ):
        with pytest.raises(ConfigurationError):
            smd.Hook(tmp_path / "run", **wrong)
    with hooked(tmp_path / "run") as hook:
        for call in (hook.register_module, hook.register_loss, hook.register_optimizer):
            with pytest.raises(ConfigurationError):
                call("no module")  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError):
            hook.set_mode("train")  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="step_on"):
            hook.register_module(Net(), step_on="epoch")  # type: ignore[arg-type]


def test_a_collection_that_can_match_nothing_is_an_error_whatever_the_policy(
    tmp_path: Path,
) -> None:
    net = Net()
    hook = smd.Hook(tmp_path / "run", include_collections=["mine"])
    hook.register_module(net)
    with pytest.raises(InvalidCollectionConfiguration, match="mine"):
        net(torch.randn(1, 4))
    hook.close()


def test_errors_of_ours_do_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("broken on purpose")

    net = Net()
    with hooked(tmp_path / "run", include_collections=ALL, on_error="warn") as hook:
        hook.register_module(net)
        train(net, 1)
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "smdist"):
            patch.setattr(torch_parameters.Parameters, "save_values", broken)
            train(net, 3)
        assert hook.errors == 3
        assert sum("broken on purpose" in record.message for record in caplog.records) <= 3
        hook.save_scalar("wrong", torch.ones(3))
        train(net, 1)
        assert hook.errors == 4
    trial = read(tmp_path / "run")
    troubles = "\n".join(text for texts in trial.troubles().values() for text in texts)
    assert "broken on purpose" in troubles
    assert "scalar/wrong" in troubles
    assert trial.tensor("Net_fc1.weight").steps() == [0, 4]


def test_errors_of_ours_are_raised_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("broken on purpose")

    net = Net()
    with hooked(tmp_path / "run", include_collections=["weights"]) as hook:
        hook.register_module(net)
        with monkeypatch.context() as patch:
            patch.setattr(torch_parameters, "readable", broken)
            with pytest.raises(RuntimeError, match="on purpose"):
                net(torch.randn(1, 4))
        with pytest.raises(ValueError, match="one number"):
            hook.save_scalar("wrong", torch.ones(3))


def test_counters_go_on_after_a_restart(tmp_path: Path) -> None:
    net = Net()
    with hooked(tmp_path / "one", include_collections=["weights"]) as hook:
        hook.register_module(net)
        train(net, 3)
        state = hook.state_dict()
    with hooked(tmp_path / "two", include_collections=["weights"]) as hook:
        hook.load_state_dict(state)
        hook.register_module(net)
        train(net, 2)
        assert hook.global_step == 4
    assert read(tmp_path / "two").steps() == [3, 4]


def test_a_forked_child_is_silent(tmp_path: Path) -> None:
    net = Net()
    with hooked(tmp_path / "run", save_all=True) as hook:
        hook.register_module(net)
        train(net, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # forking beside threads is what data loaders do
            child = os.fork()
        if child == 0:
            code = 1
            try:
                net(torch.randn(1, 4))
                hook.save_scalar("child", 1)
                hook.close()
                code = 2 if any(m._forward_pre_hooks for m in net.modules()) else 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        train(net, 2)
    trial = read(tmp_path / "run")
    assert trial.steps() == [0, 1, 2, 3]
    assert not trial.has_tensor("scalar/child")


def test_data_loader_workers_do_not_disturb(tmp_path: Path) -> None:
    program = f"""
import torch, smdist.pytorch as smd
from torch.utils.data import DataLoader
from tests.support.torch_jobs import Net
net = Net()
hook = smd.Hook({str(tmp_path / "run")!r}, save_config=smd.SaveConfig(save_interval=1), save_all=True,
                on_error="raise")
hook.register_module(net)
for epoch in range(2):
    for batch in DataLoader(torch.randn(8, 4), batch_size=2, num_workers=2):
        net(batch).sum().backward()
"""
    run(program)
    trial = read(tmp_path / "run")
    assert trial.steps() == list(range(8))
    assert trial.loaded_all_steps


def run(program: str | Path) -> subprocess.CompletedProcess[str]:
    """Code, or the path of a script."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, *(["-c"] if isinstance(program, str) else []), program],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_process_that_fails_leaves_its_step_open_and_says_why(tmp_path: Path) -> None:
    program = f"""
import torch, smdist.pytorch as smd
from tests.support.torch_jobs import Net
def main():
    net = Net()
    hook = smd.Hook({str(tmp_path / "run")!r}, save_config=smd.SaveConfig(save_interval=1),
                    include_collections=["weights", "gradients"])
    hook.register_module(net)
    net(torch.randn(1, 4)).sum().backward()
    net(torch.randn(1, 4))
    raise ArithmeticError("diverged")
main()
"""
    done = run(program)
    assert done.returncode == 1
    assert "diverged" in done.stderr
    trial = read(tmp_path / "run")
    assert trial.steps() == [0]
    assert trial.steps(show_incomplete_steps=True) == [0, 1]
    assert trial.tensor("Net_fc1.weight").value(1).shape == (8, 4)
    report = trial.ranks()[0]
    assert "ArithmeticError: diverged" in str(report)


def test_a_process_that_just_ends_has_stored_everything(tmp_path: Path) -> None:
    program = f"""
import torch, smdist.pytorch as smd
from tests.support.torch_jobs import Net, train
def main():
    net = Net()
    hook = smd.Hook({str(tmp_path / "run")!r}, save_config=smd.SaveConfig(save_interval=1),
                    include_collections=["weights", "gradients"])
    hook.register_module(net)
    train(net, 5)
main()
"""
    done = run(program)
    assert done.returncode == 0, done.stderr
    assert beside_waiting(done.stderr.splitlines()) == []
    trial = read(tmp_path / "run")
    assert trial.steps() == [0, 1, 2, 3, 4]
    assert trial.loaded_all_steps


@pytest.mark.parametrize(
    ("method", "end"),
    [
        ("fork", ""),
        ("fork", "raise ArithmeticError('diverged')"),
        ("fork", "sys.exit(3)"),
        ("forkserver", ""),
        ("spawn", "sys.exit(3)"),
    ],
)
def test_a_child_of_multiprocessing_closes_its_hooks(tmp_path: Path, method: str, end: str) -> None:
    job = tmp_path / "job.py"
    job.write_text(f"""
import multiprocessing, sys, torch, smdist.pytorch as smd
from tests.support.torch_jobs import Net
def work():
    net = Net()
    hook = smd.Hook({str(tmp_path / "run")!r}, save_config=smd.SaveConfig(save_interval=1),
                    include_collections=["weights", "gradients"])
    hook.register_module(net)
    net(torch.randn(1, 4)).sum().backward()
    net(torch.randn(1, 4))
    {end}
if __name__ == "__main__":
    mother = smd.Hook({str(tmp_path / "other")!r})  # what is known of it here is forked too
    child = multiprocessing.get_context({method!r}).Process(target=work)
    child.start()
    child.join()
""")
    done = run(job)
    assert done.returncode == 0, done.stderr
    trial = read(tmp_path / "run")
    assert trial.loaded_all_steps
    assert trial.steps(show_incomplete_steps=True) == [0, 1]
    assert trial.steps() == [0]
    reasons = {"": "the process ended within step 1", "sys.exit(3)": "SystemExit: 3"}
    assert trial.ranks()[0].reason == reasons.get(end, "ArithmeticError: diverged")


def test_a_block_that_fails_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    net = Net()
    hook = smd.Hook(tmp_path / "run", save_config=smd.SaveConfig(save_interval=1), save_all=True)

    def fail() -> None:
        with hook:
            hook.register_module(net)
            net(torch.randn(1, 4))
            raise ArithmeticError("diverged")

    with pytest.raises(ArithmeticError):
        fail()
    trial = read(tmp_path / "run")
    assert trial.steps() == []
    assert trial.steps(show_incomplete_steps=True) == [0]


def test_close_does_not_wait_for_an_uploader_that_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    useless = partial(Supervisor, python="/bin/false", most_rapid_deaths=2)
    monkeypatch.setattr(session, "Supervisor", useless)
    net = Net()
    hook = smd.Hook(tmp_path / "run", spool_dir=tmp_path / "spool", include_collections=["weights"])
    hook.register_module(net)
    net(torch.randn(1, 4))
    hook.close(timeout=100)
    assert "smdist recover" in caplog.text
    assert not net._forward_pre_hooks


def test_a_hook_from_a_configuration_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hook.json"
    file.write_text(
        json.dumps(
            {
                "LocalPath": str(tmp_path / "run"),
                "HookParameters": {"save_interval": "2", "on_error": "raise"},
                "CollectionConfigurations": [{"CollectionName": "weights"}],
            }
        )
    )
    monkeypatch.setenv("SMDEBUG_CONFIG_FILE_PATH", str(file))
    assert smd.get_hook() is None
    hook = smd.get_hook(create_if_not_exists=True)
    assert hook is not None
    assert smd.get_hook() is hook
    smd.del_hook()
    net = Net()
    hook.register_hook(net)
    train(net, 3)
    hook.close()
    assert read(tmp_path / "run").tensor("Net_fc1.weight").steps() == [0, 2]
    smd.set_hook(custom_hook=hook)
    assert smd.get_hook() is hook
    smd.del_hook()


def test_tensorboard_is_not_promised_silently(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with hooked(tmp_path / "run", export_tensorboard=True):
        pass
    assert "export_tensorboard" in caplog.text


def test_collections_that_save_nothing_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    with hooked(tmp_path / "run", include_collections=["weights", "layers"]) as hook:
        hook.get_collection("mine").include("relu")
        hook.register_module(net)
        train(net, 2)
        hook.get_collection("weights").include("fc1_output")
        train(net, 1)
    said = [record.getMessage() for record in caplog.records]
    assert sum("'layers' will stay empty: pytorch has no tensors" in text for text in said) == 1
    assert sum("'mine' is not in include_collections" in text for text in said) == 1
    assert read(tmp_path / "run").troubles() == {}


def test_what_people_ask_a_hook(tmp_path: Path) -> None:
    net = Net()
    with hooked(tmp_path / "run", include_collections=["weights"]) as hook:
        assert hook.out_dir == str(tmp_path / "run")
        assert hook.mode is smd.modes.GLOBAL
        assert hook.worker == "worker_0"
        assert hook.usage() is None
        hook.register_module(net)
        train(net, 2)
        usage = hook.usage()
        assert usage is not None
        assert usage.captured_bytes > 0
        assert hook.mode_steps[smd.modes.GLOBAL] == 1


LEAVES = """
import sys, torch, smdist.pytorch as smd
net = torch.nn.Linear(2, 2)
every = smd.SaveConfig(save_interval=1)
hook = smd.Hook(sys.argv[1], save_config=every, include_collections=["weights", "gradients"])
hook.register_module(net)
net(torch.ones(1, 2)).sum().backward()
loss = net(torch.ones(1, 2)).sum()
if sys.argv[2] == "within":
    sys.exit(1)
loss.backward()
"""


@pytest.mark.parametrize("when", ["within", "after"])
def test_a_process_that_leaves_within_a_step_says_so(tmp_path: Path, when: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", LEAVES, str(tmp_path / "run"), when]
    subprocess.run(command, env=environment, check=False, timeout=120)
    trial = read(tmp_path / "run")
    (report,) = trial.ranks().values()
    if when == "after":
        assert (trial.steps(), report.reason) == ([0, 1], "")
    else:
        assert trial.steps() == [0]
        assert report.reason == "the process ended within step 1"
        assert str(trial.missing(1)[0]) == "ended within the step"


@pytest.fixture
def own_signal() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def interrupt_a_copy(monkeypatch: pytest.MonkeyPatch, handler: Callable[..., object]) -> None:
    """A signal comes in the middle of the next save of this thread."""
    copy = kernel.copy
    signal.signal(signal.SIGUSR1, handler)

    def interrupted(*args: Any) -> int:
        monkeypatch.setattr(kernel, "copy", copy)
        signal.raise_signal(signal.SIGUSR1)
        return copy(*args)

    monkeypatch.setattr(kernel, "copy", interrupted)


@pytest.mark.parametrize(
    "use",
    [
        lambda hook, net: hook.register_module(net),
        lambda hook, net: hook.register_hook(net),
        lambda hook, net: hook.register_loss(net),
        lambda hook, net: hook.register_optimizer(torch.optim.SGD(net.parameters(), 0.1)),
        lambda hook, net: hook.record_tensor_value("loss", torch.zeros(1)),
        lambda hook, net: hook.save_scalar("loss", 1.0),
    ],
    ids=["module", "hook", "loss", "optimizer", "record", "save"],
)
def test_who_goes_on_with_a_closed_hook_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, use: Callable[[smd.Hook, Net], None]
) -> None:
    with hooked(tmp_path / "run") as hook:
        pass
    for _ in range(2):
        use(hook, Net())
    told = [record.getMessage() for record in caplog.records]
    assert len([line for line in told if "is closed: nothing more is captured" in line]) == 1


@pytest.mark.usefixtures("own_signal")
@pytest.mark.parametrize("then", ["a step", "close"])
def test_closed_by_a_signal_handler_within_a_save_it_ends_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    net, run = Net(), tmp_path / "run"
    with hooked(run, save_all=True) as hook:
        hook.register_module(net)
        train(net, 2)
        interrupt_a_copy(monkeypatch, lambda *_: hook.close())
        train(net, 1)
        assert hook.usage() is not None, "it goes on with what was interrupted"
        if then == "a step":
            train(net, 2)
        else:
            hook.close()
        assert hook.usage() is None
        train(net, 2)
    with smd.create_trial(run) as trial:
        assert trial.steps() == trial.steps(show_incomplete_steps=True) == [0, 1, 2]
        assert trial.ranks()[0].status is RankStatus.ENDED


def stop(*_: object) -> None:
    raise TimeoutError("the script's own")


class Stop:
    def __call__(self, *_: object) -> None:
        stop()

    def now(self, *_: object) -> None:
        stop()


@pytest.mark.usefixtures("own_signal")
@pytest.mark.parametrize("handler", [stop, partial(stop, 1), Stop(), Stop().now])
def test_what_a_signal_handler_raises_within_a_save_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: Callable[..., object]
) -> None:
    net = Net()
    with hooked(tmp_path / "run", save_all=True) as hook:
        hook.register_module(net)
        interrupt_a_copy(monkeypatch, handler)
        with pytest.raises(TimeoutError, match="the script's own"):
            train(net, 1)


@pytest.mark.usefixtures("own_signal")
def test_what_a_signal_handler_asks_for_within_a_save_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    net, run = Net(), tmp_path / "run"
    flushed: list[bool] = []

    def handler(*_: object) -> None:
        hook.save_scalar("within", 1.0)
        flushed.append(hook.flush(timeout=60.0))

    with hooked(run, save_all=True) as hook:
        hook.register_module(net)
        interrupt_a_copy(monkeypatch, handler)
        train(net, 2)
        hook.save_scalar("after", 1.0)
    assert flushed == [False]
    assert "scalar/within is not saved" in caplog.text
    with smd.create_trial(run) as trial:
        assert trial.steps() == [0, 1]
        assert "scalar/after" in trial.tensor_names()
        assert "scalar/within" not in trial.tensor_names()
