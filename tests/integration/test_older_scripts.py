"""Scripts and configurations of the ancestor's time, as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

import smdist.pytorch as smd
from smdist.errors import NoSuchRun
from smdist.trials import S3Trial
from tests.servers.s3 import Server, aws, rclone
from tests.support.torch_jobs import Net, train

__all__ = ["aws", "rclone"]  # fixtures

ROOT = Path(__file__).parents[2]
REQUESTS = json.loads((ROOT / "tests/data/sagemaker_requests.json").read_text())

SAID = """\
modes ['TRAIN', 'EVAL']
train [0, 1, 2, 3, 4, 5, 6, 7]
eval [0, 1, 2, 3]
losses ['NLLLoss_output_0']
relu ['relu0_input_0', 'relu0_output_0']
weights ['Net_conv1.weight', 'Net_fc.weight']
gradient True
reductions only True
no more data after 11
judged [0, 2, 4]
fired LossIsNotFalling 0
"""


def write_request(kind: str, folder: Path) -> Path:
    """A request of the SageMaker SDK, with its local path (if any) in `folder`."""
    request: dict[str, Any] = dict(REQUESTS[kind])
    if "LocalPath" in request:
        request["LocalPath"] = str(folder / "run")
    file = folder / "debughookconfig.json"
    file.write_text(json.dumps(request))
    return file


def run_script(*arguments: str, **environ: str) -> str:
    command = [sys.executable, "-W", "error", str(Path(__file__).with_name("older_script.py"))]
    done = subprocess.run(
        [*command, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_script_of_before_runs_as_it_is(tmp_path: Path) -> None:
    assert run_script("--out_dir", str(tmp_path / "run")) == SAID


def test_a_script_of_before_takes_the_configuration_of_the_platform(tmp_path: Path) -> None:
    file = write_request("everything", tmp_path)
    run_script("--out_dir", "unused", "--from_json", SMDEBUG_CONFIG_FILE_PATH=str(file))
    trial = smd.create_trial(tmp_path / "run")
    assert trial.tensor("Net_fc.weight").steps(smd.modes.TRAIN) == list(range(8))
    assert trial.tensor("relu0_output_0").steps(smd.modes.EVAL) == [0, 2, 3]


def test_a_request_of_the_sagemaker_sdk_is_a_configuration(tmp_path: Path) -> None:
    hook = smd.Hook.create_from_json_file(str(write_request("everything", tmp_path)))
    assert hook.get_collection("custom_activations").save_config is not None
    net = Net()
    hook.register_module(net)
    hook.set_mode(smd.modes.TRAIN)
    train(net, 4)
    hook.set_mode(smd.modes.EVAL)
    train(net, 3)
    hook.close()
    trial = smd.create_trial(tmp_path / "run")
    assert trial.tensor("Net_fc1.weight").steps(smd.modes.TRAIN) == [0, 1, 2, 3]
    assert trial.tensor("Net_fc1.weight").steps(smd.modes.EVAL) == [0, 2]
    assert "relu_output_0" in trial.tensor_names(collection="custom_activations")
    assert "fc2_output_0" in trial.tensor_names(collection="default")
    relu = trial.tensor("relu_output_0")
    assert relu.reduction_value(3, "abs_variance") >= 0
    assert relu.shape(0) == (3, 8)


@pytest.mark.parametrize(("kind", "collections"), [("local path", {"losses", "metrics"})])
def test_a_short_request_is_a_configuration(
    tmp_path: Path, kind: str, collections: set[str]
) -> None:
    hook = smd.Hook.create_from_json_file(write_request(kind, tmp_path))
    hook.close()
    assert hook.out_dir == str(tmp_path / "run")
    assert set(hook.include_collections) == collections


@pytest.mark.s3
@pytest.mark.usefixtures("aws")
def test_a_bucket_by_its_parts(
    tmp_path: Path, rclone: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = rclone.make_bucket(f"older-{uuid.uuid4().hex[:12]}")
    monkeypatch.setenv("AWS_ENDPOINT_URL", rclone.endpoint)
    with pytest.raises(NoSuchRun, match=f"s3://{bucket}/team/run"):
        S3Trial(name="job", bucket_name=bucket, prefix_name="team/run/", range_steps=(0, 9))
    file = tmp_path / "debughookconfig.json"
    file.write_text(json.dumps({**REQUESTS["default"], "S3OutputPath": f"s3://{bucket}/team/run"}))
    hook = smd.Hook.create_from_json_file(file)
    hook.save_scalar("x", 1.0)
    hook.close()
    trial = S3Trial("job", bucket, "team/run")
    assert trial.tensor("scalar/x").value(0) == 1
