"""A training script and its analysis in the ancestor's vocabulary alone.

Only the imports were changed: `smdebug` became `smdist`.
"""

# ruff: noqa: T201 (what it prints is compared)

from __future__ import annotations

import argparse

import torch
from torch import nn, optim
from torch.nn import functional

import smdist.pytorch as smd
from smdist import ReductionConfig, SaveConfig, SaveConfigMode, modes
from smdist.analysis.utils import no_refresh
from smdist.exceptions import NoMoreData, RuleEvaluationConditionMet, TensorUnavailableForStep
from smdist.rules.rule import Rule
from smdist.rules.rule_invoker import invoke_rule
from smdist.trials import create_trial
from smdist.trials.trial import Trial


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.relu0 = nn.ReLU()
        self.fc = nn.Linear(4 * 6 * 6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu0(self.conv1(x))
        logits: torch.Tensor = self.fc(x.flatten(1))
        return functional.log_softmax(logits, dim=1)


class LossIsNotFalling(Rule):
    def __init__(self, base_trial: Trial, patience: int = 2) -> None:
        super().__init__(base_trial, action_str="")
        self.patience = int(patience)
        self.seen: list[int] = []

    def set_required_tensors(self, step: int) -> None:
        for name in self.base_trial.tensor_names(collection="losses"):
            self.req_tensors.add(name=name, steps=[step])

    def invoke_at_step(self, step: int) -> bool:
        self.seen.append(step)
        for tensor in self.req_tensors.get():
            for needed in self.req_tensors.get_tensor_steps(tensor.name):
                tensor.value(needed)
        return len(self.seen) > self.patience


def make_hook(args: argparse.Namespace, net: Net) -> smd.Hook:
    if args.from_json:
        hook = smd.get_hook(create_if_not_exists=True)
        assert hook is not None
        return hook
    hook = smd.Hook(
        out_dir=args.out_dir,
        save_config=SaveConfig(
            mode_save_configs={
                modes.TRAIN: SaveConfigMode(save_interval=2),
                modes.EVAL: SaveConfigMode(save_interval=1),
            }
        ),
        include_collections=["weights", "gradients", "relu"],
        export_tensorboard=False,
    )
    hook.get_collection("relu").add_module_tensors(net.relu0, inputs=True, outputs=True)
    hook.get_collection("gradients").reduction_config = ReductionConfig(
        reductions=["mean"], abs_reductions=["max"], norms=["l2"]
    )
    smd.set_hook(hook)
    return hook


def run_epoch(
    net: Net, hook: smd.Hook, criterion: nn.Module, optimizer: optim.Optimizer | None, batches: int
) -> None:
    net.train(optimizer is not None)
    hook.set_mode(modes.EVAL if optimizer is None else modes.TRAIN)
    for number in range(batches):
        output = net(torch.randn(2, 1, 8, 8))
        loss = criterion(output, torch.randint(10, (2,)))
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        hook.save_scalar("batch_number", number, sm_metric=True)
    hook.save_tensor("confusion", torch.eye(2).numpy(), collections_to_write=["metrics"])


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    net, criterion = Net(), nn.NLLLoss()
    hook = make_hook(args, net)
    hook.register_module(net)
    hook.register_loss(criterion)
    optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        run_epoch(net, hook, criterion, optimizer, batches=4)
        run_epoch(net, hook, criterion, None, batches=2)
    assert smd.get_hook() is hook
    hook.close()


def analyze(path: str) -> None:
    trial = create_trial(path, name="older")
    trial.wait_for_steps([0])
    assert trial.loaded_all_steps
    print("modes", [mode.name for mode in trial.modes()])
    print("train", trial.steps(mode=modes.TRAIN))
    print("eval", trial.steps(mode=modes.EVAL))
    print("losses", trial.tensor_names(collection=smd.CollectionKeys.LOSSES))
    print("relu", trial.tensor_names(regex="relu0_.*put"))
    weights = trial.collection("weights")
    assert weights is not None
    print("weights", sorted(weights.tensor_names))
    with no_refresh(trial):
        for name in trial.tensors(collection="weights"):
            tensor = trial.tensor(name)
            for step in tensor.steps(mode=modes.TRAIN):
                assert tensor.value(step, mode=modes.TRAIN, worker="worker_0") is not None
                assert tensor.prev_steps(step, 1, mode=modes.TRAIN) == [step]
    gradient = trial.tensor("gradient/Net_fc.weight")
    first = gradient.steps(mode=modes.TRAIN)[0]
    largest = gradient.reduction_value(first, "max", mode=modes.TRAIN, abs=True)
    print("gradient", largest >= 0)
    try:
        gradient.value(first, mode=modes.TRAIN)
    except TensorUnavailableForStep as error:
        print("reductions only", error.has_reductions)
    try:
        trial.wait_for_steps([100_000])
    except NoMoreData as error:
        print("no more data after", error.last_step)
    rule = LossIsNotFalling(base_trial=trial)
    invoke_rule(rule, start_step=0, end_step=5)
    print("judged", rule.seen)
    try:
        invoke_rule(LossIsNotFalling(trial, patience=0), raise_eval_cond=True)
    except RuleEvaluationConditionMet as met:
        print("fired", met.rule_name, met.step)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out_dir", required=True)
    parser.add_argument("--from_json", action="store_true")
    args = parser.parse_args()
    train(args)
    if not args.from_json:
        analyze(args.out_dir)


if __name__ == "__main__":
    main()
