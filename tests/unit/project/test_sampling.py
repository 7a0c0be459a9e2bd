"""The share of the randomised cases: meaningful, rotating, repeatable."""

from __future__ import annotations

import pytest

from tests.support import sampling
from tests.support.sampling import repeat_command, rotating_share


@pytest.fixture(autouse=True)
def no_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "SOAK", False)


def share(seed: int, monkeypatch: pytest.MonkeyPatch, size: int, one_in: int) -> list[int]:
    monkeypatch.setenv(sampling.SEED_VARIABLE, str(seed))
    return rotating_share(range(size), one_in)


@pytest.mark.parametrize(("size", "one_in"), [(10, 3), (7, 7), (2, 5), (1, 4), (12, 1)])
def test_successive_seeds_run_every_case(
    size: int, one_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = [share(seed, monkeypatch, size, one_in) for seed in range(1000, 1000 + one_in)]
    assert all(shares)
    assert {case for some in shares for case in some} == set(range(size))
    assert len(shares[0]) <= -(-size // one_in)


def test_each_kind_is_represented(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(6):
        monkeypatch.setenv(sampling.SEED_VARIABLE, str(seed))
        assert {n % 3 for n in rotating_share(range(7), 4, kind=lambda n: n % 3)} == {0, 1, 2}


def test_a_soak_runs_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "SOAK", True)
    assert rotating_share(range(10), 5) == list(range(10))
    assert repeat_command("tests/a.py::b").startswith("SMDIST_SOAK=1 SMDIST_TEST_SEED=")


def test_a_seed_is_kept_and_repeats_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sampling.SEED_VARIABLE, "77")
    assert sampling.set_seed() == 77
    assert sampling.generator("a", 1).random() == sampling.generator("a", 1).random()
    assert sampling.generator("a", 1).random() != sampling.generator("a", 2).random()
    assert "SMDIST_TEST_SEED=77 " in repeat_command("tests/a.py::b")
    monkeypatch.delenv(sampling.SEED_VARIABLE)
    assert sampling.set_seed() == sampling.seed()
