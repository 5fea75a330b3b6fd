"""What is at fault when a build fails, by what was said; it decides what is remembered.

Windows says it in the language of the user, so its numbers count.
"""

from __future__ import annotations

import re

MACHINE, MEMORY, GRAPH = "machine", "memory", "graph"

_NO_ROOM = ("No space left on device", "Disk quota exceeded", "[WinError 112]")
_NO_COMPILER = re.compile(
    r"No working C\+\+ compiler"  # Inductor
    r"|Compiler: .* is not found"  # the same on Windows
    r"|MSVC with English language pack"  # Inductor, of a compiler that speaks another language
    r"|Failed to find C compiler"  # Triton
)
_NO_MEMORY = (
    "out of memory",
    "Cannot allocate memory",
    "MemoryError",
    "error return without exception set",  # of C code that did not expect to run out of it
    "bad_alloc",
    "DefaultCPUAllocator",
    "virtual memory exhausted",  # g++
    "Killed signal",  # g++, when the system has ended its compiler
    "out of heap space",  # Microsoft's compiler
    "[WinError 8]",  # not enough memory
    "[WinError 14]",  # the same
    "[WinError 1455]",  # the paging file is too small, often for the libraries of torch
)


def blame_of(text: str) -> str:
    """Return what is at fault: the ``"graph"``, the ``"machine"``, or its ``"memory"``.

    Args:
        text: An error's.
    """
    if any(words in text for words in _NO_ROOM) or _NO_COMPILER.search(text):
        return MACHINE
    if any(words in text for words in _NO_MEMORY):
        return MEMORY
    return GRAPH
