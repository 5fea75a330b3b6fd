"""Living processes, found by what they inherited (Linux)."""

from __future__ import annotations

from pathlib import Path


def processes_with(variable: str, value: object, *, or_below: bool = False) -> list[int]:
    """Return the ids of processes with an environment variable.

    Args:
        variable, value: What they started with.
        or_below: Count processes whose value is a path below this one, too.
    """
    whole = f"{variable}={value}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # ended meanwhile
        if any(v == whole or (or_below and v.startswith(whole + b"/")) for v in variables):
            found.append(int(entry.name))
    return found
