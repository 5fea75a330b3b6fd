"""A VAE's float32 weights are cast once for each job, and equal diffusers' casts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from onediff_ext.hosts.diffusers.drawing.draw_settings import DrawSettings
from onediff_ext.hosts.diffusers.drawing.image_generator import ImageGenerator
from onediff_ext.hosts.diffusers.vae.kept_casts import KeptCasts
from tests.support import models
from tests.support.sample_pictures import gradient

if TYPE_CHECKING:
    from tests.support.command_line import CommandLine

pytest_plugins = ("tests.support.command_line",)


def places(model: nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


def numbers(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.fixture
def vae() -> Any:
    return models.vae().half()


def test_casts_are_those_of_torch_and_made_once(vae: Any) -> None:
    half, full = numbers(vae), numbers(models.vae().half().float())
    own = places(vae)
    with KeptCasts(vae).kept():
        vae.to(dtype=torch.float32)
        first = places(vae)
        assert same(numbers(vae), full)
        assert next(vae.parameters()).dtype == vae.dtype == torch.float32
        vae.to(torch.float16)
        assert same(numbers(vae), half)
        assert places(vae) == own
        vae.to(torch.float32)
        assert places(vae) == first
        vae.to(torch.float16)
    assert "to" not in vars(vae)
    vae.to(torch.float32)
    assert same(numbers(vae), full)
    assert places(vae) != first


def test_weights_made_under_inference_mode_are_cast_each_time(vae: Any) -> None:
    """Nothing counts the writes to them."""
    with torch.inference_mode():
        first = nn.Parameter(vae.encoder.conv_in.weight.clone(), requires_grad=False)
    vae.encoder.conv_in.weight = first
    half = numbers(vae)
    with KeptCasts(vae).kept():
        vae.to(torch.float32)
        assert same(numbers(vae), [number.float() for number in half])
        first.data.mul_(2)
        vae.to(torch.float16)
        vae.to(torch.float32)
        assert torch.equal(first.data, 2 * half[0].float())
        vae.to(torch.float16)


@pytest.mark.parametrize("changed_in", [torch.float16, torch.float32])
def test_changed_weights_are_cast_again(vae: Any, changed_in: torch.dtype) -> None:
    plain = models.vae().half()
    with KeptCasts(vae).kept():
        for model in (vae, plain):
            model.to(torch.float32)
            if changed_in == torch.float16:
                model.to(torch.float16)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.37)
            model.to(torch.float16)
            model.to(torch.float32)
    assert same(numbers(vae), numbers(plain))


def test_replaced_weights_are_cast_again(vae: Any) -> None:
    with KeptCasts(vae).kept():
        vae.to(torch.float32).to(torch.float16)
        others = models.vae(seed=5).half()
        for parameter, other in zip(vae.parameters(), others.parameters(), strict=True):
            parameter.data = other.data
        vae.to(torch.float32)
    assert same(numbers(vae), numbers(others.float()))


def test_what_a_narrower_type_loses_stays_lost() -> None:
    vae = models.vae()
    rounded = numbers(models.vae().half().float())
    with KeptCasts(vae).kept():
        vae.to(torch.float16).to(torch.float32)
    assert same(numbers(vae), rounded)


def test_whatever_else_is_asked_for_is_done_by_torch(vae: Any) -> None:
    with KeptCasts(vae).kept():
        assert vae.to("meta", torch.float32) is vae
        assert next(vae.parameters()).is_meta
        assert vae.dtype == torch.float32


def test_a_job_draws_what_single_pictures_are(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onediff_ext.hosts.diffusers.checkpoints.load import load_checkpoint

    checkpoint = load_checkpoint(command_line.checkpoint("sdxl"), dtype=torch.float16)
    checkpoint.pipeline.vae.register_to_config(force_upcast=True)
    image_generator = ImageGenerator(checkpoint)
    settings = DrawSettings(steps=2, strength=0.5, prompt="a cat")
    walks: list[object] = []
    own = nn.Module.to

    def noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module is image_generator.pipe.vae:
            walks.append(args)
        return own(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "to", noted)

    def draw() -> list[bytes]:
        drawn = [image_generator.img2img(settings, [gradient(64, 72)], [seed]) for seed in (0, 1)]
        found = [image.tobytes() for one in drawn for image in one.images if image is not None]
        assert len(found) == 2
        return found

    expected = draw()
    assert len(walks) == 8
    with image_generator.one_job():
        assert draw() == expected
    assert len(walks) == 8
    assert image_generator.pipe.vae.dtype == torch.float16
