"""The ranks of one process. A strategy that mirrors a model on several devices runs all its replicas
in one process, and each of them is a worker of its own: with its own session, spool and uploader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from smdist.errors import CaptureError
from smdist.format.manifest import Collections, collections_key
from smdist.identity import StepRef, worker_name
from smdist.planning import StepPlan
from smdist.workers.hook.capture_session import CaptureSession
from smdist.workers.hook.recorder import Recorder
from smdist.workers.tf_adapter.tensor_access import Array

__all__ = ["Lane", "Lanes"]


class Lane:
    """A replica beside the one whose recorder and session are the hook's own."""

    def __init__(
        self,
        replica: int,
        session: CaptureSession[Array],
        recorder: Recorder[Array],
        describe: Callable[[str], Collections],
    ) -> None:
        self.replica = replica
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


class Lanes:
    """The replicas of this process that save; `values` have one item for each replica, or one."""

    def __init__(self, first: Recorder[Array], tell: Callable[[str], None]) -> None:
        """`tell` is told of tensors that are left out."""
        self.first, self._tell = first, tell
        self.replica = 0  # that `first` records
        self.others: list[Lane] = []

    def begin(self) -> None:
        ref, plan = self.first.ref, self.first.plan
        if ref is not None and plan is not None:
            for lane in self.others:
                lane.begin(ref, plan)

    def offer(self, names: tuple[str, ...], values: Sequence[Sequence[Any]], read: Any) -> None:
        """Record what is wanted of tensors that have one value per replica, read by `read`."""
        plan = self.first.plan
        if plan is None:
            return
        wanted = [i for i, name in enumerate(names) if plan.wants(name) is not None]
        if not wanted:
            return
        others = [(lane.replica, lane.recorder) for lane in self.others]
        for replica, recorder in [(self.replica, self.first), *others]:
            if recorder.recording:
                found: dict[str, Array] = {}
                for i in wanted:
                    value = values[i][min(replica, len(values[i]) - 1)]
                    try:
                        found[names[i]] = read(value)
                    except CaptureError as error:  # the others can still be had
                        self._tell(f"{names[i]} is left out: {error}")
                recorder.offer_many(tuple(found), list(found.values()))

    def close(self) -> None:
        """The step has all that it brings."""
        for recorder in (self.first, *(lane.recorder for lane in self.others)):
            recorder.incomplete_reason = ""
            recorder.close()

    def finish(self) -> None:
        for lane in self.others:
            lane.recorder.finish()

    def forget(self) -> None:
        for lane in self.others:
            lane.described = False
            lane.recorder.forget()

    def abandon(self) -> None:
        for lane in self.others:
            lane.recorder.abandon()
