"""The process of one rank of one peer: it trains a model and is told when to capture.

    python -m benchmarks.trainer PEER MODEL --threads 1 [--rank 0 --ranks 2 --port 29500]

Every peer trains the same model from the same seed. Commands come over standard input, see `pipe`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import MODELS, count_bytes, training
from benchmarks.peers.base import Base, Setup
from benchmarks.pipe import Answer, own_output, serve


class Trainer:
    def __init__(self, peer: Base, model: str, ranks: int) -> None:
        self._peer, self._ranks = peer, ranks
        torch.manual_seed(1)
        job = MODELS[model]()
        self._model, self._step, self._example = job.model, job.step, job.example
        if ranks > 1:
            self._model = DistributedDataParallel(job.model)
            self._step = training(self._model, job.example)
        self._nbytes = count_bytes(job.model)
        self._captured, self._interval = -1, 0

    def facts(self) -> Answer:
        return {
            "nbytes": self._nbytes,
            "tensors": 2 * sum(1 for _ in self._model.parameters()),
            "threads": torch.get_num_threads(),
        }

    def attach(self, **setup: Any) -> Answer:
        self._peer.attach(self._model, Setup(**setup, ranks=self._ranks))
        self._captured, self._interval = 0, setup["interval"]
        return {}

    def settle(self) -> Answer:
        self._peer.settle()
        return {}

    def steps(self, count: int) -> Answer:
        """Milliseconds of each step: on the wall, and of this thread alone."""
        wall, cpu = [], []
        for _ in range(count):
            begin, begin_cpu = time.perf_counter_ns(), time.thread_time_ns()
            self._step()
            if self._captured >= 0:
                if self._captured % self._interval == 0:
                    self._peer.save(self._captured)
                self._captured += 1
            wall.append((time.perf_counter_ns() - begin) / 1e6)
            cpu.append((time.thread_time_ns() - begin_cpu) / 1e6)
        return {"wall": wall, "cpu": cpu}

    def detach(self) -> Answer:
        begin = time.perf_counter()
        found = self._peer.detach()
        self._captured = -1
        return {"drain_s": time.perf_counter() - begin, **found}

    def toggled(self, count: int) -> Answer:
        """Pairs of forwards with the peer's callbacks on the root and without, in changing order.

        They run there and nowhere else, and a whole step varies by more than they cost.
        """
        callbacks = self._model._forward_pre_hooks
        hung = dict(callbacks)
        found: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(count):
            for hooked in (turn % 2 == 0, turn % 2 == 1):
                callbacks.clear()
                callbacks.update(hung if hooked else {})
                begin = time.perf_counter_ns()
                self._model(self._example)
                found[hooked].append((time.perf_counter_ns() - begin) / 1e6)
        callbacks.update(hung)
        return {"with": found[True], "without": found[False]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.trainer")
    parser.add_argument("peer")
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    answers = own_output()
    peer = importlib.import_module(f"benchmarks.peers.{given.peer}").Peer()
    if given.ranks > 1:
        where = f"tcp://127.0.0.1:{given.port}"
        torch.distributed.init_process_group(
            "gloo", init_method=where, rank=given.rank, world_size=given.ranks
        )
    trainer = Trainer(peer, given.model, given.ranks)
    names = ("facts", "attach", "settle", "steps", "detach", "toggled")
    serve(answers, {name: getattr(trainer, name) for name in names})
    # What a peer left at exit (hooks, threads, process groups) is none of the measurement.
    os._exit(0)


if __name__ == "__main__":
    main()
