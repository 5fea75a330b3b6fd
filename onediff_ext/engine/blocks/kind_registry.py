"""The port through which block runners reach the block kinds of this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence

import torch

from onediff_ext.core.kind_key import KindKey
from onediff_ext.engine.blocks.block_kind import BlockKind
from onediff_ext.engine.blocks.weight_slots import WrapperRule
from onediff_ext.engine.checking.spot_checks import SpotChecks
from onediff_ext.engine.memory_budget import MemoryBudget
from onediff_ext.engine.validity.python_code import PythonCode
from onediff_ext.engine.validity.tensor_contents import TensorContents


class KindRegistry(ABC):
    """Holds the block kinds of this process, one for each key and device.

    The session implements it.

    Args:
        budget: How much memory CUDA graphs may hold; None is `MemoryBudget()`.

    Attributes:
        rules: The wrappers around layers, such as LoRA layers, that the host uses.
        precision: Precision of the linear layers, as in `CompileOptions.precision`.
        code: Watches the Python code of this process.
        contents: Watches the tensors from which merged weights and 8-bit copies were computed.
        spot_checks: Chooses graphs in use that are compared with eager again.
        budget: Decides what CUDA graphs may hold, and frees merged weights and 8-bit copies.
        called_alone: Called before a block runs outside of a model's forward. Nobody knows then
            what was written since the call before, so a new epoch begins unless an image is drawn.
    """

    rules: Sequence[WrapperRule]
    precision = "exact"

    def __init__(self, budget: MemoryBudget | None = None) -> None:
        self.code, self.contents, self.spot_checks = PythonCode(), TensorContents(), SpotChecks()
        self.budget = MemoryBudget() if budget is None else budget
        self.called_alone: Callable[[], None] = lambda: None

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Number of the image being drawn.

        It changes whenever weights may have been written in a way that torch does not count.
        """

    @property
    def moment(self) -> Hashable:
        """Identifies the running forward of a model, in which no code is replaced.

        None outside of a forward.
        """
        return None

    @abstractmethod
    def key_entries(self, device: torch.device) -> dict[str, str]:
        """Return the parts of a key that the machine and the backend decide, by their names.

        Args:
            device: Where the blocks of the kind live.
        """

    @abstractmethod
    def find(self, key: KindKey, device: torch.device, make: Callable[[], BlockKind]) -> BlockKind:
        """Return the kind with this key on a device.

        Args:
            key: The kind's key.
            device: Where its blocks live.
            make: Makes the kind when it is new. A stored graph is loaded into it.
        """

    def rejected(self, kind: BlockKind) -> None:  # noqa: B027
        """Note that a kind's graph failed, or that its first output differs from eager's.

        Args:
            kind: The kind, which is failed and has the reason.
        """

    def found_wrong(self, what: str, problem: str, key: KindKey | None = None) -> None:  # noqa: B027
        """Note that a spot check found a difference from eager.

        Args:
            what: Label of the kind, or class of the model.
            problem: The difference, in plain words.
            key: The kind's key; None for the CUDA graph of a model.
        """

    @abstractmethod
    def fell_back(self, what: str, reason: str) -> None:
        """Count one call that ran eager although a graph was wanted.

        Args:
            what: Label of the kind or of the block family.
            reason: The eager reason.
        """
