"""A place that is none, as a message may show it."""

from __future__ import annotations

import re

__all__ = ["redact_url"]

# To the last "@", whatever is before it: a secret may have slashes and question marks.
_USER = re.compile(r"\A([A-Za-z][A-Za-z0-9+.-]*:/+)?.*@", re.DOTALL)


def redact_url(place: str) -> str:
    """Without what may be credentials, in whatever form somebody has put them into a URL."""
    text, mark, _ = _USER.sub(r"\1...@", place).partition("?")
    return f"{text}?..." if mark else text
