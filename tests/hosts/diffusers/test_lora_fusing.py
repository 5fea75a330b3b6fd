"""`fuse_lora` and `unfuse_lora` beside diffusers' own.

What unfusing may restore are the weights from before `fuse_lora`, where nobody has changed
anything since. Everything else is diffusers' to decide.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils.hotswap import prepare_model_for_compiled_hotswap

from onediff_ext.hosts.diffusers.lora.exact_fusing import ExactFusing
from onediff_ext.hosts.diffusers.lora.lora_file import load_lora
from tests.support import adapter_weights, models


class Fusing:
    """A pipeline with exact fusing, and its twin without, in float16 with a weak LoRA."""

    def __init__(self, folder: Path) -> None:
        self.ours, self.twin = models.sd15(seed=3), models.sd15(seed=3)
        path = adapter_weights.save_lora(models.sd15(seed=3), folder / "style.safetensors")
        for pipe in (self.ours, self.twin):
            pipe.unet.half()
            load_lora(pipe, path, 0.003, adapter_name="style")
        self.exact = ExactFusing(self.ours)
        self.before = self.weights(self.ours)

    def weights(self, pipe: Any) -> dict[str, torch.Tensor]:
        """The weights under the LoRA, as they are now."""
        return {
            name: layer.get_base_layer().weight.detach().clone()
            for name, layer in pipe.unet.named_modules()
            if hasattr(layer, "merged_adapters")
        }

    def fuse(self, **options: Any) -> None:
        self.exact.fuse_lora(**options)
        self.twin.fuse_lora(**options)

    def unfuse(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Unfuse both; our weights and the twin's."""
        self.exact.unfuse_lora()
        self.twin.unfuse_lora()
        return self.weights(self.ours), self.weights(self.twin)

    @property
    def layers(self) -> list[Any]:
        """The middle's first layer with a LoRA, of both."""
        return [
            next(m for m in pipe.unet.mid_block.modules() if hasattr(m, "merged_adapters"))
            for pipe in (self.ours, self.twin)
        ]


@pytest.fixture
def fusing(tmp_path: Path) -> Fusing:
    return Fusing(tmp_path)


def one_number(layer: Any) -> None:
    layer.get_base_layer().weight.data.view(-1)[7] += 0.05


def one_number_counted(layer: Any) -> None:
    with torch.no_grad():
        layer.get_base_layer().weight.view(-1)[7].add_(0.05)


def other_weights(layer: Any) -> None:
    base = layer.get_base_layer()
    base.weight = torch.nn.Parameter(base.weight * 1.002, requires_grad=False)


def a_factor(layer: Any) -> None:
    layer.lora_B["style"].weight.data.view(-1)[3] += 0.5


def its_strength(layer: Any) -> None:
    layer.set_scale("style", 0.006)


def its_strength_in_place(layer: Any) -> None:
    """Of a LoRA that may be swapped in place."""
    layer.scaling["style"].mul_(2.0)


def transposed(layer: Any) -> None:
    """The same numbers in other places."""
    weight = layer.get_base_layer().weight
    if weight.ndim == 2 and weight.shape[0] == weight.shape[1]:
        weight.data = weight.data.clone().t()
    else:
        weight.data = weight.data.flip(0)


@pytest.mark.parametrize(
    "change",
    [
        one_number,
        one_number_counted,
        other_weights,
        a_factor,
        its_strength,
        its_strength_in_place,
        transposed,
    ],
)
def test_a_change_while_a_lora_is_fused_stays(
    fusing: Fusing, change: Callable[[Any], None]
) -> None:
    if change is its_strength_in_place:
        for pipe in (fusing.ours, fusing.twin):
            prepare_model_for_compiled_hotswap(pipe.unet)
    fusing.fuse()
    for layer in fusing.layers:
        change(layer)
    ours, theirs = fusing.unfuse()
    changed = fusing.layers[0]
    for name, layer in fusing.ours.unet.named_modules():
        if layer is changed:
            assert torch.equal(ours[name], theirs[name])
            assert not torch.equal(ours[name], fusing.before[name])
        elif name in ours:
            assert torch.equal(ours[name], fusing.before[name])


def test_a_lora_that_is_deleted_while_it_is_fused_stays_in_the_weights(fusing: Fusing) -> None:
    fusing.fuse()
    for pipe in (fusing.ours, fusing.twin):
        pipe.unet.delete_adapters("style")
    ours, theirs = fusing.unfuse()
    assert any(not torch.equal(ours[name], weight) for name, weight in fusing.before.items())
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name])


def test_unfusing_restores_every_bit(fusing: Fusing) -> None:
    for options in ({}, {"lora_scale": 0.5}):
        fusing.fuse(**options)
        ours, theirs = fusing.unfuse()
        assert all(torch.equal(ours[name], weight) for name, weight in fusing.before.items())
    assert any(not torch.equal(theirs[name], weight) for name, weight in fusing.before.items())


def test_layers_that_are_gone_are_not_kept(fusing: Fusing) -> None:
    fusing.fuse()
    fusing.ours.unload_lora_weights()
    fusing.exact.unfuse_lora()
    assert not fusing.exact._fused


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_second_fusing_may_change_the_scale_of_the_first(
    fusing: Fusing, tmp_path: Path, scale: float
) -> None:
    """`lora_scale` scales all active LoRAs, fused ones included, and unfusing subtracts that."""
    path = adapter_weights.save_lora(models.sd15(seed=3), tmp_path / "other.safetensors", seed=9)
    for pipe in (fusing.ours, fusing.twin):
        load_lora(pipe, path, 0.003, adapter_name="other")
        pipe.set_adapters(["style", "other"], [0.003, 0.003])
    fusing.fuse(adapter_names=["style"])
    fusing.fuse(adapter_names=["other"], lora_scale=scale)
    ours, theirs = fusing.unfuse()
    for name, weight in ours.items():
        expected = fusing.before if scale == 1.0 else theirs
        assert torch.equal(weight, expected[name])
    assert any(not torch.equal(theirs[name], weight) for name, weight in fusing.before.items())
