"""`no_refresh(trial)` or `no_refresh([trial, ...])`: do not read new data meanwhile."""

from __future__ import annotations

from smdist.trials.live import no_refresh

__all__ = ["no_refresh"]
