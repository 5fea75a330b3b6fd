"""How much Python a call runs, counted instead of timed."""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any


class InstructionCount:
    """Counts the bytecode instructions that this thread runs within its ``with`` block.

    A time depends on the machine and on its other work; a count does not. What C code does within
    one instruction is not counted. No garbage is collected meanwhile: libraries have callbacks for
    that.

    Attributes:
        instructions: So far.
    """

    def __init__(self) -> None:
        self.instructions = 0
        self._before: Any = None

    def __enter__(self) -> InstructionCount:
        self._before = sys.gettrace()
        gc.disable()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        gc.enable()

    def _enter_frame(self, frame: FrameType, _event: str, _argument: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._in_frame

    def _in_frame(self, _frame: FrameType, event: str, _argument: object) -> Any:
        self.instructions += event == "opcode"
        return self._in_frame
