"""Start, find and query a coordinator from Python. Needs Ray (`pip install 'smdist[ray]'`).

    from smdist.coordinator import Settings, attach, find, start

    with attach("auto") as ray:                  # be a driver of that Ray
        client = find(ray, "s3://bucket/jobs")   # None if there is no coordinator
        client = client or start(ray, Settings(watch="s3://bucket/jobs"))
        print(client.status())

Calls are synchronous. Errors are those of `smdist.errors`.
"""

from __future__ import annotations

from smdist.coordination.ray_actor.client import CoordinatorClient
from smdist.coordination.ray_actor.coordinator import CoordinatorInfo, Settings
from smdist.coordination.ray_actor.launcher import Attachment, attach, coordinators, find, start
from smdist.coordination.view.status import AttemptLine, RankLine, RunState, RunStatus, StepReport

__all__ = [
    "Attachment",
    "AttemptLine",
    "CoordinatorClient",
    "CoordinatorInfo",
    "RankLine",
    "RunState",
    "RunStatus",
    "Settings",
    "StepReport",
    "attach",
    "coordinators",
    "find",
    "start",
]
