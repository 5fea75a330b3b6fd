"""How blocks of one class are called: which arguments are tensors, which dims may vary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# Inclusive bounds of what may vary, in the block's own units (latent cells, tokens).
# Below 64 images diffusers' and Inductor's own code paths do not change.
DIM_BOUNDS: Mapping[str, tuple[int, int]] = {
    "batch": (1, 63),
    "height": (1, 2048),
    "width": (1, 2048),
    "tokens": (1, 2048 * 2048),
    "context": (1, 16384),
}

# One name per dim of a tensor; None for a dim that is part of the kind.
Dims = tuple[str | None, ...]
IMAGE: Dims = ("batch", None, "height", "width")
VECTOR: Dims = ("batch", None)
TOKENS: Dims = ("batch", "tokens", None)
CONTEXT: Dims = ("batch", "context", None)


NOTHING: Mapping[str, torch.Tensor] = {}


@dataclass(frozen=True)
class BlockCall:
    """One call of a block, sorted into what a graph takes and what it freezes.

    Args:
        tensors: The tensor arguments in the order of the family's `dims`.
        dims: For each tensor, the names of its dims.
        statics: Everything else that changes what the block computes.
        prompt: The tensor, as the host gave it, from which `BlockFamily.project` computes ahead
            what stays the same from step to step; None if nothing does.
    """

    tensors: tuple[torch.Tensor, ...]
    dims: tuple[Dims, ...]
    statics: tuple[tuple[str, Hashable], ...] = ()
    prompt: torch.Tensor | None = None


@dataclass(frozen=True)
class Refusal:
    """Why a block has to run eager."""

    reason: str


class BlockFamily(ABC):
    """All blocks of one class."""

    label: str
    # What a runner stands for: the block's forward, or a method that its forward calls.
    method: str = "forward"
    # The children that this method uses; None for all.
    parts: tuple[str, ...] | None = None
    # Prefixes of the full names ("module.Class") of the classes that such a block may consist
    # of, besides torch's.
    sources: tuple[str, ...]
    # Attributes of the block's modules that a host keeps there for itself (names, backups,
    # what was merged last): they change nothing that the block computes.
    ignored_attrs: frozenset[str] = frozenset()
    # Attributes of the block's modules that change what they compute while they are there and
    # not empty (a LoRA applied at each call): the block runs eager then.
    dynamic_weight_attrs: tuple[str, ...] = ()
    # Prefixes of the modules that may put methods of theirs into the classes of a block: the
    # host's own, which do nothing that a graph has to know.
    trusted_patchers: tuple[str, ...] = ()
    # Full names of models that consist of such blocks, and whose images of one batch do not depend
    # on each other: such a batch may be halved when memory is short.
    per_image: tuple[str, ...] = ()
    # Whether the block's own forward writes into its inputs; `run` must not.
    mutates_inputs = False
    # Whether the block's linear layers may compute in 8 bits when the user wants that.
    quantisable = False
    # The layers that read nothing but the prompt; they run ahead of the graph.
    prompt_layers: tuple[str, ...] = ()

    @abstractmethod
    def block_class(self) -> type[nn.Module] | None:
        """The exact class, or None when its package is not installed."""

    @abstractmethod
    def packages(self) -> Mapping[str, str]:
        """Name → version of the packages whose code the block runs."""

    @abstractmethod
    def describe(self, block: Any) -> str:
        """A few words for people, such as ``"ResnetBlock2D 320→640"``."""

    @abstractmethod
    def bind(
        self, block: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> BlockCall | Refusal:
        """Sort the arguments of one call, or say why no graph can serve it."""

    @abstractmethod
    def run(
        self,
        block: Any,
        tensors: Sequence[torch.Tensor],
        statics: Mapping[str, Hashable],
    ) -> torch.Tensor:
        """Call the block's own method with arguments that `bind` sorted."""

    def project(
        self, block: Any, prompt: torch.Tensor, merged: Mapping[str, torch.Tensor] = NOTHING
    ) -> tuple[torch.Tensor, ...]:
        """What the block's `prompt_layers` make of a prompt, by the host's own layers.

        Args:
            block: The host's.
            prompt: As the host gave it.
            merged: Weights of those layers that a wrapper stands around, by the layer's name.
        """
        raise NotImplementedError

    def projected(self, call: BlockCall, projections: tuple[torch.Tensor, ...]) -> BlockCall:
        """A call as its graph takes it: with projections instead of the prompt."""
        raise NotImplementedError

    def ahead(self, block: Any, call: BlockCall) -> BlockCall:
        """A call as its graph takes it."""
        if call.prompt is None:
            return call
        return self.projected(call, self.project(block, call.prompt))

    def tensor_of(self, output: Any) -> torch.Tensor:
        """The tensor in what the method returns."""
        tensor: torch.Tensor = output
        return tensor

    def output_of(self, block: Any, tensor: torch.Tensor) -> Any:  # noqa: ARG002
        """What the method returns, made from a graph's tensor."""
        return tensor

    def prepare(self, block: Any) -> None:  # noqa: B027
        """Ready a structural copy of a block for tracing; the default leaves it as it is."""

    def widest(self, block: Any, call: BlockCall) -> int:  # noqa: ARG002
        """Elements of the largest tensor inside the block, for the limit of 32-bit indices."""
        return max(t.numel() for t in call.tensors)
