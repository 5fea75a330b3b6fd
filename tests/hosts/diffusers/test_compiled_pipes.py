"""Compiled pipelines that are copied, saved, shared, deleted, or get other models."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers import StableDiffusionImg2ImgPipeline
from torch.multiprocessing.reductions import StorageWeakRef

from onediff_ext.core.errors import OptionError
from onediff_ext.hosts.diffusers.compile import (
    compile_pipe,
    compiled,
    compiled_state,
    one_picture,
    undo_compile,
)
from onediff_ext.hosts.diffusers.deepcache import disable_deepcache, enable_deepcache
from tests.support import models
from tests.support.draw import draw_latents, relative_error

PARTS = ("unet", "vae", "text_encoder")


def everything(*pipes):
    """Attributes by identity, hooks, and weights by layout; of pipes and their models."""
    seen = {}
    for number, pipe in enumerate(pipes):
        seen[number] = {name: id(value) for name, value in vars(pipe).items()}
        for part in PARTS:
            for name, module in getattr(pipe, part).named_modules():
                attributes = {k: id(v) for k, v in vars(module).items()}
                hooks = [*module._forward_hooks, *module._forward_pre_hooks]
                strides = [p.stride() for p in module._parameters.values() if p is not None]
                seen[number, part, name] = attributes, hooks, strides
    return seen


def ours(model):
    """Attributes of a model's modules that are ours."""
    return [
        (name, key)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value).__module__.startswith("onediff_ext.") or key in ("forward", "__reduce_ex__")
    ]


@pytest.fixture
def pipe(make_session):
    """A compiled pipe and its eager output, as attributes."""
    pipe = models.sd15()
    expected = draw_latents(pipe)
    compile_pipe(pipe, session=make_session())
    draw_latents(pipe)
    assert relative_error(draw_latents(pipe), expected) < 1e-4
    pipe.test_expected = expected
    return pipe


@pytest.mark.parametrize("wrong", [{"ignores": ("uent",)}, {"options": {"precison": "fp8"}}])
def test_refused_arguments_leave_a_compiled_pipe_as_it_is(pipe, wrong):
    before = compiled_state(pipe)
    with pytest.raises(OptionError, match="Unknown"):
        compile_pipe(pipe, **wrong)
    assert compiled_state(pipe) is before
    assert relative_error(draw_latents(pipe), pipe.test_expected) < 1e-4


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


def through_torch(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", [copy.deepcopy, through_pickle, through_torch])
@pytest.mark.parametrize("deepcache", [False, True])
def test_a_copied_model_is_plain(pipe, how, deepcache):
    if deepcache:
        enable_deepcache(pipe)
    handle = pipe.unet.register_forward_pre_hook(_not_ours)
    copied = how(pipe.unet)
    assert ours(copied) == []
    assert list(copied._forward_pre_hooks.values()) == [_not_ours]
    handle.remove()
    assert ours(pipe.unet)  # which is compiled still
    inputs = models.unet_inputs(pipe.unet)
    disable_deepcache(undo_compile(pipe))
    with torch.no_grad():
        # Its convolutions kept their memory order, which changes the last digits.
        assert relative_error(copied(**inputs).sample, pipe.unet(**inputs).sample) < 1e-5
    for name, module in pipe.unet.named_modules():
        assert vars(copied.get_submodule(name)).keys() == vars(module).keys()


def _not_ours(module, args):
    return None


def test_a_copied_model_needs_nothing_of_ours(pipe):
    assert b"onediff" not in pickle.dumps(pipe.unet)


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy])
def test_a_copied_pipe_is_not_compiled(pipe, how):
    copied = how(pipe)
    assert compiled_state(copied) is None
    assert not {"_onediff", "fuse_lora", "check_inputs", "__reduce_ex__"} & vars(copied).keys()
    undo_compile(copied)
    assert compiled_state(pipe) is not None
    if how is copy.deepcopy:
        assert ours(copied.unet) == ours(copied.vae) == []
        assert relative_error(draw_latents(copied), pipe.test_expected) < 1e-4
    before = compiled_state(pipe).session.status().blocks_compiled
    draw_latents(pipe)
    assert compiled_state(pipe).session.status().blocks_compiled == before > 0


@pytest.mark.parametrize("same_session", [True, False])
@pytest.mark.parametrize("first_out", [0, 1])
def test_pipes_that_share_models(make_session, same_session, first_out):
    text = models.sd15()
    image = StableDiffusionImg2ImgPipeline(**text.components, requires_safety_checker=False)
    image.set_progress_bar_config(disable=True)
    pipes = [text, image]
    expected = [draw_latents(pipe) for pipe in pipes]
    before = everything(*pipes)
    sessions = [make_session(), make_session()]
    if same_session:
        sessions[1] = sessions[0]
    for pipe, session in zip(pipes, sessions, strict=True):
        compile_pipe(pipe, session=session)
        draw_latents(pipe)

    def draw_both():
        for pipe, latents in zip(pipes, expected, strict=True):
            assert relative_error(draw_latents(pipe), latents) < 1e-4

    draw_both()
    undo_compile(pipes[first_out])
    left = pipes[1 - first_out]
    session = compiled_state(left).session
    draw_latents(left)
    draw_both()
    status = session.status()
    assert (status.running, status.reasons) == ("compiled", ()), status
    assert status.blocks_compiled == status.blocks_needed == 19
    undo_compile(left)
    assert everything(*pipes) == before
    draw_both()


def test_compiling_again_what_another_pipe_shares(make_session):
    text = models.sd15()
    image = StableDiffusionImg2ImgPipeline(**text.components, requires_safety_checker=False)
    before = everything(text, image)
    for pipe in (text, image, text, image, image, text):
        compile_pipe(pipe, session=make_session())
    for pipe in (image, text):
        undo_compile(pipe)
    assert everything(text, image) == before


def test_a_pipe_that_is_deleted_without_undo(make_session):
    session, text = make_session(), models.sd15()
    compile_pipe(text, session=session)
    draw_latents(text)
    watcher = weakref.ref(text.unet)
    del text
    gc.collect()
    assert watcher() is None


@pytest.mark.parametrize("host_says", [False, True])
def test_a_replaced_unet_is_compiled_with_the_next_picture(pipe, host_says):
    session, old = compiled_state(pipe).session, pipe.unet
    other = models.sd15(seed=5)
    expected = draw_latents(other)  # the texts are the same
    pipe.text_encoder = other.text_encoder
    before = {name: set(vars(module)) for name, module in other.unet.named_modules()}
    pipe.unet = other.unet
    if host_says:
        for _ in range(2):
            with one_picture(pipe):
                found = draw_latents(pipe)
    else:
        draw_latents(pipe)
        found = draw_latents(pipe)
    assert relative_error(found, expected) < 1e-4
    assert ours(old) == []
    status = session.status()
    assert (status.running, status.reasons) == ("compiled", ()), status
    runners = next(c for c in compiled_state(pipe).components if c.name == "unet").runners
    assert {runner.eager_reason for runner in runners} == {None}
    undo_compile(pipe)
    after = {name: set(vars(module)) for name, module in other.unet.named_modules()}
    assert after == before


def test_nothing_of_the_weights_lives_on_in_the_session(make_session):
    session, pipe = make_session(), models.sd15()
    compile_pipe(pipe, session=session)
    for _ in range(3):
        draw_latents(pipe)
    undo_compile(pipe)
    weights = {
        f"{part}.{name}": StorageWeakRef(weight.untyped_storage())
        for part in ("unet", "vae")
        for name, weight in getattr(pipe, part).named_parameters()
    }
    modules = {
        f"{part}.{name}": weakref.ref(module)
        for part in ("unet", "vae")
        for name, module in getattr(pipe, part).named_modules()
    }
    del pipe
    gc.collect()
    assert [name for name, module in modules.items() if module() is not None] == []
    assert [name for name, storage in weights.items() if not storage.expired()] == []
    assert session.kinds
    assert session.status().blocks_needed == 0


def test_the_end_of_a_with_block_is_an_undo(make_session):
    pipe = models.sd15()
    before = everything(pipe)
    with pytest.raises(KeyError), compiled(pipe, session=make_session()):
        raise KeyError
    assert everything(pipe) == before


def _under_hooks(pipe):
    for module in [pipe.unet, *pipe.unet.modules()]:
        if module is pipe.unet or type(module).__name__ == "ResnetBlock2D":
            add_hook_to_module(module, ModelHook())


def test_a_model_under_hooks_that_came_later_is_copied(pipe):
    """A hook takes over the attributes of the forward that it wraps."""
    enable_deepcache(pipe)
    _under_hooks(pipe)
    copied = copy.deepcopy(pipe)
    assert compiled_state(copied) is None
    assert relative_error(draw_latents(copied), pipe.test_expected) < 1e-4
    assert relative_error(draw_latents(pipe), pipe.test_expected) < 1e-4
    for forward in (pipe.unet.forward, pipe.unet.down_blocks[0].resnets[0].forward):
        assert {"_session", "_registry", "model"}.isdisjoint(vars(forward))
