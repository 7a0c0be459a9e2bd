"""The replicas of one process, each a worker of its own.

A strategy that mirrors a model on several devices runs all its replicas in one process. Each one
that saves has its own session, spool and uploader. The first of them is the hook itself: `Replicas`
uses its recorder. Called by `KerasRecording` and `KerasHook` on the training thread, in this order for
each step: `begin`, `offer` for each group of tensors, `close` or `finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from smdist.errors import CaptureError
from smdist.format.manifest import Collections, collections_key
from smdist.identity import StepRef, worker_name
from smdist.planning import StepPlan
from smdist.workers.hook.capture_session import CaptureSession
from smdist.workers.hook.recorder import Recorder
from smdist.workers.tf_adapter.tensor_access import Array

__all__ = ["Replica", "ReplicaLayout", "Replicas"]


class ReplicaLayout(NamedTuple):
    """How many processes the job has, and how many replicas each of them runs."""

    processes: int = 1
    replicas: int = 1


class Replica:
    """A replica that saves, besides the one that the hook itself records."""

    def __init__(
        self,
        index: int,
        session: CaptureSession[Array],
        recorder: Recorder[Array],
        describe: Callable[[str], Collections],
    ) -> None:
        self.index = index
        self.session, self.recorder, self._describe = session, recorder, describe
        self.described = False

    def begin(self, ref: StepRef, plan: StepPlan) -> None:
        self.recorder.finish()
        sink = self.session.open()
        if sink is None:
            return
        if not self.described:
            self.described = True
            worker = worker_name(self.session.identity.rank)
            sink.describe(collections_key(worker), msgspec.json.encode(self._describe(worker)))
        self.recorder.begin(sink, ref, plan)


class Replicas:
    """All replicas of this process that save."""

    def __init__(self, first: Recorder[Array], warn: Callable[[str], None]) -> None:
        self.first, self._warn = first, warn
        self.first_index = 0  # of the replica that `first` records
        self.others: list[Replica] = []

    def begin(self) -> None:
        """Begin the step that the first recorder has begun in all other replicas."""
        ref, plan = self.first.ref, self.first.plan
        if ref is not None and plan is not None:
            for replica in self.others:
                replica.begin(ref, plan)

    def offer(self, names: tuple[str, ...], values: Sequence[Sequence[Any]], read: Any) -> None:
        """Record what the plan wants of `names`.

        Each of `values` has one item for each replica, or one for all. `read` makes an array of it.
        """
        plan = self.first.plan
        if plan is None:
            return
        wanted = [i for i, name in enumerate(names) if plan.wants(name) is not None]
        if not wanted:
            return
        others = [(replica.index, replica.recorder) for replica in self.others]
        for index, recorder in [(self.first_index, self.first), *others]:
            if recorder.recording:
                found: dict[str, Array] = {}
                for i in wanted:
                    value = values[i][min(index, len(values[i]) - 1)]
                    try:
                        found[names[i]] = read(value)
                    except CaptureError as error:  # the other tensors can still be read
                        self._warn(f"{names[i]} is left out: {error}")
                recorder.offer_many(tuple(found), list(found.values()))

    def close(self) -> None:
        """Complete the step in all replicas."""
        for recorder in (self.first, *(replica.recorder for replica in self.others)):
            recorder.incomplete_reason = ""
            recorder.close()

    def finish(self) -> None:
        for replica in self.others:
            replica.recorder.finish()

    def on_config_change(self) -> None:
        for replica in self.others:
            replica.described = False
            replica.recorder.forget()

    def abandon(self) -> None:
        """Record nothing more of the current step."""
        for replica in self.others:
            replica.recorder.abandon()
