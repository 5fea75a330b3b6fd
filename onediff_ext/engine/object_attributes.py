"""The attributes of any object, without running its code."""

from __future__ import annotations

import contextlib
import types
from typing import Any


def attributes_of(value: object) -> dict[str, Any] | None:
    """Return the attributes that an object keeps, also in ``__slots__``; None for one without any.

    Args:
        value: Any object. No code of its class runs.
    """
    slots = {}
    for cls in type(value).__mro__:
        for name, slot in vars(cls).items() if "__slots__" in vars(cls) else ():
            if isinstance(slot, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # it has no value yet
                    slots[name] = slot.__get__(value)
    own = getattr(value, "__dict__", None)
    if not isinstance(own, dict):
        return slots or None
    return {**own, **slots} if slots else own
