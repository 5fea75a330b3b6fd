"""Works around a race in OneFlow 0.9.0 that crashes the process when a graph finishes too early.

To launch a graph, a OneFlow thread first passes it to the compute threads and only then adds it
to a queue; a compute thread removes it when done. On a busy machine the launching thread may be
suspended between the two steps. Then the compute thread pops an empty queue and releases random
memory as a pointer (``LazyJobStreamPolicy::DequeueNNGraph`` in oneflow/core/vm). The process ends
by SIGSEGV or SIGABRT, at once or later.

No later version exists for the same machines. So calls of that function go through a few
instructions that wait until the queue has an entry. OneFlow's code does not change, only the
function's address in its import table.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import struct
from pathlib import Path

_POP = b"_ZN7oneflow2vm19LazyJobStreamPolicy14DequeueNNGraphEv"
# Instructions of the function that read the queue: first entry at this + 0x18, end at 0x38.
_READS_QUEUE = bytes.fromhex("488b4b28 488b4318 488d51f0")
_WAITS = bytes.fromhex(
    "488b4718"  # again: mov rax, [rdi+0x18]  first entry
    "483b4738"  #        cmp rax, [rdi+0x38]  behind the last entry
    "7509"  #            jne go
    "b818000000"  #      mov eax, 24          sched_yield
    "0f05"  #            syscall
    "ebed"  #            jmp again
    "48b8"  #        go: mov rax, address of the function
)
_GOES_ON = bytes.fromhex("ffe0")  # jmp rax

# Tags of a shared library's dynamic section (ELF).
_STRINGS, _SYMBOLS, _IMPORTS_SIZE, _IMPORTS = 5, 6, 2, 23
_SYMBOL, _IMPORT = struct.Struct("<IBBHQQ"), struct.Struct("<QQq")

_kept: list[mmap.mmap] = []  # instructions that OneFlow calls until the process ends


def order_launches() -> str | None:
    """Patch the loaded OneFlow once; return why that is impossible, or None."""
    if _kept:
        return None
    problem = _mend()
    return None if problem is None else f"OneFlow 0.9.0 has a fault that {problem}"


def _mend() -> str | None:
    if platform.machine() != "x86_64":
        return "can be mended on x86-64 only"
    library = _loaded_library()
    if library is None:
        return "cannot be mended in this build: there is no liboneflow"
    pop = ctypes.cast(getattr(library, _POP.decode()), ctypes.c_void_p).value
    slot = _import_slot(library._handle, _POP)
    if pop is None or slot is None or _READS_QUEUE not in ctypes.string_at(pop, 0x40):
        return "cannot be mended in this build: it is not PyPI's"
    if not _is_writable(slot):
        return "cannot be mended here: its import table is protected"
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        return "cannot be mended here: the system allows no new instructions"
    page.write(_WAITS + struct.pack("<Q", pop) + _GOES_ON)
    _kept.append(page)
    waiting = ctypes.addressof(ctypes.c_char.from_buffer(page))
    ctypes.c_uint64.from_address(slot).value = waiting
    return None


def _loaded_library() -> ctypes.CDLL | None:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    found = re.search(r"/\S.*/liboneflow-[^/\n]*\.so", maps)
    if found is None:
        return None
    library = ctypes.CDLL(found.group(), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return library if hasattr(library, _POP.decode()) else None


def _import_slot(handle: int, name: bytes) -> int | None:
    """Return where a library stores the address of an imported function.

    Args:
        handle: From dlopen: glibc's link_map, which starts with the library's base address,
            its name and its dynamic section.
        name: The function's mangled name.
    """
    base, _, section = struct.unpack("<QQQ", ctypes.string_at(handle, 24))
    entries: dict[int, int] = {}
    while (entry := struct.unpack("<qQ", ctypes.string_at(section, 16)))[0] != 0:
        entries[entry[0]] = entry[1]
        section += 16
    imports = ctypes.string_at(entries[_IMPORTS], entries[_IMPORTS_SIZE])
    for offset, info, _ in _IMPORT.iter_unpack(imports):
        at = entries[_SYMBOLS] + (info >> 32) * _SYMBOL.size
        text: int = _SYMBOL.unpack(ctypes.string_at(at, _SYMBOL.size))[0]
        if ctypes.string_at(entries[_STRINGS] + text, len(name) + 1) == name + b"\0":
            return int(base + offset)
    return None


def _is_writable(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, permissions = line.split(maxsplit=2)[:2]
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return "w" in permissions
    return False
