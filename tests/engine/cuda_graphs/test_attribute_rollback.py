"""What a recording or a failed attempt leaves in the model's attributes is undone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from onediff_ext.engine.cuda_graphs.attribute_rollback import AttributeRollback, scaled_wrappers
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.cuda_graphs.oom_fallback import OomFallback, Retry
from onediff_ext.hosts.diffusers.lora.peft_layers import PeftLoraRule
from onediff_ext.session.session import Session
from tests.support.cuda_graph_steps import captured, eager, step
from tests.support.frozen_recorder import FrozenRecorder
from tests.support.ldm_stand_in import live_in
from tests.support.models import sd15


@pytest.fixture
def module() -> Any:
    module: Any = nn.Linear(2, 2)
    module.scaling = {"a": 2.0, "b": torch.tensor(3.0)}
    module.names = ["x", "y"]
    module.counted = 1
    module.table = torch.ones(2)
    module.processor = SimpleNamespace(kept=None, maps=[])
    return module


def test_all_is_put_back(module: Any) -> None:
    weight, scaling, table = module.weight, dict(module.scaling), module.table
    before = AttributeRollback([module])
    module.weight = nn.Parameter(torch.zeros(2, 2))
    module.scaling["a"] *= 0.3
    module.scaling["b"] = module.scaling["b"] / 0.3
    module.scaling["c"] = 1.0
    module.names.append("z")
    module.counted += 1
    module.table = torch.zeros(2)
    module.another = 5
    module.processor.kept = torch.zeros(2)
    module.processor.maps.append(torch.zeros(2))
    before.restore()
    assert module.weight is weight
    assert module.scaling == scaling
    assert module.scaling["b"] is scaling["b"]
    assert (module.names, module.counted) == (["x", "y"], 1)
    assert module.table is table
    assert not hasattr(module, "another")
    assert module.processor == SimpleNamespace(kept=None, maps=[])


def a_new_scale(module: Any) -> str:
    module.scaling["b"] = module.scaling["b"] / 0.3
    return "scaling"


def a_new_table(module: Any) -> str:
    module.table = module.table + 1
    return "table"


def a_pair(module: Any) -> str:
    module.pair = (torch.zeros(1), torch.ones(1))
    return "pair"


def a_parameter(module: Any) -> str:
    module.weight = nn.Parameter(torch.zeros(2, 2))
    return "weight"


def a_map(module: Any) -> str:
    module.processor.maps.append(torch.zeros(2))
    return "maps"


def a_cache(module: Any) -> str:
    module.processor.cache = {"1": torch.zeros(2)}
    return "cache"


@pytest.mark.parametrize("leave", [a_new_scale, a_new_table, a_pair, a_parameter, a_map, a_cache])
def test_new_tensors_are_named_and_taken_out(module: Any, leave: Any) -> None:
    tensors = {id(module.scaling["b"]), id(module.table), id(module.weight)}
    before = AttributeRollback([module])
    module.counted += 1
    module.scaling["a"] = 7.0
    name = leave(module)
    assert before.restore_tensors() == name
    assert before.restore_tensors() == ""
    assert {id(module.scaling["b"]), id(module.table), id(module.weight)} == tensors
    assert not hasattr(module, "pair")
    assert module.processor == SimpleNamespace(kept=None, maps=[])
    assert (module.counted, module.scaling["a"]) == (2, 7.0)


def test_what_is_written_in_place_or_moved_around_is_no_new_tensor(module: Any) -> None:
    before = AttributeRollback([module])
    module.table.add_(1)
    module.scaling["b"].mul_(2)
    module.names.reverse()
    assert before.restore_tensors() == ""
    assert module.names == ["y", "x"]


class Scaled(nn.Module):
    """Scales by a number that it changes for the time of its call, as diffusers 0.35 does it."""

    def __init__(self, layer: nn.Module, fails: bool) -> None:
        super().__init__()
        self.layer, self.fails, self.scaling = layer, fails, {"a": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scaling["a"] *= 0.5
        if self.fails and _get_current_dispatch_mode() is not None:
            raise RuntimeError("not while it is recorded")
        x = self.layer(x) * self.scaling["a"]
        self.scaling["a"] /= 0.5
        return x


def test_a_recording_that_fails_leaves_the_model_as_it_was(
    pipe: Any, recorder: FrozenRecorder
) -> None:
    live_in(Scaled, "diffusers.made_for_a_test")
    scaled = pipe.unet.conv_norm_out = Scaled(pipe.unet.conv_norm_out, fails=True)
    for seed in range(5):
        found = step(pipe, seed)
        assert scaled.scaling == {"a": 1.0}
        torch.testing.assert_close(found, eager(pipe, seed), rtol=1e-4, atol=1e-5)
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


@torch.no_grad()
def test_a_second_try_has_the_scale_of_one_call(session: Session) -> None:
    from peft import LoraConfig

    unet = sd15(seed=3).unet
    unet.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q"]), "x")
    layers = scaled_wrappers(unet, [PeftLoraRule()], (), {"cross_attention_kwargs": {"scale": 0.5}})
    assert layers
    assert all(hasattr(layer, "scaling") for layer in layers)
    assert layers == scaled_wrappers(unet, [PeftLoraRule()], (0, None, {"scale": 1}), {})
    without = {"cross_attention_kwargs": None, "added_cond_kwargs": {"time_ids": torch.zeros(6)}}
    assert not scaled_wrappers(unet, [PeftLoraRule()], (), without)
    assert not scaled_wrappers(unet, [], (), {"cross_attention_kwargs": {"scale": 0.5}})
    seen = []

    def forward(sample: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for layer in layers:
            layer.scale_layer(kwargs["cross_attention_kwargs"]["scale"])
        seen.append(layers[0].scaling["x"])
        if len(seen) < 3:
            raise torch.OutOfMemoryError
        for layer in layers:
            layer.unscale_layer(kwargs["cross_attention_kwargs"]["scale"])
        return sample

    cache = CudaGraphCache(FrozenRecorder(), limit=1)
    fallback = OomFallback(
        forward,
        cache,
        lambda args, kwargs: Retry.IN_HALVES,
        wrappers=lambda args, kwargs: scaled_wrappers(unet, [PeftLoraRule()], args, kwargs),
    )
    fallback(torch.zeros(2, 4, 8, 8), cross_attention_kwargs={"scale": 0.5})
    assert seen == [0.5] * 4
    assert layers[0].scaling["x"] == 1.0
