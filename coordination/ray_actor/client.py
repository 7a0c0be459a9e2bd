"""Asking a coordinator from another process.

Synchronous. Each call goes through Ray to the actor of that name, wherever and in whichever process
it is by now; a call during which it dies is repeated by Ray. Errors are those of `smdist.errors`.
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
    """`run`: URL, run id, or name below the watched place; "" when there is only one."""

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
        """-1 when there is none."""
        return int(self._call("latest_complete_step", run, mode.name))

    def missing(self, step: int, run: str = "", mode: ModeKeys = GLOBAL) -> dict[int, str]:
        """Rank -> reason; empty when the step is complete."""
        found: dict[int, str] = self._call("missing", step, run, mode.name)
        return found

    def wait_for_step(
        self, step: int, run: str = "", mode: ModeKeys = GLOBAL, timeout_s: float = 60.0
    ) -> StepReport:
        """How the step stands once nothing more of it is expected; WaitTimeout."""
        # Should the actor be restarted meanwhile, its wait begins anew; ours does not.
        try:
            data = self._call(
                "wait_for_step", step, run, mode.name, timeout_s, timeout_s=timeout_s + 5.0
            )
        except TimeoutError as error:
            if isinstance(error, WaitTimeout):
                raise
            raise WaitTimeout(f"no coordinator answered within {timeout_s:g} s") from error
        return msgspec.json.decode(data, type=StepReport)

    def stop(self, timeout_s: float = _STOP_S) -> bool:
        """Let it hand back its lease, so that the next one need not wait, then end its process.

        What came since its last snapshot is not written: whoever reads the run finds that with
        the ranks, and the next coordinator goes on from there. False: it gave no answer in time, or
        was gone, and its process was ended all the same.
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
            raise TimeoutError(f"no answer to {method} within {timeout_s:g} s") from error
        except errors.RuntimeEnvSetupError as error:
            raise CoordinationError(
                "Ray could not give the coordinator what it needs (its nodes install it with pip, "
                f"from an index that they have to reach); it said: {_end(str(error))}"
            ) from error
        except errors.RayActorError as error:
            raise CoordinationError(f"the coordinator is gone: {error}") from error
        except errors.RayError as error:
            raise CoordinationError(f"Ray gave no answer to {method}: {error}") from error


def _end(text: str, lines: int = 4) -> str:
    """What matters of a long log is at its end."""
    return "\n".join(text.strip().splitlines()[-lines:])
