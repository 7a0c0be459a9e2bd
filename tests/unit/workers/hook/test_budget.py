"""A budget of training time, against a simulated job whose true overhead is known."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smdist.workers.hook.overhead_budget import MAX_STRIDE, Budget, Spent


@dataclass
class Job:
    """Steps of `step_s`; a capture adds `raw_s` (`reduced_s`) and gives the uploader as much to do."""

    step_s: float
    raw_s: float
    reduced_s: float = 0.0
    uploader_s: float = 0.0
    processors: int = 2
    interval: int = 1
    now: float = 0.0
    training_s: float = 0.0
    uploaded_s: float = 0.0

    def run(self, budget: Budget, steps: int) -> list[int]:
        kept = []
        for step in range(steps):
            self.now += self.step_s
            spent = Spent(self.now, self.training_s, self.uploaded_s)
            if step % self.interval == 0 and budget.keeps(step // self.interval, spent):
                kept.append(step)
                cost = self.reduced_s if budget.reduced else self.raw_s
                self.now += cost + self.uploader_s / self.processors
                self.training_s += cost
                self.uploaded_s += self.uploader_s
        return kept

    def overhead(self, steps: int) -> float:
        return self.now / (steps * self.step_s) - 1


@given(
    share=st.floats(0.005, 0.3),
    step_s=st.floats(0.001, 2.0),
    cost=st.floats(0.0, 1.5),
    uploader=st.floats(0.0, 1.0),
    interval=st.integers(1, 10),
)
@pytest.mark.slow
def test_the_budget_is_kept_in_the_long_run(
    share: float, step_s: float, cost: float, uploader: float, interval: int
) -> None:
    job = Job(step_s, cost * step_s, 0.0, uploader * step_s, interval=interval)
    budget = Budget(share, job.processors)
    steps = 20_000
    job.run(budget, steps)
    # The first few captures are made before anything is known.
    first = 8 * (cost + uploader / 2) / steps
    assert job.overhead(steps) <= share + first + 1e-9


@given(share=st.floats(0.01, 0.3), part=st.floats(0.0, 0.5))
def test_what_fits_is_not_thinned(share: float, part: float) -> None:
    job = Job(1.0, share * part)
    budget = Budget(share, 2)
    job.run(budget, 200)
    assert budget.stride == 1
    assert not budget.reduced


def test_it_starts_carefully_and_opens_up() -> None:
    budget = Budget(0.05, 1)
    kept = Job(1.0, 0.01).run(budget, 100)
    assert kept[:6] == [0, 4, 8, 12, 16, 20]
    assert kept[-10:] == list(range(90, 100))


@given(cheap=st.floats(0.0, 1.0), dear=st.floats(0.0, 20.0))
@pytest.mark.slow
def test_ranks_of_different_cost_share_the_steps_of_the_slowest(cheap: float, dear: float) -> None:
    settled = 4000
    both = [set(Job(1.0, cost).run(Budget(0.03, 1), 8000)) for cost in (cheap, dear)]
    late = [{step for step in kept if step >= settled} for kept in both]
    fewest, most = sorted(late, key=len)
    assert fewest <= most


def test_raw_becomes_statistics_when_a_stride_does_not_do() -> None:
    budget = Budget(0.01, 1)
    job = Job(1.0, raw_s=5.0, reduced_s=0.05)
    kept = job.run(budget, 5000)
    assert budget.reduced
    assert budget.stride < MAX_STRIDE
    late = [step for step in kept if step >= 4000]
    assert 100 <= len(late) <= 250  # 0.05 s of 0.0075 s a step: one in 8


def test_statistics_that_are_too_dear_are_thinned_further() -> None:
    budget = Budget(0.01, 1)
    job = Job(1.0, raw_s=5.0, reduced_s=3.0)
    job.run(budget, 50_000)
    assert budget.stride > MAX_STRIDE
    assert job.overhead(50_000) <= 0.011


def test_a_job_that_becomes_faster_is_thinned_more() -> None:
    budget = Budget(0.03, 1)
    job = Job(1.0, raw_s=0.02)
    job.run(budget, 200)
    assert budget.stride == 1
    job.step_s = 0.1
    job.run(budget, 2000)
    assert budget.stride == 16
    assert budget.expected == pytest.approx(0.02 / 1.6, rel=0.05)
