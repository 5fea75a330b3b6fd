"""Results follow the weights: other checkpoints, several pipes, LoRA in every state."""

from __future__ import annotations

import copy

import pytest
import torch

from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.hosts.diffusers.compile import compile_pipe
from onediff_ext.hosts.diffusers.lora.lora_file import load_lora
from tests.support import adapter_weights, models
from tests.support.draw import draw_latents, relative_error


@pytest.fixture
def warm(make_session):
    """A session that has all graphs of the small SD1.5."""
    session = make_session()
    pipe = compile_pipe(models.sd15(), session=session)
    draw_latents(pipe)
    return session


def test_second_checkpoint_builds_nothing_and_draws_its_own(warm):
    other = models.sd15(seed=1)
    expected = draw_latents(other)
    known = {kind.key.digest for kind in warm.kinds}
    compile_pipe(other, session=warm)
    assert relative_error(draw_latents(other), expected) < 1e-4
    assert {kind.key.digest for kind in warm.kinds} == known
    first = draw_latents(models.sd15(seed=0))
    assert relative_error(first, expected) > 0.1


def test_two_pipes_alive_do_not_mix(warm):
    pipes = [models.sd15(seed=s) for s in (0, 1)]
    expected = [draw_latents(pipe) for pipe in pipes]
    for pipe in pipes:
        compile_pipe(pipe, session=warm)
    for _ in range(2):
        for pipe, latents in zip(pipes, expected, strict=True):
            assert relative_error(draw_latents(pipe), latents) < 1e-4


def test_weights_written_in_place_are_seen(warm):
    pipe, other = models.sd15(seed=0), models.sd15(seed=1)
    expected = draw_latents(other)
    compile_pipe(pipe, session=warm)
    draw_latents(pipe)
    pipe.unet.load_state_dict(other.unet.state_dict())
    pipe.text_encoder.load_state_dict(other.text_encoder.state_dict())
    assert relative_error(draw_latents(pipe), expected) < 1e-4


def test_replaced_parameters_are_seen(warm):
    pipe, other = models.sd15(seed=0), models.sd15(seed=1)
    compile_pipe(pipe, session=warm)
    draw_latents(pipe)
    for (_, mine), (_, theirs) in zip(
        pipe.unet.named_modules(), other.unet.named_modules(), strict=True
    ):
        for name, parameter in theirs._parameters.items():
            if parameter is not None:
                mine._parameters[name] = torch.nn.Parameter(parameter.detach().clone())
    pipe.text_encoder.load_state_dict(other.text_encoder.state_dict())
    expected = draw_latents(models.sd15(seed=1))
    assert relative_error(draw_latents(pipe), expected) < 1e-4
    assert all(kind.state is KindState.READY for kind in warm.kinds if kind.calls > 1)


@pytest.mark.parametrize("layout", ["diffusers", "kohya"])
def test_lora_is_right_in_every_state_without_a_build(layout, warm, tmp_path):
    path = adapter_weights.save_lora(models.sd15(), tmp_path / "style.safetensors", layout)
    reference, pipe = models.sd15(), models.sd15()
    before = draw_latents(reference)
    compile_pipe(pipe, session=warm)
    compiled_before = draw_latents(pipe)
    known = {kind.key.digest for kind in warm.kinds}
    for one in (reference, pipe):
        load_lora(one, path, 1.0, adapter_name="style")

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        return draw_latents(pipe), draw_latents(reference)

    found, expected = both()
    assert relative_error(expected, before) > 1e-2  # the LoRA matters
    assert relative_error(found, expected) < 1e-4

    for one in (reference, pipe):
        one.set_adapters(["style"], [0.4])
    weaker, weaker_expected = both()
    assert relative_error(weaker, weaker_expected) < 1e-4
    assert relative_error(weaker, found) > 1e-3

    for one in (reference, pipe):
        one.set_adapters(["style"], [1.0])
        one.fuse_lora()
    fused, fused_expected = both()
    assert relative_error(fused, fused_expected) < 1e-4

    for one in (reference, pipe):
        one.unfuse_lora()
        one.unload_lora_weights()
    assert torch.equal(draw_latents(pipe), compiled_before)
    assert {kind.key.digest for kind in warm.kinds} == known
    assert warm.fallbacks() == []


def test_a_lora_that_is_fused_while_it_is_off_draws_nothing(warm, tmp_path):
    """peft takes it out of the weights again within the first forward."""
    path = adapter_weights.save_lora(models.sd15(), tmp_path / "style.safetensors", "diffusers")
    reference, pipe = models.sd15(), models.sd15()
    compile_pipe(pipe, session=warm)
    for one in (reference, pipe):
        load_lora(one, path)
        one.fuse_lora()
    fused = draw_latents(reference)
    assert relative_error(draw_latents(pipe), fused) < 1e-4
    for one in (reference, pipe):
        one.unfuse_lora()
        one.disable_lora()
        one.fuse_lora()
    expected = draw_latents(reference)
    assert relative_error(draw_latents(pipe), expected) < 1e-4
    assert relative_error(fused, expected) > 1e-2
    assert all("a LoRA is fused and switched off" in f.reason for f in warm.fallbacks())
    noted = sum(fallback.count for fallback in warm.fallbacks())
    assert noted > 0
    for one in (reference, pipe):
        one.enable_lora()
    assert relative_error(draw_latents(pipe), draw_latents(reference)) < 1e-4
    assert sum(fallback.count for fallback in warm.fallbacks()) == noted  # graphs serve again


def test_two_loras_at_once(warm, tmp_path):
    paths = [
        adapter_weights.save_lora(models.sd15(), tmp_path / f"{i}.safetensors", "diffusers", seed=i)
        for i in (1, 2)
    ]
    reference, pipe = models.sd15(), models.sd15()
    compile_pipe(pipe, session=warm)
    for one in (reference, pipe):
        for path in paths:
            load_lora(one, path, 0.7)
    assert relative_error(draw_latents(pipe), draw_latents(reference)) < 1e-4
    for one in (reference, pipe):
        one.disable_lora()
    assert relative_error(draw_latents(pipe), draw_latents(reference)) < 1e-4


def test_compiling_a_pipe_that_has_a_lora(warm, tmp_path):
    path = adapter_weights.save_lora(models.sd15(), tmp_path / "style.safetensors", "diffusers")
    pipe = models.sd15()
    load_lora(pipe, path)
    expected = draw_latents(pipe)
    known = {kind.key.digest for kind in warm.kinds}
    compile_pipe(pipe, session=warm)
    assert relative_error(draw_latents(pipe), expected) < 1e-4
    assert {kind.key.digest for kind in warm.kinds} == known


def test_a_copied_pipe_runs_with_its_own_weights(warm):
    pipe = models.sd15()
    compile_pipe(pipe, session=warm)
    expected = draw_latents(pipe)
    twin = copy.deepcopy(pipe.unet)
    with torch.no_grad():
        for parameter in pipe.unet.parameters():
            parameter.mul_(0.5)
    pipe.unet = twin
    assert relative_error(draw_latents(pipe), expected) < 1e-4
