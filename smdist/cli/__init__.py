"""The command line: `smdist ...`."""

from __future__ import annotations

from smdist.cli.app import main

__all__ = ["main"]
