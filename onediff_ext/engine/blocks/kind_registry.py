"""What a block's runner asks of whoever knows the kinds of this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence

import torch

from onediff_ext.core.kind_key import KindKey
from onediff_ext.engine.blocks.block_kind import BlockKind
from onediff_ext.engine.blocks.weight_slots import WrapperRule
from onediff_ext.engine.checking.spot_checks import SpotChecks
from onediff_ext.engine.validity.python_code import PythonCode
from onediff_ext.engine.validity.tensor_contents import TensorContents


class KindRegistry(ABC):
    """Who knows the kinds of this process; the session implements it.

    Attributes:
        rules: Wrappers around layers.
        precision: Of the linear layers, as in `CompileOptions`.
        code: Watches the code of this process.
        contents: Watches tensors from which something was computed that is kept.
        spot_checks: Chooses what is compared with eager again.
    """

    rules: Sequence[WrapperRule]
    precision = "exact"

    def __init__(self) -> None:
        self.code, self.contents, self.spot_checks = PythonCode(), TensorContents(), SpotChecks()

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Differs after any moment in which weights may have changed without a trace."""

    @property
    def moment(self) -> Hashable:
        """Equal for calls within one forward of a model, in which no code is replaced; None
        outside of one."""
        return None

    @abstractmethod
    def key_entries(self, device: torch.device) -> dict[str, str]:
        """The parts of a key that machine and backend give."""

    @abstractmethod
    def find(self, key: KindKey, device: torch.device, make: Callable[[], BlockKind]) -> BlockKind:
        """The kind of this key on a device, made (and its graph loaded, if stored) when it is
        new."""

    def rejected(self, kind: BlockKind) -> None:  # noqa: B027
        """Hear that a kind's graph was wrong in this process."""

    def found_wrong(self, what: str, problem: str, key: KindKey | None = None) -> None:  # noqa: B027
        """Hear that something that had passed its comparison differed from eager in use."""

    @abstractmethod
    def fell_back(self, what: str, reason: str) -> None:
        """Count one call that ran eager although a graph was wanted."""
