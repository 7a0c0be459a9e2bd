"""Helpers for text that is shown to people: sizes, counts, URLs without secrets, printable names.

Pure functions; every process and thread may call them. None of them fails for any `str`.
"""

from __future__ import annotations

import re

__all__ = ["count_of", "encodable", "printable", "readable_bytes", "redact_url"]

# Everything up to the last "@": a secret may contain slashes and question marks.
_CREDENTIALS = re.compile(r"\A([A-Za-z][A-Za-z0-9+.-]*:/+)?.*@", re.DOTALL)


def readable_bytes(nbytes: float) -> str:
    """Return a size with a binary unit, for example `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def count_of(number: int, noun: str) -> str:
    """Return the number and the noun, in the plural unless the number is 1: `3 steps`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def encodable(text: str) -> str:
    """Escape lone surrogates, which neither UTF-8 files nor terminals accept."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def printable(text: str) -> str:
    """Escape everything that does not print, for a terminal or a log.

    That includes control characters, line breaks and marks that change the writing direction. Use
    it only where text is printed: stored names stay unchanged.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def redact_url(url: str) -> str:
    """Remove everything from a URL that may be a credential: user, password and query."""
    text, mark, _ = _CREDENTIALS.sub(r"\1...@", url).partition("?")
    return f"{text}?..." if mark else text
