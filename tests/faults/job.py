"""Jobs for fault tests: many real training processes for the price of one import of torch.

Run as a program it imports torch once and then, for each order it reads, forks a process that runs a
script from its first line to the interpreter's own end: exit handlers, tracebacks and exit codes are
those of any script. Of smdist, modules are loaded by then, and nothing has happened.

`train` is what most of these scripts call: one rank that writes down, in a file of its own and
without a buffer, the checksum of each value as soon as the capture of it has returned. Whatever ends
the process, what the file holds must be in the run.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec


class Order(msgspec.Struct, frozen=True):
    """A process to be started. `script` sees `order` as a global."""

    script: str
    folder: str  # of this process: evidence, stderr
    arguments: dict[str, Any] = {}
    environ: dict[str, str] = {}


class Exited(msgspec.Struct, frozen=True):
    pid: int
    code: int  # negative: the signal


# -- a rank ----------------------------------------------------------------------------------------


class Evidence:
    """Lines `<step> <checksum> <tensor>`; one write for what one capture brought."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._pid = os.getpid()

    def captured(self, step: int, tensors: Iterable[tuple[str, Any]]) -> None:
        from smdist.format.block import crc32c

        if os.getpid() != self._pid:  # in a fork of the rank, of which nothing is saved
            return
        lines = [
            f"{step} {crc32c(memoryview(value.detach().numpy()).cast('B'))} {name}\n"
            for name, value in tensors
        ]
        os.write(self._fd, "".join(lines).encode())

    def mark(self, text: str) -> None:
        os.write(self._fd, f"# {text}\n".encode())


def build(width: int, seed: int) -> Any:
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = nn.Linear(width, width)
            self.fc2 = nn.Linear(width, width)
            self.out = nn.Linear(width, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.out(self.fc2(self.fc1(x)).relu())
            return result

    torch.manual_seed(seed)
    return Net()


def train(
    order: Order,
    *,
    before_step: Callable[[int], None] = lambda _step: None,
    wrap: Callable[[Any], Any] = lambda model: model,
    close: bool = True,
) -> Any:
    """One rank. Of its arguments: rank, world, steps, width, seed; `hook` goes to the hook."""
    import torch
    from torch import nn

    import smdist.pytorch as smd

    given = order.arguments
    rank, width = given.get("rank", 0), given.get("width", 64)
    torch.set_num_threads(1)
    model = build(width, given.get("seed", 0) + rank)
    evidence = Evidence(Path(order.folder) / "evidence")
    hook = smd.Hook(
        **{
            "save_config": smd.SaveConfig(save_interval=1),
            "include_collections": ["weights", "biases", "gradients", "losses", "outputs"],
            "include_workers": "all",
            "rank": rank,
            "world_size": given.get("world", 1),
            "buffer_bytes": 64 << 20,
            **given["hook"],
        }
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    hook.register_module(model)
    hook.register_loss(criterion)
    hook.set_mode(smd.modes.TRAIN)
    wrapped = wrap(model)
    names = {id(value): f"Net_{name}" for name, value in model.named_parameters()}
    generator = torch.Generator().manual_seed(100 + given.get("seed", 0) + rank)
    watching = False

    def after_weights(*_: Any) -> None:
        nonlocal watching
        evidence.captured(step, [(names[id(value)], value) for value in model.parameters()])
        if not watching:  # now: the hook's own were hung up in this forward, and run before these
            watching = True
            for value in model.parameters():
                value.register_post_accumulate_grad_hook(after_gradient)
            for name, module in model.named_modules():
                module.register_forward_hook(partial(after_output, name or "Net"))

    def after_gradient(value: Any) -> None:
        evidence.captured(step, [(f"gradient/{names[id(value)]}", value.grad)])

    def after_output(name: str, _module: Any, _args: Any, output: Any) -> None:
        evidence.captured(step, [(f"{name}_output_0", output)])

    step = 0
    model.register_forward_pre_hook(after_weights)
    for step in range(given.get("steps", 10)):
        before_step(step)
        evidence.mark(f"step {step}")
        x = torch.randn(4, width, generator=generator)
        y = torch.randint(0, 4, (4,), generator=generator)
        optimizer.zero_grad()
        loss = criterion(wrapped(x), y)
        evidence.captured(step, [("CrossEntropyLoss_output_0", loss)])
        loss.backward()
        optimizer.step()
        number = torch.tensor(step * 0.25 + rank, dtype=torch.float64)
        hook.save_scalar("twice", number)
        evidence.captured(step, [("scalar/twice", number)])
    evidence.mark("trained")
    if close:
        hook.close()
        evidence.mark("closed")
    return hook


def wait_for(path: Path, timeout_s: float = 120.0) -> None:
    """Until a test says so by making a file."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(str(path))
        time.sleep(0.002)


# -- the program -----------------------------------------------------------------------------------


def _become(order: Order) -> dict[str, Any]:
    """In the new process: its own files, and the globals of its script."""
    null = os.open(os.devnull, os.O_RDONLY)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    os.makedirs(order.folder, exist_ok=True)
    for number, name in ((1, "stdout"), (2, "stderr")):
        own = os.open(os.path.join(order.folder, name), flags, 0o600)
        os.dup2(own, number)
        os.close(own)
    os.dup2(null, 0)
    os.close(null)
    os.environ.update(order.environ)
    return {"__name__": "__main__", "order": order, "train": train, "wait_for": wait_for}


def _serve() -> Order:
    """Returns only in the processes it has started; ends the program when nobody gives orders."""
    pending, orders = b"", 0
    while True:
        if select.select([0], [], [], 0.005)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                sys.stdout.flush()
                os._exit(0)
            pending += data
        while b"\n" in pending:
            line, _, pending = pending.partition(b"\n")
            order = msgspec.json.decode(line, type=Order)
            orders += 1
            child = os.fork()
            if child == 0:
                return order
            os.write(1, f"{child}\n".encode())
        _reap()


def _reap() -> None:
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(found[1])
            os.write(1, msgspec.json.encode(Exited(found[0], code)) + b"\n")
    except ChildProcessError:
        pass


def _main() -> None:
    import torch
    import torch.distributed

    import smdist.pytorch
    import smdist.storage.s3.store  # noqa: F401 - loaded, and nothing else: its SDK takes a second

    torch.set_num_threads(1)
    # The first one loads a second's worth of modules.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).zero_grad()
    os.write(1, b"0\n")
    order = _serve()
    exec(compile(order.script, "script", "exec"), _become(order))  # noqa: S102


if __name__ == "__main__":
    _main()
