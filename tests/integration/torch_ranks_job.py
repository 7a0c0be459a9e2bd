"""A rank of a job that keeps its own copies, to be compared with what the hook captured.

Started by torchrun, or by hand with its rank as second argument. The first is a JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import smdist.pytorch as smd


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.fc2 = nn.Linear(8, 2)
        self.unused = nn.Linear(2, 2)
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(torch.relu(self.fc1(x)))
        return out if self.skips else out + 0 * self.unused(out)


def settings(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "save_config": smd.SaveConfig(save_interval=1),
        "include_collections": ["weights", "biases", "gradients"],
        "include_workers": case.get("include_workers", "all"),
        "stage_gradients": case.get("stage", "local"),
        "on_error": "raise",
        "buffer_bytes": 64 << 20,
    }


def start(order: dict[str, Any]) -> int:
    """This process's rank, which nothing but the process group tells if the job is `bare`."""
    if not order.get("bare"):
        dist.init_process_group("gloo")
    else:
        meeting = f"file://{order['kept']}/meeting"
        rank = int(sys.argv[2])
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    return dist.get_rank()


def run(case: dict[str, Any], out: Path, kept: Path, order: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net, reference = Net(), Net()
    net.skips = reference.skips = case.get("ddp", {}).get("find_unused_parameters", False)
    hook = smd.Hook(out, **settings(case))
    if case.get("register") == "inner":
        hook.register_module(net)
    rank = dist.get_rank() if dist.is_initialized() else start(order)
    model = nn.parallel.DistributedDataParallel(net, **case.get("ddp", {}))
    if case.get("register") != "inner":
        hook.register_module(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if case.get("optimizer"):
        hook.register_optimizer(optimizer)
    copies: dict[str, np.ndarray[Any, Any]] = {}
    for step in range(3):
        batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * rank + step))
        for name, parameter in net.named_parameters():
            copies[f"{step}/weight/{name}"] = parameter.detach().numpy().copy()
        # What this rank computes by itself.
        reference.load_state_dict(net.state_dict())
        reference.zero_grad()
        reference(batch).square().sum().backward()
        optimizer.zero_grad(set_to_none=case.get("set_to_none", True))
        model(batch).square().sum().backward()
        for own, reduced in zip(reference.named_parameters(), net.named_parameters(), strict=True):
            if own[1].grad is not None and reduced[1].grad is not None:
                copies[f"{step}/local/{own[0]}"] = own[1].grad.numpy().copy()
                copies[f"{step}/synced/{own[0]}"] = reduced[1].grad.numpy().copy()
        optimizer.step()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    facts = {"hooks": len(net._forward_pre_hooks), "children": children, "worker": hook.worker}
    hook.close()
    np.savez(kept / f"{rank}.npz", **copies)  # type: ignore[arg-type]
    (kept / f"{rank}.json").write_text(json.dumps(facts))


def main(order: dict[str, Any]) -> None:
    if not order.get("bare"):
        start(order)
    for number, case in enumerate(order["cases"]):
        kept = Path(order["kept"]) / str(number)
        kept.mkdir(exist_ok=True)
        run(case, Path(order["out"]) / str(number), kept, order)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
