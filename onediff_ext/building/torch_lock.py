"""The lock around what torch can do only once at a time in a process."""

from __future__ import annotations

from onediff_ext.core.forks import fork_safe_lock

# Held during an export, a fork for exports, and the load of a graph or an exported program.
TORCH_LOCK = fork_safe_lock()
