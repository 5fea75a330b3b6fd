"""The modules of a host's models that CUDA graphs may contain."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from onediff_ext.engine.blocks.family import BlockFamily
from onediff_ext.engine.blocks.weight_functions import WeightFunctionRule
from onediff_ext.engine.blocks.weight_slots import WrapperRule
from onediff_ext.engine.validity.python_code import PythonCode


@dataclass(frozen=True)
class TrustedModules:
    """The modules of a host's models that CUDA graphs may contain.

    Args:
        sources: Prefixes of the full names of classes without side effects, besides torch's own.
        rules: Wrappers around layers, whose state is tracked.
        trusted_patchers: As `BlockFamily.trusted_patchers`.
        ignored_attrs: As `BlockFamily.ignored_attrs`.
        dynamic_weight_attrs: As `BlockFamily.dynamic_weight_attrs`.
        per_image: As `BlockFamily.per_image`.
        settings: `BlockFamily.global_settings` of each family.
        code: Watches the Python code of this process.
        patched_by: `BlockFamily.patched_by` of each family.
        stays_pinned: `BlockFamily.stays_pinned` of each family.
        weight_functions: `BlockFamily.weight_functions` of all families.
        processor_reasons: `BlockFamily.processor_reason` of each family.
    """

    sources: Sequence[str] = ()
    rules: Sequence[WrapperRule] = ()
    trusted_patchers: Sequence[str] = ()
    ignored_attrs: frozenset[str] = frozenset()
    dynamic_weight_attrs: Sequence[str] = ()
    per_image: frozenset[str] = frozenset()
    settings: Sequence[Callable[[], Hashable]] = ()
    code: PythonCode = field(default_factory=PythonCode)
    patched_by: Sequence[Callable[[nn.Module], str | None]] = ()
    stays_pinned: Sequence[Callable[[torch.Tensor], bool]] = ()
    weight_functions: Sequence[WeightFunctionRule] = ()
    processor_reasons: Sequence[Callable[[object], str | None]] = ()

    @classmethod
    def of(
        cls, families: Sequence[BlockFamily], rules: Sequence[WrapperRule], code: PythonCode
    ) -> TrustedModules:
        """Return what the families of a host's blocks know.

        Args:
            families: Of all its blocks.
            rules, code: As `TrustedModules` takes them.
        """
        # Most families share one function, which each replay calls.
        return cls(
            sorted({source for family in families for source in family.sources}),
            rules,
            sorted({patcher for family in families for patcher in family.trusted_patchers}),
            frozenset().union(*(family.ignored_attrs for family in families)),
            sorted({name for family in families for name in family.dynamic_weight_attrs}),
            frozenset(name for family in families for name in family.per_image),
            list({type(f).global_settings: f.global_settings for f in families}.values()),
            code,
            list({type(f).patched_by: f.patched_by for f in families}.values()),
            list({type(f).stays_pinned: f.stays_pinned for f in families}.values()),
            list(dict.fromkeys(rule for family in families for rule in family.weight_functions)),
            list({type(f).processor_reason: f.processor_reason for f in families}.values()),
        )

    @property
    def prefixes(self) -> tuple[str, ...]:
        """`sources`, torch's own modules and this package."""
        return ("torch.nn.modules", "onediff_ext.", *self.sources)

    @property
    def names_and_patchers(self) -> tuple[str, ...]:
        """`prefixes`, and those of modules whose patches are known."""
        return (*self.prefixes, *self.trusted_patchers)

    def patcher_of(self, module: nn.Module) -> str:
        """Return who replaced a method of a module, for people.

        Args:
            module: A module with a replaced method.

        Returns:
            The name that the host's families know, or ``"another extension"``.
        """
        return next(filter(None, (find(module) for find in self.patched_by)), "another extension")

    def processor_reason(self, processor: object) -> str | None:
        """Return why a known attention processor runs code of another extension, or None.

        Args:
            processor: Of an attention layer.
        """
        return next(filter(None, (reason(processor) for reason in self.processor_reasons)), None)

    def current_settings(self) -> Hashable:
        """The settings of the host's process, as they are now."""
        return tuple(read() for read in self.settings)
