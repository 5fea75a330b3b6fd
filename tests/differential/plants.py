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

from onediff_ext.engine import code, contents, module_state, runner, streams, structure
from onediff_ext.engine.capture import forward, ladder, prompt, reads, watch
from onediff_ext.engine.families import diffusers
from onediff_ext.service import component

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
    patch.setattr(module_state, "is_mutable", _always(False))


@_plant
def writes_past_the_version_counter(patch: pytest.MonkeyPatch) -> None:
    """A LoRA that is swapped in place, ``lora_B.weight.data.mul_()``."""
    patch.setattr(contents.Contents, "_digests", _always({}))


@_plant
def merged_weights_belong_to_nobody(patch: pytest.MonkeyPatch) -> None:
    """A capture does not own what it reads, nor are there places for merged weights to stay in."""
    patch.setattr(forward, "owned", _always([]))
    patch.setattr(prompt, "owned", _always([]))
    patch.setattr(forward.CapturedForward, "_derived_places", _always([]))
    patch.setattr(forward.CapturedForward, "_is_derived_from_the_same", _always(True))


@_plant
def weights_that_moved(patch: pytest.MonkeyPatch) -> None:
    """Nobody looks where the weights lie before a launch."""
    patch.setattr(watch.Snapshot, "_where", _always([]))


@_plant
def casts_of_autocast_are_recorded(patch: pytest.MonkeyPatch) -> None:
    """With autocast's cache on, and nobody who owns what it holds."""
    real = reads.torch

    class Torch:
        set_autocast_cache_enabled = staticmethod(_always(None))

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    patch.setattr(reads, "torch", Torch())
    patch.setattr(forward, "owned", _always([]))
    patch.setattr(prompt, "owned", _always([]))


@_plant
def attributes_of_layers(patch: pytest.MonkeyPatch) -> None:
    """Tiling, ``output_scale_factor``, a norm's ``eps``."""
    patch.setattr(module_state.ModuleState, "holds", _always(True))


@_plant
def methods_of_instances(patch: pytest.MonkeyPatch) -> None:
    """A layer's own ``_conv_forward`` or ``forward``."""
    patch.setattr(watch, "foreign_methods", lambda module: iter(()))
    patch.setattr(structure, "foreign_methods", lambda module: iter(()))
    patch.setattr(structure, "_is_known_function", _always(True))


@_plant
def processors_by_their_bare_name(patch: pytest.MonkeyPatch) -> None:
    """Whatever is called ``AttnProcessor2_0`` is taken for diffusers' own."""
    patch.setattr(watch, "_processor_refusal", _always(None))
    tree, family = structure.BlockTree, diffusers.TransformerFamily
    for cls, name in ((tree, "__init__"), (tree, "copy"), (family, "bind")):
        patch.setattr(cls, name, _by_name(getattr(cls, name)))


@_plant
def functions_and_classes(patch: pytest.MonkeyPatch) -> None:
    """A replaced ``scaled_dot_product_attention``, a processor's patched ``__call__``."""
    patch.setattr(code.Code, "look", _always(0))
    patch.setattr(code.Code, "torch_reason", _always(None))
    patch.setattr(watch, "foreign_class", _always(None))
    patch.setattr(structure, "foreign_class", _always(None))


@_plant
def global_hooks(patch: pytest.MonkeyPatch) -> None:
    """Hooks that run in all modules."""
    patch.setattr(watch, "surroundings_reason", _always(None))
    patch.setattr(structure, "surroundings_reason", _always(None))


@_plant
def the_scale_of_a_call(patch: pytest.MonkeyPatch) -> None:
    """The prompt's part ignores ``cross_attention_kwargs={"scale": …}``."""
    patch.setattr(forward, "_projects_outside", _always(True))
    patch.setattr(forward.CapturedForward, "_is_derived_from_the_same", _always(True))


@_plant
def halves_of_what_depends_on_each_other(patch: pytest.MonkeyPatch) -> None:
    """Short of memory, any batch is drawn in halves."""
    patch.setattr(forward, "retry_of", _always(ladder.Retry.IN_HALVES))
    patch.setattr(component, "retry_of", _always(ladder.Retry.IN_HALVES))


@_plant
def prompts_by_identity(patch: pytest.MonkeyPatch) -> None:
    """A prompt's tensor that was written in place is the same prompt."""
    by_id = lambda epoch, tensor, weights: id(tensor)  # noqa: E731
    patch.setattr(prompt, "stamp_of", by_id)
    patch.setattr(runner, "stamp_of", by_id)


@_plant
def outputs_in_the_shared_pool(patch: pytest.MonkeyPatch) -> None:
    """A replay's output is handed out as it lies, and the next replay writes over it."""
    real = forward.torch
    fake = SimpleNamespace(clone=lambda tensor: tensor)

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(fake, name, None) or getattr(real, name)

    patch.setattr(forward, "torch", Torch())


@_plant
def streams_that_share_memory(patch: pytest.MonkeyPatch) -> None:
    """Two threads with streams of their own: only launches are ordered. Needs a GPU."""
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
