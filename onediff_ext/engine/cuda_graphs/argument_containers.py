"""Lists and dictionaries among a call's arguments, which a forward may change.

diffusers' UNet pops the residuals of a T2I-Adapter from the caller's own list. Other UNets pop
those of a ControlNet, or note the number of each block in a dictionary of their options. A replay
runs no Python, so the same is done to the containers of its call. A forward that runs twice gets
them as they were.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)


class Entry(NamedTuple):
    """One entry of a container after a forward.

    Args:
        key: The key of a dictionary, or the index in a list.
        came_from: Its index or key before the forward; None for a new value.
        value: The new value: plain, or a list, tuple or dictionary of plain values.
    """

    key: Hashable
    came_from: tuple[Hashable, ...] | None
    value: Any = None


# For each changed container: its number and its entries after the forward.
Changes = tuple[tuple[int, tuple[Entry, ...]], ...]


class ArgumentContainers:
    """The lists and dictionaries among the arguments of one call, and their contents before it.

    Args:
        args, kwargs: Of the call.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        outer = (*args, *kwargs.values())
        self._containers: list[Any] = [c for value in outer for c in _inside(value)]
        self._before = [_contents(container) for container in self._containers]

    def changes(self) -> Changes | None:
        """Return how they were changed since.

        Returns:
            None if something came in that another call would have to compute, such as a tensor.
        """
        found = []
        for number, container in enumerate(self._containers):
            before, now = self._before[number], _contents(container)
            if list(before) == list(now) and all(now[key] is before[key] for key in now):
                continue
            entries = [_entry(key, value, before) for key, value in now.items()]
            known = tuple(entry for entry in entries if entry is not None)
            if len(known) < len(entries):
                return None
            found.append((number, known))
        return tuple(found)

    def apply(self, changes: Changes) -> None:
        """Change them as another call of the same form did.

        Args:
            changes: From `changes` of that call.
        """
        for number, entries in changes:
            before = self._before[number]
            _fill(
                self._containers[number],
                {
                    entry.key: copy.deepcopy(entry.value)
                    if entry.came_from is None
                    else before[entry.came_from[0]]
                    for entry in entries
                },
            )

    def restore(self) -> None:
        """Give them the contents from before the call."""
        for container, before in zip(self._containers, self._before, strict=True):
            _fill(container, before)


def _entry(key: Hashable, value: Any, before: dict[Any, Any]) -> Entry | None:
    """Say where a value comes from, or None."""
    if key in before and before[key] is value:
        return Entry(key, (key,))
    if _is_plain(value):
        return Entry(key, None, copy.deepcopy(value))
    return next((Entry(key, (old,)) for old, item in before.items() if item is value), None)


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _inside(value: Any) -> Iterator[Any]:
    """A value and all within it that is a list or a dictionary, outermost first."""
    if type(value) in (list, dict):
        yield value
    if type(value) in (list, tuple, dict):
        for inner in value.values() if type(value) is dict else value:
            yield from _inside(inner)


def _contents(container: Any) -> dict[Any, Any]:
    return dict(container) if type(container) is dict else dict(enumerate(container))


def _fill(container: Any, contents: dict[Any, Any]) -> None:
    if type(container) is dict:
        container.clear()
        container.update(contents)
    else:
        container[:] = contents.values()
