"""Reversible changes to the instance attributes of a host's objects."""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

_ABSENT = object()
_REDUCE = "__reduce_ex__"


@dataclass(eq=False)
class _Change:
    """One replaced attribute: the instance's value before, and the new one."""

    owner: Any
    name: str
    before: Any
    value: Any


class Patches:
    """Replaces instance attributes and restores them.

    Patches are written to the instance's own dictionary, never to a class. `undo` restores it
    exactly, also where the attribute was absent. The end of a ``with`` block undoes too.

    Several `Patches` may change one attribute and be undone in any order. A copy of a patched
    object, by `copy` or by `pickle`, has none of the patches.
    """

    def __init__(self) -> None:
        self._changes: list[_Change] = []
        self._hooks: list[tuple[RemovableHandle, _PlainCopy | None]] = []
        # By id of their owner. A new one each time would look like a change of the model.
        self._copies: dict[int, _PlainCopy] = {}

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def set(self, owner: object, name: str, value: object) -> None:
        """Replace an attribute of an object, and remember the old value.

        Args:
            owner: An object with a ``__dict__``, or a Python module.
            name: The attribute's name; the instance may lack it.
            value: The new value.
        """
        attributes = vars(owner)
        change = _Change(owner, name, attributes.get(name, _ABSENT), value)
        attributes[name] = value
        self._changes.append(change)
        if not isinstance(owner, ModuleType):  # Python modules are never copied
            self._copy_of(owner).changes.append(change)

    def hook(self, handle: RemovableHandle, owner: object | None = None) -> None:
        """Remove a forward hook of a module with the next `undo`.

        Unlike a replaced forward, a hook can be removed whatever has patched the module since.

        Args:
            handle: From the module's ``register_forward_hook``.
            owner: The module, so that its copies are without the hook.
        """
        plain = None if owner is None else self._copy_of(owner)
        self._hooks.append((handle, plain))
        if plain is not None:
            plain.hooks.append(handle)

    def undo(self, *, keeps_covered: bool = False) -> list[str]:
        """Restore everything, last change first.

        A hook that came later may keep our value and put it back when it goes: accelerate in
        ``_old_forward``, diffusers in its registry. What was there before ours takes its place.

        Args:
            keeps_covered: Leave a value under another extension's wrapper for a later `undo`, which
                restores it if the wrapper has gone. The value has to act as what it replaced.

        Returns:
            The names of attributes that another extension has replaced since. They keep the other
            extension's value, since removing it would break that extension.
        """
        while self._hooks:
            handle, plain = self._hooks.pop()
            handle.remove()
            if plain is not None:
                plain.hooks.remove(handle)
                plain.leave_if_idle()
        left, kept = [], list[_Change]()
        while self._changes:
            change = self._changes.pop()
            plain = vars(change.owner).get(_REDUCE)
            plain = plain if isinstance(plain, _PlainCopy) else None
            is_restored = (plain is not None and plain.pass_on(change)) or _restore(change)
            if not is_restored:
                left.append(f"{type(change.owner).__name__}.{change.name}")
            if not is_restored and keeps_covered:
                kept.append(change)
            elif plain is not None:
                plain.drop(change)
        self._changes = kept[::-1]
        return left

    def __len__(self) -> int:
        return len(self._changes) + len(self._hooks)

    def _copy_of(self, owner: object) -> _PlainCopy:
        plain = vars(owner).get(_REDUCE)
        if not isinstance(plain, _PlainCopy):
            known = self._copies.get(id(owner))
            plain = known if known is not None and known.owner is owner else _PlainCopy(owner)
            vars(owner)[_REDUCE] = plain
        self._copies[id(owner)] = plain
        return plain


class _PlainCopy:
    """Replaces ``__reduce_ex__`` of a patched object, so that copies of it are unpatched.

    `copy` and `pickle` look the method up on the object. Locks, sessions and compiled graphs can
    be neither copied nor pickled.

    Attributes:
        owner: The object.
        changes: The changes of all `Patches` that are not undone, oldest first.
        hooks: Their hooks.
    """

    def __init__(self, owner: object) -> None:
        self.owner = owner
        self.changes: list[_Change] = []
        self.hooks: list[RemovableHandle] = []

    def __call__(self, protocol: int) -> Any:
        reduced = type(self.owner).__reduce_ex__(self.owner, protocol)
        if not isinstance(reduced, tuple) or len(reduced) < 3:
            return reduced
        made, arguments, state, *rest = reduced
        if isinstance(state, dict):
            state = self._plain(state)
        elif isinstance(state, tuple) and state and isinstance(state[0], dict):
            state = (self._plain(state[0]), *state[1:])  # an object with slots too
        return (made, arguments, state, *rest)

    def pass_on(self, change: _Change) -> bool:
        """Make the change that follows a change restore what that one would restore.

        Returns:
            Whether there is such a change.
        """
        if change not in self.changes:
            return False
        later = self.changes[self.changes.index(change) + 1 :]
        following = next((other for other in later if other.before is change.value), None)
        if following is None:
            return False
        following.before = _before(change, following.name)
        return True

    def drop(self, change: _Change) -> None:
        """Forget a change, and leave the owner after the last one."""
        if change in self.changes:
            self.changes.remove(change)
        self.leave_if_idle()

    def leave_if_idle(self) -> None:
        """Remove itself from the owner once nothing is patched."""
        if not self.changes and not self.hooks and vars(self.owner).get(_REDUCE) is self:
            del vars(self.owner)[_REDUCE]

    def _plain(self, state: dict[str, Any]) -> dict[str, Any]:
        plain = {name: self._unhooked(value) for name, value in state.items() if name != _REDUCE}
        for change in reversed(self.changes):
            if plain.get(change.name, _ABSENT) is change.value:
                _put(plain, change.name, change.before)
        return plain

    def _unhooked(self, value: Any) -> Any:
        """Return a module's dictionary of hooks without ours."""
        ours = {
            handle.id
            for handle in self.hooks
            if any(held() is value for held in (handle.hooks_dict_ref, *handle.extra_dict_ref))
        }
        if not ours:
            return value
        return type(value)((key, hook) for key, hook in value.items() if key not in ours)


def _put(attributes: dict[str, Any], name: str, value: object) -> None:
    if value is _ABSENT:
        attributes.pop(name, None)
    else:
        attributes[name] = value


def _restore(change: _Change) -> bool:
    """Put what was there before into the place that has the value now.

    Returns:
        False where another extension keeps the value in a way that is not known, or has dropped it.
    """
    own = vars(change.owner)
    if own.get(change.name, _ABSENT) is change.value:
        _put(own, change.name, change.before)
        return True
    if not isinstance(change.owner, nn.Module):
        return False
    found = False
    for attributes in (own, *_hook_references(own)):
        for name in [name for name, value in attributes.items() if value is change.value]:
            _put(attributes, name, _before(change, name if attributes is own else ""))
            found = True
    return found


def _hook_references(own: dict[str, Any]) -> list[dict[str, Any]]:
    """Where the registry of diffusers' hooks keeps the forwards under them."""
    return [vars(each) for each in getattr(own.get("_diffusers_hook"), "_fn_refs", ())]


def _before(change: _Change, place: str) -> object:
    """What a place had before, or would have: a moved method of the class is a bound one.

    Args:
        change: Of the place in which the value was put.
        place: Name of the attribute that has the value now; "" for one of another object.
    """
    owner, before = change.owner, change.before
    if place == change.name:
        return before
    if getattr(before, "__func__", _ABSENT) is getattr(type(owner), place, None):
        return _ABSENT  # the class has it there
    own = getattr(type(owner), change.name, None)
    return MethodType(own, owner) if before is _ABSENT and callable(own) else before
