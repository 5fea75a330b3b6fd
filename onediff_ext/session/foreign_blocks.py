"""Blocks that other extensions, each by its name, or torch.compile took from their graphs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import nn

from onediff_ext.engine.blocks.family import BlockFamily
from onediff_ext.engine.running.block_runner import BlockRunner
from onediff_ext.engine.torch_compile import TORCH_COMPILES
from onediff_ext.engine.validity.foreign_code import (
    extension_of,
    is_ours,
    is_own_method,
    replaced_methods,
)
from onediff_ext.engine.validity.left_wrappers import left_wrappers

TAKEN_OVER = "another extension took the block over after its graph was attached"
_BY_OTHERS = "another extension"


class ForeignBlocks:
    """What other extensions did to one model's blocks.

    Attributes:
        replaced: (reason, blocks) of blocks that no runner serves: they are of another
            extension's class, or the model is not known.
        changed_by: Eager reason → the extension behind it, as far as its code shows one.
    """

    def __init__(self) -> None:
        self.replaced: list[tuple[str, int]] = []
        self.changed_by: dict[str, str] = {}
        self._suspects: dict[BlockRunner, str | None] = {}
        self._compiled: Collection[nn.Module] = ()

    def find_replaced(self, model: nn.Module, families: Sequence[BlockFamily]) -> None:
        """Find blocks whose class another extension derived from a known one.

        Token merging swaps the class of each transformer block. Such a block runs eager, and
        belongs to the count of blocks all the same.

        Args:
            model: The host's module.
            families: The known classes of blocks.
        """
        classes = (family.block_class() for family in families)
        # Hosts derive their own layers from torch's.
        known = {cls for cls in classes if cls and not cls.__module__.startswith("torch.")}
        counts: dict[str, int] = {}
        self.changed_by = {}
        for module in model.modules():
            cls = type(module)
            if cls in known or not issubclass(cls, tuple(known)):
                continue
            base = next(base for base in cls.__mro__ if base in known)
            if cls.__module__.partition(".")[0] == base.__module__.partition(".")[0]:
                continue  # the host's own
            reason = f"a {base.__qualname__} is a {cls.__qualname__} of {cls.__module__}"
            counts[reason] = counts.get(reason, 0) + 1
            self._note(reason, cls)
        self.replaced = list(counts.items())

    def note_unknown(self, model: nn.Module) -> None:
        """Note a model without any known block; it counts as one eager block.

        Args:
            model: A model in which no family has found a block.
        """
        if not self.replaced:
            name = type(model).__qualname__
            self.replaced = [(f"no graphs are known for the blocks of {name}", 1)]

    def before_picture(
        self, runners: Iterable[BlockRunner], compiled: Collection[nn.Module] = ()
    ) -> None:
        """Look which runners another extension has replaced, or torch.compile may never call.

        Args:
            runners: The model's runners.
            compiled: The modules that torch.compile compiles.
        """
        self._suspects = {
            r: r.eager_reason for r in runners if r.block in compiled or _is_covered(r)
        }
        self._compiled = compiled
        for runner in self._suspects:
            runner.eager_reason = ""

    def after_first_forward(self, runners: Iterable[BlockRunner], *, replayed: bool) -> None:
        """Note which blocks never reached their runner, and whose code keeps others eager.

        Args:
            runners: The model's runners.
            replayed: Whether the forward was a CUDA graph's, in which no runner is called.
        """
        for runner, reason in self._suspects.items():
            if runner.eager_reason != "":
                continue
            if replayed:
                runner.eager_reason = reason
                continue
            runner.used = None
            if runner.block in self._compiled:
                runner.eager_reason = TORCH_COMPILES
                continue
            runner.eager_reason = TAKEN_OVER
            self._note(TAKEN_OVER, vars(runner.block).get(runner.family.method))
        self._suspects = {}
        for runner in runners:
            reason = runner.eager_reason or ""
            if runner.used is None and _BY_OTHERS in reason and reason not in self.changed_by:
                for value in _foreign_code(runner.block):
                    self._note(reason, value)

    def _note(self, reason: str, value: object) -> None:
        name = extension_of(value)
        if name is not None:
            self.changed_by.setdefault(reason, name)


def _is_covered(runner: BlockRunner) -> bool:
    """Whether another extension's method is now in the place of a runner, or around it."""
    method = vars(runner.block).get(runner.family.method)
    return method is not runner and not is_ours(method)


def _foreign_code(block: nn.Module) -> Iterator[object]:
    """Yield hooks and replaced methods in a block, but for wrappers that pass calls through."""
    for module in block.modules():
        yield from module._forward_hooks.values()
        yield from module._forward_pre_hooks.values()
        own, left = vars(module), left_wrappers(module)
        passing = {name for name, wrapper in left.items() if wrapper.passes()}
        names = {"forward", "_forward", *replaced_methods(module)} & own.keys()
        for name in names - passing:
            if not is_ours(own[name]) and not is_own_method(module, name):
                yield own[name]
