"""Exceptions at chosen moments, where a signal handler of a script could raise them.

CPython runs handlers of signals on the main thread, between two instructions: after a call, where a
function begins, and where a loop jumps back. `Cuts` counts those moments in the code of smdist, and
raises at one of them.
"""

from __future__ import annotations

import dis
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ClassVar

from typing_extensions import Self

import smdist

__all__ = ["Cut", "Cuts"]

_HOME = f"{Path(smdist.__file__).parent}/"
_BACKWARD = ("JUMP_BACKWARD", "JUMP_ABSOLUTE", "POP_JUMP_BACKWARD")


class Cut(BaseException):
    """What the handler raises."""


def _handler(code: CodeType, offset: int) -> int | None:
    """Where an exception at that instruction is handled, if it is. Before 3.11 the frame knows."""
    parse = getattr(dis, "_parse_exception_table", lambda _code: ())
    entries = [entry for entry in parse(code) if entry.start <= offset < entry.end]
    return min(entries, key=lambda entry: entry.end - entry.start).target if entries else None


def _moments(code: CodeType) -> frozenset[int]:
    """Offsets of instructions before which a handler may run.

    What it raises counts as raised by the instruction before that. Where this makes a difference (a
    call at the end of a `with`) it cannot be imitated, and is left out.
    """
    found, before = set(), None
    for instruction in dis.get_instructions(code):
        if before is not None and _handler(code, before) == _handler(code, instruction.offset):
            found.add(instruction.offset)
        name, before = instruction.opname, None
        if name.startswith(("CALL", "RESUME")) and not name.startswith("CALL_INTRINSIC"):
            before = instruction.offset
        elif name.startswith(_BACKWARD):
            found.add(int(instruction.argval))
    return frozenset(found)


class Cuts:
    """Within the block, the moment number `at` raises `error`; `seen` says how many there were."""

    _known: ClassVar[dict[CodeType, frozenset[int]]] = {}

    def __init__(self, at: int = -1, error: type[BaseException] = Cut) -> None:
        self.at, self.seen, self.where, self.function = at, 0, "", ""
        self._error = error
        self._before: Any = None

    @property
    def struck(self) -> bool:
        return bool(self.where)

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if self.struck or not code.co_filename.startswith(_HOME):
            return None
        if code not in self._known:
            self._known[code] = _moments(code)
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._at_opcode

    def _at_opcode(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and frame.f_lasti in self._known[frame.f_code] and not self.struck:
            self.seen += 1
            if self.seen - 1 == self.at:
                place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                self.function = frame.f_code.co_name
                self.where = f"{place} {self.function}"
                raise self._error(self.where)
        return self._at_opcode
