"""Reversible changes to the instance attributes of a host's objects."""

from __future__ import annotations

from typing import Any

from torch.utils.hooks import RemovableHandle

_ABSENT = object()


class Patches:
    """Remembers each replaced instance attribute and puts it back.

    Only the instance's own dictionary is written, never a class, so that an
    undo leaves exactly what was there, also when nothing was. The end of a ``with`` block undoes.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def set(self, owner: object, name: str, value: object) -> None:
        """Replace `owner.name`, remembering what the instance held."""
        attributes = vars(owner)
        self._replaced.append((owner, name, attributes.get(name, _ABSENT), value))
        attributes[name] = value

    def hook(self, handle: RemovableHandle) -> None:
        """Take over a forward hook of a module. Unlike a replaced forward, a hook can be
        taken away again whoever has patched the module since."""
        self._hooks.append(handle)

    def undo(self) -> list[str]:
        """Put everything back, last change first.

        Returns:
            The names of attributes that somebody else has replaced since; those
            are left as they are, since taking them away would break the other.
        """
        while self._hooks:
            self._hooks.pop().remove()
        left = []
        while self._replaced:
            owner, name, before, ours = self._replaced.pop()
            attributes = vars(owner)
            if attributes.get(name, _ABSENT) is not ours:
                left.append(f"{type(owner).__name__}.{name}")
            elif before is _ABSENT:
                del attributes[name]
            else:
                attributes[name] = before
        return left

    def __len__(self) -> int:
        return len(self._replaced) + len(self._hooks)
