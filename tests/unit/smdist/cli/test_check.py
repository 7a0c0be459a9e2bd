"""`smdist check` on stored runs: exit codes, the table, JSON, and names that hold control characters."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from smdist import create_trial
from smdist.cli.app import app
from smdist.errors import ConfigurationError
from smdist.identity import ModeKeys
from smdist.rules import Verdict, check
from smdist.rules.across_ranks import OutlierRank
from smdist.storage import LocalStore
from tests.support.run_builder import RunBuilder, Saved

GRADIENT = "gradient/Net_fc.weight"


def write_run(path: Path, *, factor: float = 1.0, name: str = GRADIENT) -> Path:
    """Write a run of three ranks, in which gradients of rank 1 grow by a factor from step 6 on."""
    random = np.random.default_rng(0)
    run = RunBuilder(LocalStore(path))
    for rank in range(3):
        writer = run.rank(rank, world=3)
        for step in range(10):
            gradient = random.normal(size=100).astype(np.float32)
            if rank == 1 and step >= 6:
                gradient *= np.float32(factor)
            loss = np.array([1.0 + 0.01 * random.random()])
            tensors = {
                name: Saved(gradient, collections=("gradients",)),
                "loss": Saved(loss, raw=False, reductions=(), collections=("losses",)),
            }
            writer.step(ModeKeys.TRAIN, step, tensors)
        writer.end()
    return path


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", *arguments])
    return result.exit_code, result.output


def test_a_bad_rank_is_named(tmp_path: Path) -> None:
    code, text = invoke(str(write_run(tmp_path, factor=1e3)))
    assert code == 1, text
    assert text.startswith(
        "1 problem found\n\nOutlierRank: the norm of gradient/Net_fc.weight on worker_1"
    )
    assert "ranks: worker_1  step: 6 of TRAIN  tensor: gradient/Net_fc.weight" in text
    undecided, _, quiet = text.partition("not decided:")[2].partition("nothing found by: ")
    assert "IdenticalData" in undecided
    assert "needs collection inputs" in undecided
    assert quiet.strip() == "ExplodingTensor, FirstNonFinite, StalledTrainingRule, StepSkew"


def test_json_is_the_list_of_findings(tmp_path: Path) -> None:
    path = write_run(tmp_path, factor=np.inf)
    code, text = invoke(str(path), "-o", "json", "--rules", "FirstNonFinite, OutlierRank")
    found = json.loads(text)
    assert code == 1
    assert {one["rule"] for one in found} == {"FirstNonFinite", "OutlierRank"}
    for one in found:
        assert (one["verdict"], one["first_step"], one["mode"]) == ("FIRES", 6, "TRAIN")
        assert (one["ranks"], one["tensor"]) == ([1], GRADIENT)
    with create_trial(path) as trial:
        assert [one.to_dict() for one in check(trial, ["FirstNonFinite", "OutlierRank"])] == found


def test_a_clean_run_has_nothing(tmp_path: Path) -> None:
    code, text = invoke(str(write_run(tmp_path)))
    assert code == 0, text
    assert text.startswith("no problem found\n\nnot decided:")


def test_what_cannot_be_read_is_not_fine(tmp_path: Path) -> None:
    assert invoke(str(tmp_path / "nowhere"))[0] == 2
    write_run(tmp_path / "run")
    assert invoke(str(tmp_path / "run"), "--rules", "OutlierRnk")[0] == 2


def test_names_cannot_control_a_terminal(tmp_path: Path) -> None:
    code, text = invoke(str(write_run(tmp_path, factor=1e3, name="gradient/\x1b[2J\nfine")))
    assert code == 1
    assert "\x1b" not in text
    assert "gradient/\\x1b[2J\\nfine" in text


def test_rules_with_own_thresholds(tmp_path: Path) -> None:
    with create_trial(write_run(tmp_path, factor=15)) as trial:
        (found,) = check(trial, [OutlierRank()])
        assert (found.verdict, found.threshold) == (Verdict.FIRES, 10.0)
        (found,) = check(trial, [OutlierRank(repeated=100, at_once=100)])
        assert found.verdict is Verdict.QUIET
        with pytest.raises(ConfigurationError, match="give a list"):
            check(trial, "OutlierRank")
