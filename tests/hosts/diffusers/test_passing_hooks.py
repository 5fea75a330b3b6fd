"""Hooks that come after `compile_pipe` and go, before or after `undo_compile`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import (
    ModelHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from diffusers.hooks import HookRegistry
from diffusers.hooks import ModelHook as DiffusersHook
from torch import nn

from onediff_ext.engine.patches import Patches
from onediff_ext.engine.validity.foreign_code import is_ours
from onediff_ext.hosts.diffusers.compile import compile_pipe, undo_compile
from onediff_ext.hosts.diffusers.deepcache import disable_deepcache, enable_deepcache
from onediff_ext.session.session import Session
from tests.support import models
from tests.support.draw import draw_latents
from tests.support.transformer_draws import draw
from tests.support.transformer_models import MODELS


class Hook(NamedTuple):
    """How a hook is put on a module, and taken off."""

    add: Callable[[Any], object]
    remove: Callable[[Any], object]


_wrapped: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def wrap(module: Any) -> None:
    _wrapped[module] = own = module.forward
    module.forward = lambda *args, **kwargs: own(*args, **kwargs)


def unwrap(module: Any) -> None:
    module.forward = _wrapped.pop(module)


HOOKS = {
    "accelerate": Hook(lambda m: add_hook_to_module(m, ModelHook()), remove_hook_from_module),
    "diffusers": Hook(
        lambda m: HookRegistry.check_if_exists_or_initialize(m).register_hook(DiffusersHook(), "a"),
        lambda m: m._diffusers_hook.remove_hook("a", recurse=False),
    ),
    "by hand": Hook(wrap, unwrap),
}


def of_ours(model: nn.Module) -> Iterator[tuple[str, str]]:
    """What is left of this package in a model, also where a hook keeps it."""
    for name, module in model.named_modules():
        registry = vars(module).get("_diffusers_hook")
        kept = [vars(each) for each in registry._fn_refs] if registry is not None else []
        for attributes in (vars(module), *kept):
            yield from ((name, key) for key, value in attributes.items() if is_ours(value))


@pytest.mark.parametrize("name", ["sd15", "z_image"])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    "order",
    [
        "add remove undo",
        "add draw remove undo",
        "add draw remove draw undo",
        "add draw undo remove",
    ],
)
def test_nothing_is_left(
    name: str, hook: str, order: str, make_session: Callable[..., Session]
) -> None:
    if hook == "by hand" and order.endswith("remove"):
        pytest.skip("nobody can see what a function of another extension keeps")

    def picture() -> torch.Tensor:
        if name == "sd15":
            return draw_latents(pipe)
        return draw(pipe, name, (64, 96, 40, 1), num_inference_steps=4)

    pipe = models.sd15() if name == "sd15" else MODELS[name].make()
    model = pipe.unet if name == "sd15" else pipe.transformer
    expected = picture()
    compile_pipe(pipe, session=make_session(), ignores=("vae",))
    for _ in range(2):  # the second has all stand-ins
        picture()
    assert list(of_ours(model))
    modules = list(model.modules())
    for step in order.split():
        if step == "draw":
            for _ in range(2):
                torch.testing.assert_close(picture(), expected, rtol=1e-3, atol=1e-4)
        elif step == "undo":
            undo_compile(pipe)
            assert torch.equal(picture(), expected)
        else:
            for module in modules:
                getattr(HOOKS[hook], step)(module)
    assert list(of_ours(model)) == []
    assert torch.equal(picture(), expected)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("last", ["undo", "remove"])
def test_a_hook_was_there_before(
    hook: str, last: str, make_session: Callable[..., Session]
) -> None:
    """accelerate leaves the method of the class as the module's own attribute."""
    if hook == "by hand" and last == "remove":
        pytest.skip("nobody can see what a function of another extension keeps")
    pipe = models.sd15()
    expected = draw_latents(pipe)
    modules = list(pipe.unet.modules())
    for step in ("add", "remove"):
        for module in modules:
            getattr(HOOKS[hook], step)(module)
    compile_pipe(pipe, session=make_session(), ignores=("vae",))
    for _ in range(2):
        draw_latents(pipe)
    for step in ("add", "remove", "undo") if last == "undo" else ("add", "undo", "remove"):
        if step == "undo":
            undo_compile(pipe)
            assert torch.equal(draw_latents(pipe), expected)
        else:
            for module in modules:
                getattr(HOOKS[hook], step)(module)
    assert list(of_ours(pipe.unet)) == []
    assert torch.equal(draw_latents(pipe), expected)


def test_what_is_covered_is_kept_for_a_later_undo() -> None:
    layer, patches = nn.Linear(1, 1), Patches()

    def ours(x: torch.Tensor) -> torch.Tensor:
        return x

    patches.set(layer, "forward", ours)
    wrap(layer)
    assert patches.undo(keeps_covered=True) == ["Linear.forward"]
    assert len(patches) == 1
    unwrap(layer)
    assert layer.forward is ours
    assert patches.undo() == []
    assert "forward" not in vars(layer)
    assert "__reduce_ex__" not in vars(layer)


@pytest.mark.parametrize("first", [0, 1])
def test_two_compilations_with_a_hook_between_them(first: int) -> None:
    """Each may go first; the hook then calls the layer's own forward."""
    layer, both = nn.Linear(1, 1), (Patches(), Patches())
    own = layer.forward
    both[0].set(layer, "forward", lambda x: own(x))
    add_hook_to_module(layer, ModelHook())
    both[1].set(layer, "_old_forward", lambda x: own(x))
    assert both[first].undo() == []
    assert both[1 - first].undo() == []
    assert vars(layer)["_old_forward"].__func__ is nn.Linear.forward
    remove_hook_from_module(layer)
    assert "__reduce_ex__" not in vars(layer)


@pytest.mark.parametrize("last", ["undo", "unhook"])
def test_sequential_offloading(last: str, make_session: Callable[..., Session]) -> None:
    """`enable_sequential_cpu_offload`, which hooks each layer; here the GPU is the CPU."""
    pipe = models.sd15()
    expected = draw_latents(pipe)
    compile_pipe(pipe, session=make_session(channels_last=False), ignores=("vae",))
    for _ in range(2):
        draw_latents(pipe)
    cpu_offload(pipe.unet, torch.device("cpu"))
    draw_latents(pipe)
    if last == "undo":
        remove_hook_from_submodules(pipe.unet)
        undo_compile(pipe)
    else:
        undo_compile(pipe)
        remove_hook_from_submodules(pipe.unet)
    assert list(of_ours(pipe.unet)) == []
    torch.testing.assert_close(draw_latents(pipe), expected)


@pytest.mark.parametrize("hook", ["accelerate", "diffusers"])
@pytest.mark.parametrize("last", ["disable", "unhook"])
def test_deepcache(hook: str, last: str) -> None:
    pipe = enable_deepcache(models.sd15(), 3)
    HOOKS[hook].add(pipe.unet)
    draw_latents(pipe, steps=10)
    if last == "disable":
        HOOKS[hook].remove(pipe.unet)
        disable_deepcache(pipe)
    else:
        disable_deepcache(pipe)
        HOOKS[hook].remove(pipe.unet)
    assert list(of_ours(pipe.unet)) == []
