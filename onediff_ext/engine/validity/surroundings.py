"""Other extensions' code between the blocks of a model, which may replace code there.

Blocks trust that no code is replaced within a forward, so that they read it once. Hooks on the
modules around them may patch a function before some blocks and put it back after these.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from torch import nn

from onediff_ext.engine.validity.foreign_code import (
    defining_module,
    is_foreign,
    is_ours,
    patched_class_reason,
    replaced_methods,
)
from onediff_ext.engine.validity.python_code import PythonCode


class Surroundings:
    """Looks once per forward whether other extensions' code runs between the blocks of a model.

    What runs inside of a block is the block's to judge.

    Args:
        model: The host's module.
        trusted: Prefixes of modules whose classes and patches are known.
        code: Numbers the states of the code.
    """

    def __init__(self, model: nn.Module, trusted: Sequence[str], code: PythonCode) -> None:
        self._model, self._code = model, code
        self._methods: dict[nn.Module, str] = {}  # by block, where its runner stands
        self._trusted = tuple(trusted)
        self._prefixes = (f"{type(model).__module__.partition('.')[0]}.", *self._trusted)
        self._moment: Hashable = None
        self._is_foreign = False
        self._generation: int | None = None
        self._foreign_classes: dict[type, bool] = {}  # in this generation

    def add(self, block: nn.Module, method: str) -> None:
        """Leave what is inside of a block to its runner.

        Args:
            block: A block of the model.
            method: The name of its method in whose place the runner stands.
        """
        self._methods[block] = method

    def may_replace_code(self, moment: Hashable) -> bool:
        """Whether another extension's code runs between the blocks.

        Args:
            moment: Equal for the calls of one forward; the model is looked at once for them. None
                looks each time.
        """
        if moment is None or moment != self._moment:
            generation = self._code.current_generation(moment)
            if generation != self._generation:
                self._foreign_classes.clear()
                self._generation = generation
            self._is_foreign = any(map(self._is_other_code, self._around(self._model)))
            self._moment = moment
        return self._is_foreign

    def _around(self, module: nn.Module) -> Iterator[nn.Module]:
        """The module and those below it, down to the blocks."""
        yield module
        if module not in self._methods:
            for child in module._modules.values():
                if child is not None:
                    yield from self._around(child)

    def _is_other_code(self, module: nn.Module) -> bool:
        if module is not self._model and (module._forward_hooks or module._forward_pre_hooks):
            return True
        if module in self._methods:  # its runner is there, unless another extension took it over
            method = vars(module).get(self._methods[module])
            return method is not None and not is_ours(method)
        return self._is_foreign_class(type(module)) or any(
            is_foreign(defining_module(value), self._prefixes) for value in _own_methods(module)
        )

    def _is_foreign_class(self, cls: type) -> bool:
        if cls not in self._foreign_classes:
            self._foreign_classes[cls] = (
                is_foreign(cls.__module__, self._prefixes)
                or patched_class_reason(cls, self._trusted) is not None
            )
        return self._foreign_classes[cls]


def _own_methods(module: nn.Module) -> Iterator[object]:
    """What a module calls in place of its class's methods, under this package's stand-ins."""
    attributes = vars(module)
    if not any(map(callable, attributes.values())):
        return
    yield from replaced_methods(module).values()
    for name in ("forward", "_old_forward"):
        value = attributes.get(name)
        while value is not None and is_ours(value):
            value = getattr(value, "eager", None)
        if value is not None:
            yield value
