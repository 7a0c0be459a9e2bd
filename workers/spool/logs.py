"""The logger of hooks. Names and errors in its messages may contain control characters."""

from __future__ import annotations

import logging

from smdist.messages import printable

__all__ = ["logger"]


class _EscapeControls(logging.Filter):
    """Escapes control characters in messages with arguments and in tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.args:
            record.msg, record.args = printable(record.getMessage()), None
        if record.exc_info and not record.exc_text:
            lines = logging.Formatter().formatException(record.exc_info).split("\n")
            record.exc_text = "\n".join(map(printable, lines))
        return True


_escape_controls = _EscapeControls()


def logger() -> logging.Logger:
    found = logging.getLogger("smdist")
    found.addFilter(_escape_controls)  # adding it again has no effect
    return found
