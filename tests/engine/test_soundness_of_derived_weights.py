"""Merged LoRAs and 8-bit copies follow all that they were computed from.

As in `test_soundness.py`, each test compares a compiled pipe with an eager twin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from peft.utils import hotswap
from torch import nn

from onediff_ext.engine.running import kind_lookup
from onediff_ext.session.session import Session
from tests.support.models import unet_inputs
from tests.support.settled_twins import Twins

# Of a whole forward in int8, against eager without: twice what `test_soundness.py` measured.
ERROR_IN_INT8 = 0.06


def wrap(unet: Any, layers: Sequence[str] = ("to_q", "to_k", "conv1")) -> None:
    torch.manual_seed(5)
    config = LoraConfig(r=4, lora_alpha=4, target_modules=[*layers], init_lora_weights=False)
    unet.add_adapter(config, "style")


def wrap_for_hotswap(unet: Any) -> None:
    """As diffusers' `enable_lora_hotswap` does it: padded factors, and scales that are tensors."""
    wrap(unet)
    hotswap.prepare_model_for_compiled_hotswap(unet, target_rank=8)


def adapters(unet: Any) -> Iterator[Any]:
    return (module for module in unet.modules() if hasattr(module, "lora_A"))


@pytest.fixture
def session(make_session: Callable[..., Session]) -> Session:
    return make_session(spot_checks=False)


def write_scales(unet: Any) -> None:
    for adapter in adapters(unet):
        adapter.scaling["style"].fill_(0.3)


def write_scales_uncounted(unet: Any) -> None:
    for adapter in adapters(unet):
        adapter.scaling["style"].data.mul_(0.3)


def write_scales_of_a_call(unet: Any) -> None:
    for adapter in adapters(unet):
        adapter.scale_layer(0.3)


def replace_scales(unet: Any) -> None:
    for adapter in adapters(unet):
        adapter.scaling["style"] = torch.tensor(0.3)


def swap(unet: Any) -> None:
    """Another LoRA of another rank in its place, as diffusers does it."""
    generator = torch.Generator().manual_seed(8)
    other = {}
    for name, factor in get_peft_model_state_dict(unet, adapter_name="style").items():
        rank_first = ".lora_A." in name
        small = factor[:2] if rank_first else factor[:, :2]
        other[name] = 0.2 * torch.randn(small.shape, generator=generator)
    unet.load_lora_adapter(other, prefix=None, adapter_name="style", hotswap=True)


@pytest.mark.parametrize(
    "change",
    [write_scales, write_scales_uncounted, write_scales_of_a_call, replace_scales, swap],
)
def test_a_loras_scale_that_is_a_tensor(session: Session, change: Callable[[Any], None]) -> None:
    twins = Twins(session, wrap_for_hotswap)
    twins.assert_right_after(change)
    assert twins.captured.reason == ""


@torch.no_grad()
def test_the_scale_of_a_call_where_scales_are_tensors(session: Session) -> None:
    """peft puts a new tensor into each layer then, at the end of each forward."""
    twins = Twins(session, wrap_for_hotswap)
    for seed in range(6):
        inputs = unet_inputs(twins.unets[0], seed=seed)
        scale = {"scale": 0.3 if seed < 4 else 1.5}
        found, expected = (
            unet(**inputs, cross_attention_kwargs=dict(scale)).sample for unet in twins.unets
        )
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert "puts new tensors into the model (scaling)" in twins.captured.reason
    assert twins.error(7) < 1e-4
    assert twins.captured.reason == ""


@torch.no_grad()
def test_a_lora_that_cannot_be_recorded_makes_room_for_one_that_can(session: Session) -> None:
    twins = Twins(session, wrap_for_hotswap)

    def run(seed: int) -> float:
        inputs = unet_inputs(twins.unets[0], seed=seed)
        scale = {"scale": 0.3}
        found, expected = (
            unet(**inputs, cross_attention_kwargs=dict(scale)).sample for unet in twins.unets
        )
        return float((found - expected).abs().max())

    for seed in range(6):
        assert run(seed) < 1e-4
    assert "puts new tensors into the model (scaling)" in twins.captured.reason
    for unet in twins.unets:
        unet.unload_lora()
        wrap(unet)
    for seed in range(6, 14):
        assert run(seed) < 1e-4
    assert twins.captured.reason == ""
    assert twins.captured.replayed


def replace_in_place(layer: Any) -> None:
    """Another Parameter at the address of the old one, then a write that torch does not count."""
    layer.weight = nn.Parameter(layer.weight.detach(), requires_grad=False)
    layer.weight.data.mul_(1.2)


def test_a_loras_factor_in_the_place_of_another(session: Session) -> None:
    def change(unet: Any) -> None:
        for adapter in adapters(unet):
            replace_in_place(adapter.lora_A["style"])

    # Alone: a write to a factor that is still alive would have all weights merged again.
    Twins(session, partial(wrap, layers=("to_q", "to_k"))).assert_right_after(change)


def call_its_class(unet: Any, inputs: Any) -> torch.Tensor:
    return type(unet).forward(unet, **inputs).sample


def call_a_block(unet: Any, inputs: Any) -> torch.Tensor:
    block = unet.down_blocks[0].attentions[0].transformer_blocks[0]
    states = torch.ones(2, 24, block.norm1.normalized_shape[0])
    return block(states, encoder_hidden_states=inputs["encoder_hidden_states"])


@pytest.mark.parametrize("call", [call_its_class, call_a_block])
@torch.no_grad()
def test_blocks_that_are_called_outside_of_the_models_forward(
    session: Session, call: Callable[[Any, Any], torch.Tensor]
) -> None:
    """Nothing announces such a call, so it looks at all that is written without a count."""
    twins = Twins(session, wrap)
    prompt = torch.zeros(2, 77, twins.unets[0].config.cross_attention_dim)
    inputs = {**unet_inputs(twins.unets[0], seed=1), "encoder_hidden_states": prompt}
    for seed in range(4):
        numbers = torch.randn(prompt.shape, generator=torch.Generator().manual_seed(seed)).numpy()
        prompt.numpy()[:] = numbers
        for unet in twins.unets:
            for adapter in adapters(unet):
                adapter.lora_B["style"].weight.data.mul_(-1.0)
        found, expected = (call(unet, inputs) for unet in twins.unets)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_weight_in_the_place_of_another_under_graphs_in_8_bits(
    make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind_lookup, "unavailable_reason", lambda *_: None)
    twins = Twins(make_session(precision="int8", spot_checks=False), error=ERROR_IN_INT8)
    for unet in twins.unets:
        for module in unet.modules():
            if type(module) is nn.Linear:
                replace_in_place(module)
    assert max(twins.error(seed) for seed in range(10, 15)) < ERROR_IN_INT8
    for module in twins.unets[1].modules():  # the change is far beyond what 8 bits cost
        if type(module) is nn.Linear:
            module.weight.data.div_(1.2)
    assert twins.error(15) > 3 * ERROR_IN_INT8
