"""What is compared: each case is one model, one schedule and one place, and the peers in it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

__all__ = ["CASES", "Case", "chosen"]

ALL = ("none", "smdist", "smdebug", "dcp", "tensorboard", "torch_save", "safetensors", "memcpy")


@dataclass(frozen=True)
class Case:
    name: str
    title: str
    model: str = "mlp"
    how: str = "full"
    interval: int = 1
    place: str = "local"  # or "s3"
    ranks: int = 1
    threads: int = 1
    peers: tuple[str, ...] = ("none", "smdist", "smdebug", "memcpy")
    steps: int = 12  # captured per visit; as many without, but 20 at most: half before, half after
    warm_up: int = 6  # so many that what is stored after the last step that is due is timed too
    bar: float | None = None  # of smdist's ratio
    at_most: dict[str, float] = field(default_factory=dict)  # smdist's added time over a peer's
    # Histograms take a second per step: a few show that as well as many.
    slow: dict[str, int] = field(default_factory=lambda: {"tensorboard": 3})
    quick: bool = False
    times: int = 1  # as many rounds as others have: what is close to its bar needs more
    figure: bool = False  # in the picture
    not_due: bool = False
    budget: float | None = None  # share of the step time that smdist may take, by its own account

    def of(self, peer: str) -> Case:
        return self.shorter(self.slow[peer]) if peer in self.slow else self

    def shorter(self, steps: int) -> Case:
        """Fewer steps, but never less than one that is due."""
        whole = steps if self.not_due else max(1, steps // self.interval) * self.interval
        warm_up = min(self.warm_up, steps) if self.interval == 1 else self.warm_up
        return replace(self, steps=min(self.steps, whole), warm_up=warm_up)


CASES = (
    Case(
        "mlp",
        "full, every step, MLP of 6 M",
        peers=ALL,
        bar=1.08,
        at_most={"smdebug": 0.2, "dcp": 0.2},
        quick=True,
        figure=True,
        times=3,
    ),
    Case(
        "mlp_no_core_to_spare",
        "full, every step, MLP of 6 M, torch on both processors",
        threads=2,
        peers=("smdist", "smdebug", "dcp"),
        at_most={"smdebug": 0.2, "dcp": 0.2},
        bar=1.08,
        figure=True,
    ),
    Case(
        "mlp_five",
        "five reductions, every step, MLP of 6 M",
        how="five",
        peers=("none", "smdist", "smdebug", "tensorboard", "memcpy"),
        bar=1.08,
        at_most={"smdebug": 0.2},
        quick=True,
        figure=True,
    ),
    Case(
        "mlp_10",
        "full, every 10 steps, MLP of 6 M",
        interval=10,
        peers=("smdist", "smdebug"),
        bar=1.01,
        steps=30,
        warm_up=6,
        figure=True,
        times=3,
    ),
    Case(
        "mlp_100",
        "full, every 100 steps, MLP of 6 M",
        interval=100,
        peers=("smdist",),
        bar=1.01,
        steps=100,
        warm_up=11,
    ),
    Case(
        "mlp_not_due",
        "not due, MLP of 6 M",
        interval=10**9,
        peers=("smdist",),
        bar=1.002,
        steps=200,
        warm_up=1,
        not_due=True,
        quick=True,
    ),
    Case(
        "mlp_budget",
        "full, as often as overhead_budget=0.03 allows, MLP of 6 M",
        peers=("smdist",),
        budget=0.03,
        bar=1.035,
        steps=64,
        warm_up=64,  # until it has found what it can afford
    ),
    Case(
        "mlp_budget_no_core_to_spare",
        "full, as often as overhead_budget=0.03 allows, MLP of 6 M, torch on both processors",
        threads=2,
        peers=("smdist",),
        budget=0.03,
        bar=1.035,
        steps=128,
        warm_up=128,
    ),
    Case(
        "mlp25",
        "full, every step, MLP of 25 M",
        model="mlp25",
        peers=("smdist", "smdebug"),
        steps=5,
        warm_up=4,
        at_most={"smdebug": 0.2},
    ),
    Case(
        "transformer",
        "full, every step, transformer of 6 M",
        model="transformer",
        peers=("smdist", "smdebug", "dcp", "memcpy"),
        bar=1.08,
        at_most={"smdebug": 0.2, "dcp": 0.2},
        figure=True,
    ),
    Case(
        "transformer_five",
        "five reductions, every step, transformer of 6 M",
        model="transformer",
        how="five",
        peers=("smdist", "smdebug"),
        bar=1.08,
        at_most={"smdebug": 0.2},
    ),
    Case(
        "large",
        "full, every 10 steps, one tensor of 256 MB",
        model="large",
        interval=10,
        peers=("smdist", "smdebug"),
        steps=10,
        warm_up=6,
    ),
    Case(
        "two_ranks",
        "full, every step, MLP of 6 M, 2 ranks on 2 processors",
        ranks=2,
        peers=("none", "smdist", "smdebug"),
        steps=8,
        at_most={"smdebug": 0.2},
        figure=True,
    ),
    Case(
        "two_ranks_10",
        "full, every 10 steps, MLP of 6 M, 2 ranks on 2 processors",
        ranks=2,
        interval=10,
        peers=("smdist",),
        steps=20,
        warm_up=6,
    ),
    Case(
        "s3",
        "full, every step, MLP of 6 M, loopback S3",
        place="s3",
        peers=("smdist", "smdebug"),
        figure=True,
    ),
    Case(
        "s3_10",
        "full, every 10 steps, MLP of 6 M, loopback S3",
        place="s3",
        interval=10,
        peers=("smdist", "smdebug"),
        bar=1.05,
        steps=30,
        warm_up=6,
        quick=True,
        figure=True,
        times=3,
    ),
    Case(
        "s3_100",
        "full, every 100 steps, MLP of 6 M, loopback S3",
        place="s3",
        interval=100,
        peers=("smdist",),
        steps=100,
        warm_up=11,
    ),
)


def chosen(name: str) -> Case:
    return next(case for case in CASES if case.name == name)
