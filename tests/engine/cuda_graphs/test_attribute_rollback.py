"""What a recording or a failed attempt leaves in the model's attributes is undone."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.utils import hotswap
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from onediff_ext.engine.cuda_graphs.attribute_rollback import (
    AttributeRollback,
    ScaleRollback,
    scales_of_call,
)
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.cuda_graphs.memory_reads import MemoryReads
from onediff_ext.engine.cuda_graphs.oom_fallback import OomFallback, Retry
from onediff_ext.hosts.diffusers.lora.peft_layers import PeftLoraRule
from tests.support.cuda_graph_steps import captured, eager, step
from tests.support.frozen_recorder import FrozenRecorder
from tests.support.ldm_stand_in import live_in
from tests.support.models import sd15, unet_inputs


class Layer(nn.Module):
    """One of a host's own classes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.scaling = {"a": 2.0, "b": torch.tensor(3.0)}
        self.names: list[Any] = ["x", "y"]
        self.counted = 1
        self.table = torch.ones(2)
        self.processor = SimpleNamespace(kept=None, maps=[])


@pytest.fixture
def module() -> Any:
    return Layer()


def a_new_scale(module: Any) -> str:
    module.scaling["b"] = module.scaling["b"] / 0.3
    return "scaling"


def a_new_table(module: Any) -> str:
    module.table = module.table + 1
    return "table"


def a_pair(module: Any) -> str:
    module.pair = (torch.zeros(1), torch.ones(1))
    return "pair"


def pairs_in_a_list(module: Any) -> str:
    module.names.append((torch.zeros(1), torch.ones(1)))
    return "names"


def a_parameter(module: Any) -> str:
    module.weight = nn.Parameter(torch.zeros(2, 2))
    return "weight"


def a_first_buffer(module: Any) -> str:
    module.register_buffer("first", torch.zeros(2))
    return "first"


def a_map(module: Any) -> str:
    module.processor.maps.append(torch.zeros(2))
    return "maps"


def a_cache(module: Any) -> str:
    module.processor.cache = {"1": torch.zeros(2)}
    return "cache"


LEFT = [
    *(a_new_scale, a_new_table, a_pair, pairs_in_a_list, a_parameter, a_first_buffer),
    *(a_map, a_cache),
]


@pytest.mark.parametrize("leave", LEFT)
def test_new_tensors_are_named_and_taken_out(module: Any, leave: Any) -> None:
    tensors = {id(module.scaling["b"]), id(module.table), id(module.weight)}
    before = AttributeRollback(module, ())
    module.counted += 1
    module.scaling["a"] = 7.0
    name = leave(module)
    assert before.restore_tensors(lambda _: True) == name
    assert before.restore_tensors(lambda _: True) == ""
    assert {id(module.scaling["b"]), id(module.table), id(module.weight)} == tensors
    assert module.names == ["x", "y"]
    assert not hasattr(module, "pair")
    assert not hasattr(module, "first")
    assert module.processor == SimpleNamespace(kept=None, maps=[])
    assert (module.counted, module.scaling["a"]) == (2, 7.0)


@pytest.mark.parametrize("leave", LEFT)
def test_what_others_have_made_stays(module: Any, leave: Any) -> None:
    """Another thread may put a weight or a LoRA into the model meanwhile."""
    before = AttributeRollback(module, ())
    leave(module)
    now = dict(vars(module)), dict(module.scaling), dict(module._parameters), list(module.names)
    assert before.restore_tensors(lambda _: False) == ""
    assert now == (vars(module), module.scaling, module._parameters, module.names)


def test_what_is_written_in_place_or_moved_around_is_no_new_tensor(module: Any) -> None:
    before = AttributeRollback(module, ())
    module.table.add_(1)
    module.scaling["b"].mul_(2)
    module.names.reverse()
    assert before.restore_tensors(lambda _: True) == ""
    assert module.names == ["y", "x"]


def test_a_recording_knows_what_it_has_made() -> None:
    reads, old = MemoryReads(torch.device("cpu")), torch.ones(3)
    with reads:
        new = old + 1
        view = old[1:]
        for _ in range(100):  # freed at once
            old * 2
    assert reads.has_made(new)
    assert not reads.has_made(view)
    assert not any(reads.has_made(each) for each in [torch.ones(3) for _ in range(100)])


@pytest.fixture
def unet() -> Any:
    unet: Any = sd15(seed=3).unet
    unet.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q"]), "x")
    return unet


def scales_of(unet: Any) -> set[float]:
    return {float(m.scaling["x"]) for m in unet.modules() if hasattr(m, "scaling")}


@pytest.mark.parametrize("are_tensors", [False, True])
@pytest.mark.parametrize("divides", [False, True])
@torch.no_grad()
def test_scales_are_as_before(unet: Any, are_tensors: bool, divides: bool) -> None:
    if are_tensors:
        hotswap.prepare_model_for_compiled_hotswap(unet)
    before = ScaleRollback([PeftLoraRule()], unet.modules())
    for _ in range(2):
        for module in unet.modules():
            if hasattr(module, "scaling"):
                module.scale_layer(0.5)
                if divides:
                    module.unscale_layer(0.5)
        assert scales_of(unet) == {1.0 if divides else 0.5}
        before.restore()
        assert scales_of(unet) == {1.0}


class Scaling(nn.Module):
    """Changes the scale of a LoRA for the time of its call, as diffusers 0.36 does it."""

    def __init__(self, layer: nn.Module, adapted: Any) -> None:
        super().__init__()
        self.layer = layer
        self.scaled = [adapted]  # no child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scaled[0].scale_layer(0.5)
        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("not while it is recorded")
        self.scaled[0].unscale_layer(0.5)
        scaled: torch.Tensor = self.layer(x)
        return scaled


@torch.no_grad()
def test_a_recording_that_fails_leaves_scales_as_they_were(
    pipe: Any, recorder: FrozenRecorder
) -> None:
    live_in(Scaling, "diffusers.made_for_a_test")
    config = LoraConfig(r=2, lora_alpha=2, target_modules=["to_q"], init_lora_weights=False)
    pipe.unet.add_adapter(config, "x")
    adapted = next(m for m in pipe.unet.modules() if hasattr(m, "scaling"))
    pipe.unet.conv_norm_out = Scaling(pipe.unet.conv_norm_out, adapted)
    for seed in range(4):
        scale = {"cross_attention_kwargs": {"scale": 1.0}}
        found = pipe.unet(**unet_inputs(pipe.unet, seed=seed), **scale).sample
        assert scales_of(pipe.unet) == {1.0}
        assert found.isfinite().all()
    assert recorder.recorded == 0
    assert "not while it is recorded" in captured(pipe).reason


class Keeping(nn.Module):
    """Keeps what it computed last, and adds it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.kept = layer, torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x) + self.kept
        self.kept = x.mean()
        return x


def test_a_forward_that_leaves_a_tensor_is_not_recorded(
    pipe: Any, recorder: FrozenRecorder
) -> None:
    live_in(Keeping, "diffusers.made_for_a_test")
    keeping = pipe.unet.conv_norm_out = Keeping(pipe.unet.conv_norm_out)
    kept = torch.zeros(())
    for seed in range(5):
        found, after = step(pipe, seed), keeping.kept
        keeping.kept = kept
        torch.testing.assert_close(found, eager(pipe, seed), rtol=1e-4, atol=1e-5)
        kept = after
        torch.testing.assert_close(keeping.kept, kept, rtol=1e-4, atol=1e-5)
        keeping.kept = kept
    assert "puts new tensors into the model (kept)" in captured(pipe).reason


@pytest.mark.parametrize("are_tensors", [False, True])
@pytest.mark.parametrize("divides", [False, True])  # diffusers divides since 0.37
@torch.no_grad()
def test_a_second_try_has_the_scale_of_one_call(
    unet: Any, are_tensors: bool, divides: bool
) -> None:
    if are_tensors:
        hotswap.prepare_model_for_compiled_hotswap(unet)
    layers = [module for module in unet.modules() if hasattr(module, "scaling")]
    seen = []

    def forward(sample: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        scale = kwargs["cross_attention_kwargs"]["scale"]
        for layer in layers:
            layer.scale_layer(scale)
        seen.append(float(layers[0].scaling["x"]))
        is_last = len(seen) >= 3
        if divides or is_last:
            for layer in layers:
                layer.unscale_layer(scale)
        if not is_last:
            raise torch.OutOfMemoryError
        return sample

    fallback = OomFallback(
        forward,
        CudaGraphCache(FrozenRecorder(), limit=1),
        lambda args, kwargs: Retry.IN_HALVES,
        scales=partial(scales_of_call, unet, [PeftLoraRule()]),
    )
    fallback(torch.zeros(2, 4, 8, 8), cross_attention_kwargs={"scale": 0.5})
    assert seen == [0.5] * 4
    assert scales_of(unet) == {1.0}


def test_only_calls_with_a_scale_cost_anything(unet: Any) -> None:
    rules = [PeftLoraRule()]
    without = {"cross_attention_kwargs": None, "added_cond_kwargs": {"time_ids": torch.zeros(6)}}
    assert scales_of_call(unet, rules, (), {"cross_attention_kwargs": {"scale": 0.5}})._scales
    assert scales_of_call(unet, rules, (0, None, {"scale": 1}), {})._scales
    assert not scales_of_call(unet, rules, (), without)._scales
    assert not scales_of_call(unet, [], (), {"cross_attention_kwargs": {"scale": 0.5}})._scales
