"""A rank of a job that saves to an object store, to be started by torchrun or alone.

The first argument is a JSON object. On its standard output come lines of JSON: its spool once it has
one, then what it has to say at its end. It also watches its own process: once its hook is built, no
thread of it may use the network.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import smdist.pytorch as smd
from smdist.workers.upload.process import Supervisor

NETWORK = {"socket.connect", "socket.getaddrinfo", "socket.sendto", "socket.sendmsg"}


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 8)
        self.fc2 = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(torch.relu(self.fc1(x)))
        return out


def say(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def make_hook(order: dict[str, Any]) -> smd.Hook:
    reductions = order.get("reductions")
    settings: dict[str, Any] = {
        "save_config": smd.SaveConfig(save_interval=1),
        "include_collections": ["weights", "biases", "gradients"],
        "include_workers": "all",
        "reduction_config": smd.ReductionConfig(reductions=reductions) if reductions else None,
        "on_error": "raise",
        "buffer_bytes": 64 << 20,
        **order.get("hook", {}),
    }
    return smd.Hook(order["out"], **settings)


def die_with_the_uploader() -> None:
    setattr(Supervisor, "_spawn", lambda _: 0)  # noqa: B010 - nobody starts another one
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # that thread has ended
            children += path.read_text().split()
    for child in set(children):
        os.kill(int(child), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


class Watch:
    def __init__(self) -> None:
        self.on, self.seen, self.seen_before = False, list[str](), 0
        sys.addaudithook(self._audit)

    def _audit(self, event: str, _: Any) -> None:
        if event not in NETWORK:
            return
        if self.on:
            self.seen.append(event)
        else:
            self.seen_before += 1


def run(order: dict[str, Any], rank: int) -> None:
    torch.manual_seed(rank)
    watch, model = Watch(), Net(order.get("width", 4))
    hook = make_hook(order)
    watch.on = True
    hook.register_module(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copies: dict[str, np.ndarray[Any, Any]] = {}
    stop, progress = (Path(order["kept"]) / name for name in ("stop", f"step-{rank}"))
    for step in range(order["steps"]):
        for name, parameter in model.named_parameters():
            copies[f"{step}/{name}"] = parameter.detach().numpy().copy()
        optimizer.zero_grad()
        model(torch.randn(3, order.get("width", 4))).square().sum().backward()
        hook.save_scalar("twice", 2 * step)
        optimizer.step()
        if step == 0:
            say(spool=str(hook._core.session._spool))
        progress.write_text(str(step))
        time.sleep(order.get("step_s", 0.0))  # what else a step would do
        if order.get("until_stopped") and stop.exists():
            break
    watch.on = False
    usage = hook.usage()
    if order.get("dies"):
        np.savez(Path(order["kept"]) / f"{rank}.npz", **copies)  # type: ignore[arg-type]
        die_with_the_uploader()
    hook.close()
    np.savez(Path(order["kept"]) / f"{rank}.npz", **copies)  # type: ignore[arg-type]
    say(
        rank=rank,
        blocked_s=usage.blocked_s if usage else -1.0,
        network=watch.seen,
        network_before=watch.seen_before,
        steps=step + 1,
    )


def main(order: dict[str, Any]) -> None:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        run(order, 0)
        return
    dist.init_process_group("gloo")
    run(order, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
