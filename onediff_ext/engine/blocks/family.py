"""How blocks of one class are called: which arguments are tensors, which dims may vary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.blocks.arguments import named_arguments
from onediff_ext.engine.blocks.prompt_recipe import PromptRecipe
from onediff_ext.engine.blocks.weight_functions import WeightFunctionRule
from onediff_ext.engine.quantization import EightBitLinears

# Inclusive bounds of the dims that may vary, in latent cells and tokens. Below 64 images the code
# paths of Inductor and of the hosts' packages do not change.
DIM_BOUNDS: Mapping[str, tuple[int, int]] = {
    "batch": (1, 63),
    "height": (1, 2048),
    "width": (1, 2048),
    "tokens": (1, 2048 * 2048),
    "context": (1, 16384),
}

# One name for each dim of a tensor; None for a dim whose size is part of the kind.
Dims = tuple[str | None, ...]
IMAGE: Dims = ("batch", None, "height", "width")
VECTOR: Dims = ("batch", None)
TOKENS: Dims = ("batch", "tokens", None)
CONTEXT: Dims = ("batch", "context", None)

# Arguments of a block's call by name, and what a graph freezes of them by name.
Arguments = Mapping[str, Any]
Tensors = Sequence[torch.Tensor]
Statics = Mapping[str, Hashable]

# Weight [N, K] and bias [N] of a linear layer.
LinearWeights = tuple[torch.Tensor, torch.Tensor | None]
NOTHING: Mapping[str, LinearWeights] = {}


@dataclass(frozen=True)
class BlockCall:
    """One call of a block, sorted into what a graph takes and what it freezes.

    Args:
        tensors: The tensor arguments, in the order that `BlockFamily.run` takes.
        dims: The names of each tensor's dims.
        statics: Everything else that changes what the block computes. It is part of the key.
        prompt: The host's own tensor from which `BlockFamily.text_kv` computes the text KV cache
            ahead of the graph; None if the graph takes the tensors as they are.
    """

    tensors: tuple[torch.Tensor, ...]
    dims: tuple[Dims, ...]
    statics: tuple[tuple[str, Hashable], ...] = ()
    prompt: torch.Tensor | None = None


@dataclass(frozen=True)
class Refusal:
    """Why a block has to run eager.

    Args:
        reason: In plain words.
        still: Tells at a later call of the same image, without a look at the block, whether the
            reason holds; None if the block has to be looked at.
        is_known_code: Whether all of the block's code was looked at and is known.
    """

    reason: str
    still: Callable[[], bool] | None = None
    is_known_code: bool = False


UNKNOWN_ARGUMENTS = Refusal("called with arguments that are not known")


class BlockFamily(ABC):
    """Knows the blocks of one class: their arguments, packages and names.

    Attributes:
        label: Name of the class, for people.
        method: The method that a graph replaces: the block's forward, or one that its forward
            calls.
        arguments: Names of this method's arguments, in the order of its signature. A call with
            any other argument that is not None runs eager.
        parts: Names of the children that this method uses; None for all.
        sources: Prefixes of the full names (``"module.Class"``) of the classes that such a block
            may consist of, besides torch's.
        ignored_attrs: Names of attributes of the block's modules that the host keeps there for
            itself (names, backups, the last merge). They decide nothing that the block computes.
        redundant_attrs: Names of attributes of the block's modules that are not part of the key: a
            record of how the block was made, or values computed from other attributes.
        dynamic_weight_attrs: Names of attributes of the block's modules that change their weights
            at each call while they are there and not empty. The block runs eager then, unless
            `weight_functions` know what is in them.
        weight_functions: Know functions in `dynamic_weight_attrs` that may be applied to copies of
            the weights, which the block's graph gets then.
        trusted_patchers: Prefixes of the modules whose methods may replace those of the block's
            classes: the host's own, with no effect that a graph would miss.
        per_image: Full names of models that consist of such blocks and whose images of one batch
            do not depend on each other. The OOM fallback may halve their batches.
        mutates_inputs: Whether the block's own forward writes into its inputs. `run` must not.
        eight_bits: Which linear layers may compute in 8 bits; None for none.
        prompt_layers: Names of the layers that read only the prompt. They run ahead of the graph
            and make the text KV cache.
    """

    label: str
    method: str = "forward"
    arguments: tuple[str, ...]
    parts: tuple[str, ...] | None = None
    sources: tuple[str, ...]
    ignored_attrs: frozenset[str] = frozenset()
    redundant_attrs: frozenset[str] = frozenset()
    dynamic_weight_attrs: tuple[str, ...] = ()
    weight_functions: tuple[WeightFunctionRule, ...] = ()
    trusted_patchers: tuple[str, ...] = ()
    per_image: tuple[str, ...] = ()
    mutates_inputs = False
    eight_bits: EightBitLinears | None = None
    prompt_layers: tuple[str, ...] = ()

    @abstractmethod
    def block_class(self) -> type[nn.Module] | None:
        """Return the exact class, or None when its package is not installed."""

    def streams_weights(self) -> bool:
        """Return whether such blocks' layers copy weights from main memory at each call.

        A graph gets copies then, too. The host waits until the GPU has read pinned memory before
        anybody writes to it. False where the host copies on a stream of its own, while other layers
        compute: a graph's copies would take longer.
        """
        return False

    def stays_pinned(self, weight: torch.Tensor) -> bool:  # noqa: ARG002
        """Return whether a CUDA graph may copy a weight from where it is in main memory.

        Args:
            weight: In main memory, of a model whose layers stream their weights.

        Returns:
            True if that memory is pinned for as long as any tensor is in it.
        """
        return False

    @abstractmethod
    def packages(self) -> Mapping[str, str]:
        """Return name → version of the packages whose code the block runs."""

    @abstractmethod
    def describe(self, block: Any) -> str:
        """Return a few words for people, such as ``"ResnetBlock2D 320→640"``.

        Args:
            block: The host's module.
        """

    @abstractmethod
    def sort(self, block: Any, arguments: Arguments) -> BlockCall | Refusal:
        """Sort the arguments of one call, or say why no graph can serve it.

        Args:
            block: The host's module.
            arguments: The arguments of its `method` by name. Those that the call leaves out are
                missing.

        Returns:
            The call, or a refusal with the eager reason.
        """

    def bind(
        self, block: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> BlockCall | Refusal:
        """Name the arguments of one call of the block's `method`, then `sort` them.

        Args:
            block: The host's module.
            args, kwargs: Of the call.

        Returns:
            As `sort`; `UNKNOWN_ARGUMENTS` for an argument that the family does not name.
        """
        named = named_arguments(self.arguments, args, kwargs)
        return UNKNOWN_ARGUMENTS if named is None else self.sort(block, named)

    @abstractmethod
    def run(self, block: Any, tensors: Tensors, statics: Statics) -> Any:
        """Call the block's own method with arguments that `sort` sorted.

        Args:
            block: The host's module, or its copy that is traced.
            tensors: As `BlockCall.tensors`.
            statics: As `BlockCall.statics`, by name.

        Returns:
            The method's output.
        """

    def text_kv(
        self, block: Any, prompt: torch.Tensor, merged: Mapping[str, LinearWeights] = NOTHING
    ) -> tuple[torch.Tensor, ...]:
        """Compute the text KV cache of a prompt with the host's own layers.

        Args:
            block: The host's module.
            prompt: [B, M, C], the host's own tensor.
            merged: Weights of those `prompt_layers` that have a wrapper, by the layer's name.

        Returns:
            One tensor [B, M, D] for each of `prompt_layers`.

        Raises:
            NotImplementedError: The family has no `prompt_layers`.
        """
        raise NotImplementedError

    def with_text_kv(self, call: BlockCall, text_kv: tuple[torch.Tensor, ...]) -> BlockCall:
        """Return a call whose prompt is replaced by its text KV cache, as the graph takes it.

        Args:
            call: A call with a prompt.
            text_kv: From `BlockFamily.text_kv`, [B, M, D] each.

        Raises:
            NotImplementedError: The family has no `prompt_layers`.
        """
        raise NotImplementedError

    def with_attention(self, call: BlockCall, output: torch.Tensor) -> BlockCall:
        """Return a call with the output of cross-attention in place of the prompt.

        Args:
            call: A call with a prompt.
            output: [B, N, D].

        Raises:
            NotImplementedError: The family's blocks have no cross-attention.
        """
        raise NotImplementedError

    def graph_call(self, block: Any, call: BlockCall) -> BlockCall:
        """Return a call as its graph takes it, with the text KV cache computed if it has one.

        Args:
            block: The host's module.
            call: A call that `sort` returned.
        """
        if call.prompt is None:
            return call
        return self.with_text_kv(call, self.text_kv(block, call.prompt))

    def tensors_of(self, output: Any) -> tuple[torch.Tensor, ...]:
        """Return the tensors in the output of `method`, which are a graph's outputs.

        Args:
            output: What `method` returned.
        """
        return (output,)

    def output_of(self, block: Any, tensors: Tensors) -> Any:  # noqa: ARG002
        """Return the output of `method` for a graph's outputs.

        Args:
            block: The host's module.
            tensors: The graph's outputs.
        """
        (output,) = tensors
        return output

    def global_settings(self) -> Hashable:
        """Return the settings of the host's process that decide what such blocks compute.

        A CUDA graph is stale when they change. For the blocks' own graphs `sort` decides.
        """
        return None

    def processor_reason(self, processor: object) -> str | None:  # noqa: ARG002
        """Return why a known attention processor runs code of another extension, or None.

        Args:
            processor: Of an attention layer. It may dispatch to a table of functions.
        """
        return None

    def patched_by(self, module: nn.Module) -> str | None:  # noqa: ARG002
        """Return who replaced a module's forward, for people, where the host knows it.

        Args:
            module: Any module of the host's models.
        """
        return None

    def prompt_recipe(self, model: nn.Module) -> PromptRecipe | None:  # noqa: ARG002
        """Return which part of a model's forward depends on the prompt alone, or None.

        Args:
            model: A model with such blocks.
        """
        return None

    def prepare(self, block: Any) -> None:  # noqa: B027
        """Prepare a structural copy of a block for tracing; the default changes nothing.

        Args:
            block: The copy that is traced.
        """

    def widest(self, block: Any, call: BlockCall) -> int:  # noqa: ARG002
        """Return the elements of the largest tensor inside the block, against 32-bit indices.

        Args:
            block: The host's module.
            call: A sorted call.
        """
        return max(t.numel() for t in call.tensors)
