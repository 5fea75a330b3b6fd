"""Known faults, put back: each takes away one of the things that keep pictures right.

They are named after what went wrong; `python -m tests.differential --plant NAME` has to find each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from diffusers.models.attention_processor import AttnProcessor2_0

from onediff_ext.engine import prompt_work, streams
from onediff_ext.engine.blocks import block_tree
from onediff_ext.engine.cuda_graphs import (
    captured_forward,
    forward_recorder,
    memory_reads,
    model_tracker,
    oom_fallback,
    staleness,
    text_kv_graph,
)
from onediff_ext.engine.running import text_kv
from onediff_ext.engine.validity import (
    model_state,
    module_attributes,
    python_code,
    tensor_contents,
)
from onediff_ext.hosts.diffusers import blocks
from onediff_ext.session import model_component

Plant = Callable[[pytest.MonkeyPatch], None]
PLANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {}


def _plant(patch_engine: Plant) -> Plant:
    @contextmanager
    def planted() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch_engine(patch)
            yield

    PLANTS[patch_engine.__name__.replace("_", "-")] = planted
    return patch_engine


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


@_plant
def lists_by_identity(patch: pytest.MonkeyPatch) -> None:
    """A list that is changed in place is the same: an IP-Adapter's scale."""
    patch.setattr(module_attributes, "is_mutable", _always(False))


@_plant
def writes_past_the_version_counter(patch: pytest.MonkeyPatch) -> None:
    """A LoRA that is swapped in place, ``lora_B.weight.data.mul_()``."""
    patch.setattr(tensor_contents.TensorContents, "_read", _always({}))


@_plant
def merged_weights_belong_to_nobody(patch: pytest.MonkeyPatch) -> None:
    """A capture does not own what it reads, nor are there places for merged weights to stay in."""
    patch.setattr(forward_recorder, "owned_storages", _always([]))
    patch.setattr(text_kv_graph, "owned_storages", _always([]))
    patch.setattr(model_tracker.ModelTracker, "derived_places", _always([]))
    patch.setattr(model_tracker.ModelTracker, "has_current_derived_weights", _always(True))


@_plant
def weights_that_moved(patch: pytest.MonkeyPatch) -> None:
    """Skip the check of weight addresses before a launch."""
    patch.setattr(staleness, "_where", _always([]))


@_plant
def wrappers_outside_of_graphs(patch: pytest.MonkeyPatch) -> None:
    """LoRA layers that no block graph contains are taken for merged: their strength is recorded."""
    real = staleness.Snapshot.__init__

    class Everything(frozenset[int]):
        def __contains__(self, value: object) -> bool:
            return True

    patch.setattr(
        staleness.Snapshot,
        "__init__",
        lambda self, model, known, merged=frozenset(): real(self, model, known, Everything(merged)),
    )


@_plant
def casts_of_autocast_are_recorded(patch: pytest.MonkeyPatch) -> None:
    """Leave autocast's weight cache on while a CUDA graph is captured; nothing owns its tensors."""
    real = memory_reads.torch

    class Torch:
        set_autocast_cache_enabled = staticmethod(_always(None))

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    patch.setattr(memory_reads, "torch", Torch())
    patch.setattr(forward_recorder, "owned_storages", _always([]))
    patch.setattr(text_kv_graph, "owned_storages", _always([]))


@_plant
def attributes_of_layers(patch: pytest.MonkeyPatch) -> None:
    """Ignore changed attributes of layers: tiling, ``output_scale_factor``, a norm's ``eps``."""
    patch.setattr(module_attributes.ModuleAttributes, "hold", _always(True))


@_plant
def methods_of_instances(patch: pytest.MonkeyPatch) -> None:
    """Ignore a layer's own ``_conv_forward`` or ``forward``."""
    patch.setattr(staleness, "replaced_methods", lambda module: iter(()))
    patch.setattr(block_tree, "replaced_methods", lambda module: {})
    patch.setattr(block_tree, "is_untold_function", _always(False))


@_plant
def processors_by_their_bare_name(patch: pytest.MonkeyPatch) -> None:
    """Trust every attention processor class named ``AttnProcessor2_0``, whatever its module."""
    patch.setattr(staleness, "_processor_reason", _always(None))
    tree, family = block_tree.BlockTree, blocks.TransformerFamily
    for cls, name in ((tree, "__init__"), (tree, "copy"), (family, "bind")):
        patch.setattr(cls, name, _by_name(getattr(cls, name)))


@_plant
def functions_and_classes(patch: pytest.MonkeyPatch) -> None:
    """Ignore replaced functions and patched classes, such as a processor's ``__call__``."""
    patch.setattr(python_code.PythonCode, "current_generation", _always(0))
    patch.setattr(python_code.PythonCode, "torch_reason", _always(None))
    patch.setattr(model_state, "patched_class_reason", _always(None))


@_plant
def exchanged_code(patch: pytest.MonkeyPatch) -> None:
    """Known code in the place of other known code, such as ``F.silu = F.mish``."""
    patch.setattr(python_code.FirstCode, "reason_of", _always(None))
    patch.setattr(python_code.FirstCode, "reason_of_torch", _always(None))


@_plant
def code_between_blocks(patch: pytest.MonkeyPatch) -> None:
    """Read code once per forward, whatever runs between its blocks."""
    patch.setattr(python_code.PythonCode, "doubt", _always(None))


@_plant
def global_hooks(patch: pytest.MonkeyPatch) -> None:
    """Hooks that run in all modules."""
    patch.setattr(model_state, "global_hook_reason", _always(None))


@_plant
def the_scale_of_a_call(patch: pytest.MonkeyPatch) -> None:
    """The prompt's part ignores ``cross_attention_kwargs={"scale": …}``."""
    patch.setattr(forward_recorder, "_projects_outside", _always(True))
    patch.setattr(model_tracker.ModelTracker, "has_current_derived_weights", _always(True))


@_plant
def halves_of_what_depends_on_each_other(patch: pytest.MonkeyPatch) -> None:
    """Short of memory, any batch is drawn in halves."""
    patch.setattr(captured_forward, "retry_of", _always(oom_fallback.Retry.IN_HALVES))
    patch.setattr(model_component, "retry_of", _always(oom_fallback.Retry.IN_HALVES))


@_plant
def prompts_by_identity(patch: pytest.MonkeyPatch) -> None:
    """A prompt's tensor that was written in place is the same prompt."""
    by_id = lambda epoch, tensor, weights: id(tensor)  # noqa: E731
    patch.setattr(text_kv_graph, "stamp_of", by_id)
    patch.setattr(text_kv, "stamp_of", by_id)
    patch.setattr(prompt_work, "stamp_of", by_id)


@_plant
def tensors_that_a_recording_leaves(patch: pytest.MonkeyPatch) -> None:
    """A recording leaves tensors in the model that hold nothing: scales of a LoRA."""
    rollback = SimpleNamespace(restore=_always(None), restore_tensors=_always(""))
    patch.setattr(forward_recorder, "AttributeRollback", _always(rollback))
    patch.setattr(forward_recorder, "scales_of_call", _always(rollback))


@_plant
def outputs_in_the_shared_pool(patch: pytest.MonkeyPatch) -> None:
    """A replay's output is handed out as it lies, and the next replay writes over it."""
    real = captured_forward.torch
    fake = SimpleNamespace(clone=lambda tensor: tensor)

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(fake, name, None) or getattr(real, name)

    patch.setattr(captured_forward, "torch", Torch())


@_plant
def streams_that_share_memory(patch: pytest.MonkeyPatch) -> None:
    """Callers with streams of their own: only their launches are ordered. Needs a GPU."""
    patch.setattr(streams.StreamOrder, "wait", _always(None))


def _by_name(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that meets diffusers' own processor wherever one has its name."""

    def named(self: Any, *args: Any, **kwargs: Any) -> Any:
        block = args[0] if args else self._block
        taken = []
        for module in block.modules():
            processor = vars(module).get("processor")
            if type(processor).__name__ == "AttnProcessor2_0":
                taken.append((module, processor))
                module.processor = AttnProcessor2_0()
        try:
            return method(self, *args, **kwargs)
        finally:
            for module, processor in taken:
                module.processor = processor

    return named


PLANTS_FOR_A_GPU = ("streams-that-share-memory",)
