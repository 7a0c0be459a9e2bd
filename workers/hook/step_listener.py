"""What a framework's adapter does as steps come and go.

`HookCore` calls the methods on the training thread. For each step that the clock reports, in this order:

    on_reported_step()
    on_capture_step(), then incomplete_reason()     if the step is captured
    on_idle_step(next_due)                          if it is not

An exception of any of them goes to the hook's error policy.
"""

from __future__ import annotations

__all__ = ["StepListener"]


class StepListener:
    """Does nothing at any of the events; an adapter overrides those it needs."""

    def on_reported_step(self) -> None:
        """Take note that a step began, before it is known whether anything is due."""

    def on_capture_step(self) -> None:
        """Capture what the step starts with, and watch for the rest of its plan."""

    def incomplete_reason(self) -> str:
        """Return why the step is incomplete if nothing more arrives; empty if it is complete."""
        return ""

    def on_idle_step(self, next_due: int) -> None:
        """Remove what is needed on captured steps only; the next one is `next_due`."""

    def awaits_gradients(self) -> bool:
        """Check whether a step is being recorded whose backward pass has not run."""
        return False

    def on_config_change(self) -> None:
        """Drop everything that was derived from the configuration."""

    def on_close(self) -> None:
        """Report what is only known at an orderly end of the job."""

    def uninstall(self) -> None:
        """Leave models, losses and optimizers as they were before they were registered."""
