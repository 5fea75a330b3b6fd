"""Lists and dictionaries among a call's arguments, from which a forward may take things out.

diffusers' UNet pops the residuals of a T2I-Adapter from the caller's own list, and Forge's those of
a ControlNet. A replay runs no Python, so the same is done to the containers of its call. A forward
that runs twice gets them as they were.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

# For each changed container: its number, and the indices or keys that are left in it.
Changes = tuple[tuple[int, tuple[Hashable, ...]], ...]


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
        """Return what was taken out of them since; None if they were changed in another way."""
        found = []
        for number, (container, before) in enumerate(
            zip(self._containers, self._before, strict=True)
        ):
            left = {id(item) for item in _contents(container).values()}
            kept = tuple(key for key, item in before.items() if id(item) in left)
            now = [id(item) for item in _contents(container).values()]
            if now != [id(before[key]) for key in kept]:
                return None
            if len(kept) < len(before):
                found.append((number, kept))
        return tuple(found)

    def apply(self, changes: Changes) -> None:
        """Take out what another call of the same form has taken out."""
        for number, kept in changes:
            _fill(self._containers[number], {key: self._before[number][key] for key in kept})

    def restore(self) -> None:
        """Give them the contents from before the call."""
        for container, before in zip(self._containers, self._before, strict=True):
            _fill(container, before)


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
