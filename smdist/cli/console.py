"""What commands print. Names and reasons come from runs that anybody may have written."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console

from smdist.messages import printable

__all__ = ["PlainConsole", "complain"]


class PlainConsole(Console):
    """Text is shown as it is: it neither steers the terminal nor is taken for markup."""

    def print(self, *objects: Any, **options: Any) -> None:
        shown = (printable(one) if isinstance(one, str) else one for one in objects)
        super().print(*shown, **{"markup": False, **options})


def complain(message: object) -> None:
    print(f"smdist: {printable(str(message))}", file=sys.stderr)
