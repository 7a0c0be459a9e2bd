"""Query a coordinator from another process.

Synchronous. Each call goes through Ray to the actor, in whichever process it runs by now. Ray repeats a
call during which the actor dies. Errors are those of `smdist.errors`, and TimeoutError.
"""

from __future__ import annotations

from typing import Any

import msgspec

from smdist.coordination.ray_actor.coordinator import CoordinatorInfo
from smdist.coordination.view.status import RunStatus, StepReport
from smdist.errors import CoordinationError, SmdistError, WaitTimeout
from smdist.identity import ModeKeys

__all__ = ["CoordinatorClient"]

GLOBAL = ModeKeys.GLOBAL
_CALL_S, _STOP_S = 60.0, 10.0


class CoordinatorClient:
    """A coordinator. Methods take a run as URL, run id or name; "" is the only run."""

    def __init__(self, ray: Any, handle: Any, name: str = "") -> None:
        self.name = name  # of the actor
        self._ray = ray
        self._handle = handle

    def info(self, timeout_s: float = _CALL_S) -> CoordinatorInfo:
        data = self._call("info", timeout_s=timeout_s)
        return msgspec.json.decode(data, type=CoordinatorInfo)

    def runs(self) -> dict[str, RunStatus]:
        return msgspec.json.decode(self._call("runs"), type=dict[str, RunStatus])

    def status(self, run: str = "") -> RunStatus:
        return msgspec.json.decode(self._call("status", run), type=RunStatus)

    def latest_complete_step(self, run: str = "", mode: ModeKeys = GLOBAL) -> int:
        """Return the last step that is complete over all ranks, -1 if there is none."""
        return int(self._call("latest_complete_step", run, mode.name))

    def missing(self, step: int, run: str = "", mode: ModeKeys = GLOBAL) -> dict[int, str]:
        """Return rank -> reason for each rank that lacks the step; empty if it is complete."""
        found: dict[int, str] = self._call("missing", step, run, mode.name)
        return found

    def wait_for_step(
        self, step: int, run: str = "", mode: ModeKeys = GLOBAL, timeout_s: float = 60.0
    ) -> StepReport:
        """Wait until nothing more is expected of the step; return who has it. Raise WaitTimeout."""
        # If the actor is restarted meanwhile, its wait starts again; ours does not.
        try:
            data = self._call(
                "wait_for_step", step, run, mode.name, timeout_s, timeout_s=timeout_s + 5.0
            )
        except TimeoutError as error:
            if isinstance(error, WaitTimeout):
                raise
            raise WaitTimeout(f"the coordinator did not answer within {timeout_s:g} s") from error
        return msgspec.json.decode(data, type=StepReport)

    def stop(self, timeout_s: float = _STOP_S) -> bool:
        """Have it release its lease, so that the next one need not wait, then end its process.

        No last snapshot is written: readers find newer data with the ranks, and the next coordinator
        continues from there. Return False if it did not answer in time or was gone; its process is
        ended all the same.
        """
        try:
            self._call("stop", timeout_s=timeout_s)
            answered = True
        except (TimeoutError, CoordinationError):
            answered = False
        self.kill()
        return answered

    def kill(self) -> None:
        self._ray.kill(self._handle, no_restart=True)

    def _call(self, method: str, *args: object, timeout_s: float = _CALL_S) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(getattr(self._handle, method).remote(*args), timeout=timeout_s)
        except errors.RayTaskError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, SmdistError):
                raise cause from None
            raise CoordinationError(f"the coordinator failed in {method}: {error}") from error
        except errors.GetTimeoutError as error:
            raise TimeoutError(f"{method} got no answer within {timeout_s:g} s") from error
        except errors.RuntimeEnvSetupError as error:
            raise CoordinationError(
                "Ray could not install what the coordinator needs. Its nodes use pip and must reach a "
                f"package index. Ray's log ends with: {_last_lines(str(error))}"
            ) from error
        except errors.RayActorError as error:
            raise CoordinationError(f"the coordinator is gone: {error}") from error
        except errors.RayError as error:
            raise CoordinationError(f"Ray did not answer {method}: {error}") from error


def _last_lines(text: str, lines: int = 4) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])
