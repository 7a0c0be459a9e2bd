"""Print for commands. Names and reasons come from runs that anybody may have written."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console

from smdist.messages import printable

__all__ = ["PlainConsole", "complain"]


class PlainConsole(Console):
    """A console that prints text as it is: no terminal control, no markup."""

    def __init__(self) -> None:
        super().__init__(highlight=False, soft_wrap=True)

    def print(self, *objects: Any, **options: Any) -> None:
        shown = (printable(one) if isinstance(one, str) else one for one in objects)
        super().print(*shown, **{"markup": False, **options})


def complain(message: object) -> None:
    """Print an error message to stderr."""
    print(f"smdist: {printable(str(message))}", file=sys.stderr)
