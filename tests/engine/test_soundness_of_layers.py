"""Rare changes of single layers, with and without a LoRA around them.

As in `test_soundness.py`, each test compares a compiled pipe with an eager twin.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch import nn

from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.session.session import Session
from tests.support.models import unet_inputs
from tests.support.settled_twins import Twins


def block(unet: Any) -> Any:
    return unet.mid_block.attentions[0].transformer_blocks[0]


def wrap(unet: Any) -> None:
    torch.manual_seed(5)
    layers = ["to_q", "to_k", "conv1"]
    config = LoraConfig(r=4, lora_alpha=4, target_modules=layers, init_lora_weights=False)
    unet.add_adapter(config, "style")


@pytest.fixture
def session(make_session: Callable[..., Session]) -> Session:
    return make_session(spot_checks=False)


def test_a_bias_that_a_layer_did_not_have(session: Session) -> None:
    def change(unet: Any) -> None:
        layer = block(unet).attn1.to_v
        assert layer.bias is None
        layer.bias = nn.Parameter(torch.linspace(-1, 1, layer.out_features), requires_grad=False)

    Twins(session).assert_right_after(change)


def run_anothers_forward(unet: Any) -> None:
    block(unet).attn1.to_q.forward = block(unet).attn1.to_k.forward


def pad_on_one_side(unet: Any) -> None:
    """As an extension does that tiles in one direction only."""
    for layer in (layer for layer in unet.modules() if isinstance(layer, nn.Conv2d)):
        if layer.padding == (1, 1):
            layer.padding_mode = "circular"
            layer._reversed_padding_repeated_twice = [2, 0, 1, 1]


@pytest.mark.parametrize("change", [run_anothers_forward, pad_on_one_side])
def test_what_a_layer_computes_with(session: Session, change: Callable[[Any], object]) -> None:
    Twins(session).assert_right_after(change)


def test_a_padding_that_changes_between_two_circular_ones(session: Session) -> None:
    twins = Twins(session)
    for unet in twins.unets:
        pad_on_one_side(unet)
        for layer in unet.modules():
            if isinstance(layer, nn.Conv2d) and layer.padding_mode == "circular":
                layer._reversed_padding_repeated_twice = [1, 1, 1, 1]
    assert max(twins.error(seed) for seed in range(20, 25)) < 1e-4
    twins.assert_right_after(pad_on_one_side)


def test_a_block_that_runs_anothers_forward(session: Session) -> None:
    def share(unet: Any) -> None:
        blocks = [m for m in unet.modules() if type(m).__name__ == "BasicTransformerBlock"]
        blocks[1].forward = blocks[0].forward

    Twins(session).assert_right_after(share)
    Twins(session, share, reason="a BasicTransformerBlock has the forward of another extension")


def test_an_attribute_replaced_by_an_equal_object(session: Session) -> None:
    """diffusers' configuration compares its items, and an attribute of it is none."""
    twins = Twins(session)
    for unet in twins.unets:
        unet.config.center_input_sample = True
    assert max(twins.error(seed) for seed in range(20, 25)) < 1e-4
    twins.assert_right_after(lambda unet: unet.register_to_config(center_input_sample=False))


def pad_in_a_circle(unet: Any) -> None:
    unet.mid_block.resnets[0].conv1.base_layer.padding_mode = "circular"


def give_a_factor_a_bias(unet: Any) -> None:
    layer = block(unet).attn1.to_q
    layer.lora_B["style"].bias = nn.Parameter(
        torch.linspace(-1, 1, layer.out_features), requires_grad=False
    )


def exchange_the_weight(unet: Any) -> None:
    """A new weight at the address of the old one, which has been written as often."""
    layer = block(unet).attn1.to_q.base_layer
    storage = layer.weight.data
    version = layer.weight._version
    del layer._parameters["weight"]
    layer.weight = nn.Parameter(storage, requires_grad=False)
    layer.weight.data.mul_(-1.0)
    while layer.weight._version < version:
        torch.autograd.graph.increment_version(layer.weight)
    assert layer.weight._version == version


def patch_a_factors_convolution(unet: Any) -> None:
    factor = unet.mid_block.resnets[0].conv1.lora_B["style"]
    own = factor._conv_forward
    factor._conv_forward = lambda x, weight, bias: 1.5 * own(x, weight, bias)


def patch_a_factor(unet: Any) -> None:
    factor = block(unet).attn1.to_q.lora_A["style"]
    own = factor.forward
    factor.forward = lambda x: 1.5 * own(x)


def patch_the_wrapper(unet: Any) -> None:
    wrapper = block(unet).attn1.to_q
    own = wrapper.forward
    wrapper.forward = lambda x, **more: 1.5 * own(x, **more)


def pad_a_factor_in_a_circle(unet: Any) -> None:
    unet.mid_block.resnets[0].conv1.lora_A["style"].padding_mode = "circular"


@pytest.mark.parametrize(
    "change",
    [
        pad_in_a_circle,
        give_a_factor_a_bias,
        patch_a_factors_convolution,
        patch_a_factor,
        patch_the_wrapper,
        pad_a_factor_in_a_circle,
    ],
)
def test_the_layer_under_a_lora(session: Session, change: Callable[[Any], None]) -> None:
    Twins(session, wrap).assert_right_after(change)


def test_a_weight_exchanged_in_the_middle_of_a_picture(session: Session) -> None:
    twins = Twins(session, wrap)
    with session.picture():
        assert twins.error(9) < 1e-4
        twins.assert_right_after(exchange_the_weight)


def test_a_lora_with_live_dropout_runs_eager(session: Session) -> None:
    twins = Twins(session, wrap)
    for unet in twins.unets:
        for module in unet.modules():
            if hasattr(module, "lora_dropout"):
                module.lora_dropout["style"] = nn.Dropout(0.5).train()
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            found = twins.unets[0](**unet_inputs(twins.unets[0], seed=seed)).sample
            again = twins.unets[0](**unet_inputs(twins.unets[0], seed=seed)).sample
        assert not torch.equal(found, again)  # it drops


def test_dropout_in_training_mode_alone(session: Session) -> None:
    twins = Twins(session)
    for unet in twins.unets:
        block(unet).ff.net[1].p = 0.5
    assert twins.error(7) < 1e-4
    block(twins.unets[0]).ff.net[1].train()
    for seed in (3, 4, 5):
        twins.error(seed)
    with torch.no_grad():
        one, other = (
            twins.unets[0](**unet_inputs(twins.unets[0], seed=8)).sample for _ in range(2)
        )
    assert not torch.equal(one, other)  # it drops
    assert any("training mode" in fallback.reason for fallback in session.fallbacks())


def test_a_size_that_was_seen_before_a_hook_came_is_not_recorded(session: Session) -> None:
    twins, factor = Twins(session), [1.0]
    assert twins.error(20, side=12) < 1e-5
    session.cuda_graphs.drop_all("the test goes on")
    for unet in twins.unets:
        unet.conv_in.register_forward_hook(lambda module, args, output: output * factor[0])
    assert max(twins.error(seed) for seed in range(21, 25)) < 1e-4
    factor[0] = 2.0
    assert twins.error(26) < 1e-4
    assert "hook of another extension" in twins.captured.reason


def test_torchs_settings_for_each_library(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its older ones raise then; the picture comes all the same."""
    twins = Twins(session)

    def raises() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", raises)
    assert max(twins.error(seed) for seed in (31, 32)) < 1e-4


def double_the_keys(unet: Any) -> None:
    block(unet).attn1.to_k.weight.mul_(2)


@pytest.mark.parametrize("change", [double_the_keys, wrap])
def test_projections_that_change_after_they_were_to_be_fused(
    session: Session, change: Callable[[Any], None]
) -> None:
    Twins(session, fuse_qkv_projections=True).assert_right_after(change)


def transpose_a_weight(unet: Any) -> None:
    """The same numbers at the same address, read in another order."""
    weight = block(unet).attn1.to_v.weight
    assert weight.shape[0] == weight.shape[1]
    weight.data = weight.data.t()


def transpose_a_weight_of_no_block(unet: Any) -> None:
    weight = unet.time_embedding.linear_2.weight
    weight.data = weight.data.t()


def stride_a_factor_otherwise(unet: Any) -> None:
    weight = block(unet).attn1.to_q.lora_A["style"].weight
    rows, columns = weight.shape
    weight.data = weight.data.view(columns, rows).t()


def transpose_the_weight_under_a_lora(unet: Any) -> None:
    weight = block(unet).attn1.to_q.base_layer.weight
    weight.data = weight.data.t()


@pytest.mark.parametrize("change", [transpose_a_weight, transpose_a_weight_of_no_block])
def test_a_weight_in_another_order_at_its_address(
    session: Session, change: Callable[[Any], None]
) -> None:
    Twins(session).assert_right_after(change)


@pytest.mark.parametrize(
    "change",
    [stride_a_factor_otherwise, transpose_the_weight_under_a_lora],
)
def test_a_lora_in_another_order_at_its_address(
    session: Session, change: Callable[[Any], None]
) -> None:
    Twins(session, wrap).assert_right_after(change)


class HalfLinear(nn.Linear):
    """Of another package, and it counts its calls."""

    calls = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(input) * (1 + self.calls % 5)


def a_foreign_layer_under_a_lora(unet: Any) -> None:
    layer = block(unet).attn1.to_q
    layer.base_layer.__class__ = HalfLinear


def test_a_foreign_layer_under_a_lora_runs_at_each_call(session: Session) -> None:
    Twins(session, wrap).assert_right_after(a_foreign_layer_under_a_lora)


def test_a_function_among_the_attributes_may_change_its_closure(session: Session) -> None:
    factors = [1.0]

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x) * factors[0]

    def change(unet: Any) -> None:
        del unet.mid_block.resnets[0].nonlinearity
        unet.mid_block.resnets[0].nonlinearity = scaled

    twins = Twins(session)
    twins.assert_right_after(change)
    factors[0] = 2.0
    assert max(twins.error(seed) for seed in range(20, 23)) < 1e-4


class Scaled:
    """Another extension's, in three forms: an object to call, a method, a partial function."""

    def __init__(self) -> None:
        self.activation = nn.functional.silu

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(x) * SCALES[-1]


SCALES = [1.0]


def scaled_by(x: torch.Tensor, power: int) -> torch.Tensor:
    return nn.functional.silu(x) * SCALES[-1] ** power


@pytest.mark.parametrize(
    "make", [Scaled, lambda: Scaled().__call__, lambda: functools.partial(scaled_by, power=2)]
)
def test_what_is_called_among_the_attributes_may_keep_state(
    session: Session, monkeypatch: pytest.MonkeyPatch, make: Callable[[], object]
) -> None:
    def change(unet: Any) -> None:
        del unet.mid_block.resnets[0].nonlinearity
        unet.mid_block.resnets[0].nonlinearity = make()

    twins = Twins(session)
    twins.assert_right_after(change)
    monkeypatch.setattr(sys.modules[__name__], "SCALES", [2.0])
    assert max(twins.error(seed) for seed in range(20, 23)) < 1e-4


def test_a_partial_function_of_torch_is_more_than_its_name(session: Session) -> None:
    def change(unet: Any, slope: float) -> None:
        del unet.mid_block.resnets[0].nonlinearity
        leaky = functools.partial(nn.functional.leaky_relu, negative_slope=slope)
        unet.mid_block.resnets[0].nonlinearity = leaky

    twins = Twins(session, lambda unet: change(unet, 0.1))
    twins.assert_right_after(lambda unet: change(unet, 0.9))


class Slotted:
    """A number, as an extension may keep it."""

    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value

    def __rtruediv__(self, other: Any) -> Any:
        return other / self.value


@pytest.mark.parametrize("kind", [np.float32, Slotted])
def test_attributes_that_are_numbers_of_other_packages(
    session: Session, kind: Callable[[float], Any]
) -> None:
    def set_to(value: float) -> Callable[[Any], None]:
        return lambda unet: setattr(unet.mid_block.resnets[0], "output_scale_factor", kind(value))

    twins = Twins(session)
    for value in (1.5, 0.75, 2.5):
        twins.assert_right_after(set_to(value))


def test_a_number_that_is_written_in_place(session: Session) -> None:
    def write(unet: Any) -> None:
        unet.mid_block.resnets[0].output_scale_factor.value = 0.6

    twins = Twins(session)
    twins.assert_right_after(
        lambda unet: setattr(unet.mid_block.resnets[0], "output_scale_factor", Slotted(1.5))
    )
    twins.assert_right_after(write)


def test_what_a_module_calls_in_place_of_its_forward(session: Session) -> None:
    """`Module.compile` puts torch's own there."""
    factors = [1.5]

    def change(unet: Any) -> None:
        layer = unet.mid_block.resnets[0].conv1
        own = layer._call_impl
        layer._compiled_call_impl = lambda *args: own(*args) * factors[0]

    twins = Twins(session)
    twins.assert_right_after(change)
    factors[0] = 0.4
    assert max(twins.error(seed) for seed in range(20, 23)) < 1e-4


def _of_the_same_block(unet: Any) -> tuple[nn.Module, nn.Module]:
    return unet.mid_block.resnets[0], unet.mid_block.resnets[0]


def _around_a_block(unet: Any) -> tuple[nn.Module, nn.Module]:
    return unet.mid_block, unet.mid_block


def _before_and_behind_blocks(unet: Any) -> tuple[nn.Module, nn.Module]:
    return unet.down_blocks[1].resnets[0], unet.mid_block.resnets[0]


def _inside_of_blocks(unet: Any) -> tuple[nn.Module, nn.Module]:
    return block(unet).attn1.to_v, unet.up_blocks[0].resnets[0].conv2


def _of_layers_outside_of_blocks(unet: Any) -> tuple[nn.Module, nn.Module]:
    return unet.time_embedding, unet.conv_norm_out


@pytest.mark.parametrize(
    "hooked",
    [
        _of_the_same_block,
        _around_a_block,
        _before_and_behind_blocks,
        _inside_of_blocks,
        _of_layers_outside_of_blocks,
    ],
)
def test_hooks_that_patch_a_class_for_a_part_of_each_forward(
    session: Session, hooked: Callable[[Any], tuple[nn.Module, nn.Module]]
) -> None:
    own = nn.SiLU.forward

    def patch(*_: object) -> None:
        nn.SiLU.forward = lambda self, x: own(self, x) * 2.0  # type: ignore[method-assign]

    def put_back(*_: object) -> None:
        nn.SiLU.forward = own  # type: ignore[method-assign]

    def change(unet: Any) -> None:
        first, last = hooked(unet)
        first.register_forward_pre_hook(patch)
        last.register_forward_hook(put_back, always_call=True)

    Twins(session).assert_right_after(change)


def test_forwards_that_patch_a_class_for_a_part_of_each_forward(session: Session) -> None:
    own = nn.SiLU.forward

    def change(unet: Any) -> None:
        first, last = unet.down_blocks[1], unet.mid_block
        before, behind = first.forward, last.forward

        def patch(*args: Any, **kwargs: Any) -> Any:
            nn.SiLU.forward = lambda self, x: own(self, x) * 2.0  # type: ignore[method-assign]
            return before(*args, **kwargs)

        def put_back(*args: Any, **kwargs: Any) -> Any:
            nn.SiLU.forward = own  # type: ignore[method-assign]
            return behind(*args, **kwargs)

        first.forward, last.forward = patch, put_back

    Twins(session).assert_right_after(change)


@pytest.mark.parametrize("where", ["in a block", "in none"])
def test_a_plain_tensor_in_the_place_of_a_parameter(session: Session, where: str) -> None:
    def layer(unet: Any) -> Any:
        return block(unet).attn1.to_v if where == "in a block" else unet.conv_in

    def replace(unet: Any) -> None:
        weight = layer(unet).weight.detach() * 2
        del layer(unet).weight
        layer(unet).weight = weight

    def move(unet: Any) -> None:
        layer(unet).weight.data = layer(unet).weight.data * 3

    twins = Twins(session)
    twins.assert_right_after(replace)
    twins.assert_right_after(move)


# As of a pipeline within diffusers: its functions know only that module.
_PIPELINE = """
from diffusers.models.attention_processor import AttnProcessor2_0

class Counting:
    def __init__(self):
        self.plain, self.calls = AttnProcessor2_0(), 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.plain(*args, **kwargs) * (1 + self.calls % 5)
"""


def test_a_processor_of_a_pipeline_keeps_state(session: Session) -> None:
    pipeline: dict[str, Any] = {"__name__": "diffusers.pipelines.counting"}
    exec(_PIPELINE, pipeline)
    processors = []

    def change(unet: Any) -> None:
        processors.append(pipeline["Counting"]())
        block(unet).attn1.set_processor(processors[-1])

    Twins(session).assert_right_after(change)
    assert processors[0].calls == processors[1].calls


def test_attributes_behind_a_configs_dictionary(session: Session) -> None:
    def change(unet: Any) -> None:
        assert not unet.config.center_input_sample
        object.__setattr__(unet.config, "center_input_sample", True)

    Twins(session).assert_right_after(change)


def test_what_others_keep_on_a_block_is_not_copied(session: Session) -> None:
    """Step caches of diffusers keep on a block what leads to the whole model."""

    def prepare(unet: Any) -> None:
        block(unet)._notes = [sys]
        block(unet).attn1.to_q._notes = {"unet": unet, "module": sys}

    twins = Twins(session, prepare)
    assert all(kind.state is KindState.READY for kind in session.kinds)
    assert max(twins.error(seed) for seed in range(10, 13)) < 1e-5
