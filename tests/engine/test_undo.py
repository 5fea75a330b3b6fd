"""Compiling and undoing leaves every attribute and every weight as it was."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from onediff_ext.core.errors import OptionError
from onediff_ext.hosts.diffusers.compile import (
    compile_pipe,
    compiled,
    compiled_state,
    undo_compile,
)
from tests.support import models
from tests.support.draw import draw_latents


def _picture(pipe):
    """Everything that could have been changed: attributes by identity, weights by layout."""
    seen = {}
    for part in ("unet", "vae", "text_encoder"):
        for name, module in getattr(pipe, part).named_modules():
            attributes = {k: id(v) for k, v in vars(module).items()}
            children = {k: id(v) for k, v in module._modules.items()}
            weights = {
                k: (id(p), p.shape, p.stride(), p.dtype)
                for k, p in module._parameters.items()
                if p is not None
            }
            hooks = (len(module._forward_hooks), len(module._forward_pre_hooks))
            seen[part, name] = (attributes, children, weights, hooks)
    return seen, {k: id(v) for k, v in vars(pipe).items()}


def test_undo_restores_everything(make_session):
    pipe = models.sd15()
    expected = draw_latents(pipe)
    before = _picture(pipe)
    compile_pipe(pipe, session=make_session())
    assert _picture(pipe) != before
    draw_latents(pipe)
    undo_compile(pipe)
    assert _picture(pipe) == before
    assert torch.equal(draw_latents(pipe), expected)


def test_undo_after_an_exception_inside_a_forward(make_session):
    pipe = models.sd15()
    before = _picture(pipe)
    with pytest.raises(RuntimeError), compiled(pipe, session=make_session()):
        pipe.unet(torch.zeros(1, 3, 8, 8), 1, torch.zeros(1, 77, 8))
    assert _picture(pipe) == before


def test_compiling_twice_is_compiling_once(make_session):
    pipe = models.sd15()
    before = _picture(pipe)
    session = make_session()
    compile_pipe(pipe, session=session)
    compile_pipe(pipe, session=session, ignores=("vae",))
    assert [c.name for c in compiled_state(pipe).components] == ["unet"]
    undo_compile(pipe)
    undo_compile(pipe)
    assert _picture(pipe) == before


def test_another_extensions_later_patch_survives(make_session):
    pipe = models.sd15()
    expected = draw_latents(pipe)
    compile_pipe(pipe, session=make_session())
    block = pipe.unet.mid_block.resnets[0]
    ours = block.forward
    calls = []

    def theirs(*args, **kwargs):
        calls.append(1)
        return ours(*args, **kwargs)

    block.forward = theirs
    undo_compile(pipe)
    assert block.forward is theirs
    assert torch.equal(draw_latents(pipe), expected)
    assert calls


def test_ignores_leave_components_untouched(make_session):
    pipe = models.sd15()
    before = _picture(pipe)[0]
    compile_pipe(pipe, session=make_session(), ignores=("vae", "text_encoder"))
    after = _picture(pipe)[0]
    assert {
        part for part, _ in before if any(before[k] != after[k] for k in before if k[0] == part)
    } == {"unet"}
    with pytest.raises(OptionError, match="Unknown component"):
        compile_pipe(models.sd15(), ignores=("unets",))
    with pytest.raises(OptionError, match="no component"):
        compile_pipe(pipe, ignores=("unet", "vae"))
    with pytest.raises(OptionError, match="Unknown compile option"):
        compile_pipe(pipe, options={"bakend": "inductor"})


def test_a_session_does_not_keep_a_model_alive(make_session):
    session = make_session()
    pipe = models.sd15()
    compile_pipe(pipe, session=session)
    draw_latents(pipe)
    undo_compile(pipe)
    watcher = weakref.ref(pipe.unet)
    del pipe
    gc.collect()
    assert watcher() is None
