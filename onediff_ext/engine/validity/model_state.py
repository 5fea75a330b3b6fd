"""Decides whether a block's graph or a model's CUDA graph is stale.

Both freeze what a model was when they were made. `ModelState` keeps that, and `ModelState.holds`
compares it with what the model is now.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import chain, repeat

from torch import nn

from onediff_ext.engine.validity.foreign_code import global_hook_reason, patched_class_reason
from onediff_ext.engine.validity.left_wrappers import LeftWrapper
from onediff_ext.engine.validity.module_attributes import ModuleAttributes
from onediff_ext.engine.validity.python_code import PythonCode


class ModelState:
    """All that decides what modules compute, except the values of their weights.

    It covers the Python code of the modules' classes and of torch, hooks and modes that run around
    all modules, the modules' own children, hooks and attributes, and attributes that make weights
    change at each call.

    Args:
        modules: The modules of a block or of a model, in order.
        outer: The block or model itself. Its own hooks and ``forward`` run outside of the graph
            and do not count.
        code: Watches the code of this process.
        ignored_attrs: Names of attributes that decide nothing.
        dynamic_weight_attrs: Names of attributes that make weights change at each call while they
            are there and not empty, such as a LoRA that is applied at each call.
        bare: As for `ModuleAttributes`.
        parameters: Whether a replaced Parameter counts.
        left: Wrappers that an extension left on methods; whether they pass calls through counts.
        called: Classes of objects that the modules call, whose code counts too.
        moment, epoch: As for `PythonCode.current_generation`.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        outer: nn.Module,
        code: PythonCode,
        *,
        ignored_attrs: Collection[str] = (),
        dynamic_weight_attrs: Iterable[str] = (),
        bare: Iterable[nn.Module] = (),
        parameters: bool = False,
        left: Sequence[LeftWrapper] = (),
        called: Collection[type] = (),
        moment: Hashable = None,
        epoch: Hashable = None,
    ) -> None:
        self._left = [(wrapper, wrapper.passes()) for wrapper in left]
        self._code, self._dicts = code, [module.__dict__ for module in modules]
        processors = attention_processors(modules)
        self._classes = {type(each) for each in (*modules, *processors)} | set(called)
        code.watch(self._classes)
        self._generation = code.current_generation(moment, epoch)
        self._global_hook_reason = global_hook_reason()
        self._dynamic_weight_attrs = tuple(dynamic_weight_attrs)
        self._dynamic_weights = self._find_dynamic_weights()
        self._attributes = ModuleAttributes(
            modules, outer, ignored=ignored_attrs, parameters=parameters, bare=bare
        )

    @property
    def has_dynamic_weights(self) -> bool:
        """Whether some module's weights change at each call."""
        return any(self._dynamic_weights)

    def foreign_code_reason(self, trusted: Sequence[str]) -> str | None:
        """Say which code of another extension the modules run, or None.

        Args:
            trusted: Prefixes of modules whose patches of classes and helpers are known. Nobody is
                trusted to replace functions of torch.

        Returns:
            One line for people. It names the first of these that is found: a patched class or
            helper, a replaced function of torch, a hook or mode that runs around all modules.
        """
        for cls in sorted(self._classes, key=lambda cls: f"{cls.__module__}.{cls.__qualname__}"):
            reason = patched_class_reason(cls, trusted) or self._code.helper_reason(cls, trusted)
            if reason is not None:
                return reason
        return self._code.torch_reason() or self._global_hook_reason

    def holds(self, moment: Hashable = None, epoch: Hashable = None) -> bool:
        """Return whether everything is what it was.

        Args:
            moment, epoch: As for `PythonCode.current_generation`.
        """
        is_same_code = self._code.current_generation(moment, epoch) == self._generation
        return is_same_code and self.holds_but_for_code(epoch)

    def holds_but_for_code(self, epoch: Hashable = None) -> bool:
        """Return whether everything is what it was, whatever code the modules run now.

        Args:
            epoch: As for `ModuleAttributes.hold`.
        """
        return (
            global_hook_reason() == self._global_hook_reason
            and (
                not self._dynamic_weight_attrs
                or self._find_dynamic_weights() == self._dynamic_weights
            )
            and all(wrapper.passes() == passed for wrapper, passed in self._left)
            and self._attributes.hold(epoch)
        )

    def _find_dynamic_weights(self) -> list[bool]:
        names = self._dynamic_weight_attrs
        found = (map(dict.get, self._dicts, repeat(name)) for name in names)
        return list(map(bool, chain.from_iterable(found)))


def attention_processors(modules: Iterable[nn.Module]) -> list[object]:
    """Return the objects that compute attention for these modules.

    Some packages keep them in the attribute ``processor`` of an attention layer. They are plain
    objects as often as modules.

    Args:
        modules: All modules of a block or of a model.
    """
    found = (vars(module).get("processor") for module in modules)
    return [processor for processor in found if processor is not None]
