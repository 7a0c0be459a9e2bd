"""The logger of hooks. What it tells has names and errors of other people's making in it."""

from __future__ import annotations

import logging

from smdist.messages import printable

__all__ = ["logger"]


class _Plain(logging.Filter):
    """Shows what would steer a terminal as escapes. Messages without arguments are left alone."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.args:
            record.msg, record.args = printable(record.getMessage()), None
        if record.exc_info and not record.exc_text:
            lines = logging.Formatter().formatException(record.exc_info).split("\n")
            record.exc_text = "\n".join(map(printable, lines))
        return True


_plain = _Plain()


def logger() -> logging.Logger:
    found = logging.getLogger("smdist")
    found.addFilter(_plain)  # once, however often
    return found
