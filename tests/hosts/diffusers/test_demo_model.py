"""The demo checkpoint draws what prompts say; its LoRA and its ControlNet do what they are for.

Slow for a test (some twenty pictures of 128x128): below a minute on two cores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import CLIPTextConfig, CLIPTokenizer

from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.hosts.diffusers.checkpoints.load import load_checkpoint
from onediff_ext.hosts.diffusers.compile import compiled, compiled_state
from onediff_ext.hosts.diffusers.deepcache import disable_deepcache, enable_deepcache
from onediff_ext.hosts.diffusers.guidance_steps import guidance_steps_for
from onediff_ext.hosts.diffusers.lora.lora_file import load_lora
from tests.support.demo_pictures import (
    CONCEPTS,
    DEMO,
    draw,
    load_pipeline,
    load_references,
    nearest_concept,
    prompt_of,
)


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return load_pipeline()


@pytest.fixture(scope="module")
def references() -> tuple[list[str], torch.Tensor]:
    return load_references()


def _edges(picture: torch.Tensor) -> torch.Tensor:
    """White lines on black where colours change, as the ControlNet was taught: [3, H, W]."""
    padded = functional.pad(picture[None], (1, 1, 1, 1), mode="replicate")
    across = padded[:, :, 1:-1, 2:] - padded[:, :, 1:-1, :-2]
    along = padded[:, :, 2:, 1:-1] - padded[:, :, :-2, 1:-1]
    change = (across.square() + along.square()).sum(1).sqrt()
    return ((change - 0.16) * 8).clamp(0, 1).expand(3, -1, -1)


def test_the_yaml_leads_a_webui_to_the_tokenizer_and_the_text_encoders_config(
    pipeline: Any,
) -> None:
    named = (DEMO / "onediff-demo.yaml").read_text(encoding="utf-8").split("version: ")[1].strip()
    extension = "extensions/onediff-ext/"
    assert named.startswith(extension)
    folder = DEMO.parents[2] / named.removeprefix(extension)
    config = CLIPTextConfig.from_pretrained(folder, local_files_only=True)
    shape = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "hidden_act", "max_position_embeddings", "vocab_size")  # fmt: skip
    of_checkpoint = pipeline.text_encoder.config
    assert [getattr(config, name) for name in shape] == [
        getattr(of_checkpoint, name) for name in shape
    ]
    tokenizer = CLIPTokenizer.from_pretrained(str(folder), local_files_only=True)
    assert tokenizer("a fox!").input_ids == pipeline.tokenizer("a fox!").input_ids


def test_compiled_pictures_are_eagers_with_and_without_lora(tmp_path: Path) -> None:
    pipe = load_checkpoint(DEMO / "onediff-demo.safetensors", dtype=torch.float32).pipeline
    pipe.set_progress_bar_config(disable=True)
    prompts = ["a fox in the snow", "two apples"]
    plain = draw(pipe, prompts, steps=6)
    with compiled(pipe, options={"backend": "eager", "store": tmp_path}):
        draw(pipe, prompts, steps=2)
        found = draw(pipe, prompts, steps=6)
        state = compiled_state(pipe)
        assert state is not None
        load_lora(pipe, DEMO / "onediff-demo-sketch-lora.safetensors")
        sketched = draw(pipe, prompts, steps=6)
        assert state.session.fallbacks() == []
    sketched_eager = draw(pipe, prompts, steps=6)
    assert (found - plain).abs().max() <= 1 / 255
    assert (sketched - sketched_eager).abs().max() <= 1 / 255
    assert (sketched - found).abs().mean() > 0.02


def test_pictures_are_classified_as_their_own_concept(
    pipeline: Any, references: tuple[list[str], torch.Tensor]
) -> None:
    prompts = [prompt_of(name) for name in CONCEPTS]
    found = [nearest_concept(picture, references) for picture in draw(pipeline, prompts)]
    right = sum(a == b for a, b in zip(found, CONCEPTS, strict=True))
    assert right >= 9, list(zip(CONCEPTS, found, strict=True))


@pytest.mark.parametrize(("level", "at_least"), [("light", 9), ("medium", 9), ("strong", 8)])
def test_deepcache_stays_recognisable(
    pipeline: Any, references: tuple[list[str], torch.Tensor], level: str, at_least: int
) -> None:
    prompts = [prompt_of(name) for name in CONCEPTS]
    enable_deepcache(pipeline, level)
    try:
        found = [
            nearest_concept(picture, references) for picture in draw(pipeline, prompts, steps=20)
        ]
    finally:
        disable_deepcache(pipeline)
    right = sum(a == b for a, b in zip(found, CONCEPTS, strict=True))
    assert right >= at_least, list(zip(CONCEPTS, found, strict=True))


@pytest.mark.parametrize(("steps", "at_least"), [("interval:0-0.6", 9), ("interval:0-0.4", 9)])
def test_guidance_in_the_first_steps_stays_recognisable(
    pipeline: Any, references: tuple[list[str], torch.Tensor], steps: str, at_least: int
) -> None:
    prompts = [prompt_of(name) for name in CONCEPTS]
    with guidance_steps_for(pipeline, GuidanceOptions.parse(steps)) as guided:
        pictures = draw(pipeline, prompts, steps=20)
    assert guided is not None
    assert guided.reason == ""
    found = [nearest_concept(picture, references) for picture in pictures]
    right = sum(a == b for a, b in zip(found, CONCEPTS, strict=True))
    assert right >= at_least, list(zip(CONCEPTS, found, strict=True))


def test_the_caption_names_the_background(pipeline: Any) -> None:
    red, blue, black = draw(
        pipeline, [f"a cat on a {c} background" for c in ("red", "blue", "black")]
    )
    corners = [picture[:, :6, :6].mean((1, 2)) for picture in (red, blue, black)]
    assert corners[0].argmax() == 0
    assert corners[0][0] - corners[0][2] > 0.4
    assert corners[1].argmax() == 2
    assert corners[1][2] - corners[1][0] > 0.4
    assert corners[2].max() < 0.3


def test_two_objects_stand_side_by_side(pipeline: Any) -> None:
    drawn = pipeline(
        "two apples", height=128, width=256, num_inference_steps=10, guidance_scale=4.0,
        generator=torch.Generator().manual_seed(5), output_type="pt",
    ).images[0]  # fmt: skip
    reddish = (drawn[0] - drawn[1] > 0.4).float()
    left, right = reddish[:, :128].mean(), reddish[:, 128:].mean()
    assert min(left, right) > 0.05


def test_the_lora_turns_pictures_into_line_drawings(pipeline: Any) -> None:
    prompts = ["an apple on a blue background", "a house in a meadow"]
    painted = draw(pipeline, prompts)
    name = load_lora(pipeline, DEMO / "onediff-demo-sketch-lora.safetensors")
    try:
        sketched = draw(pipeline, prompts)
    finally:
        pipeline.delete_adapters(name)
    saturation = [(p.amax(1) - p.amin(1)).mean().item() for p in (painted, sketched)]
    assert saturation[1] < 0.35 * saturation[0]
    assert sketched.mean() > painted.mean() + 0.2
    assert sketched.amin() < 0.5  # there are lines
    assert torch.allclose(draw(pipeline, prompts), painted, atol=1e-3)


def test_the_controlnet_follows_edges(
    pipeline: Any, references: tuple[list[str], torch.Tensor]
) -> None:
    from diffusers import ControlNetModel, StableDiffusionControlNetPipeline

    names, thumbnails = references
    thumbnail = thumbnails[names.index("fish")][None]
    shape = functional.interpolate(thumbnail, (128, 128), mode="bicubic")[0].clamp(0, 1)
    hint = _edges(shape)
    controlnet = ControlNetModel.from_pretrained(
        DEMO / "controlnet-edges", torch_dtype=torch.float32, local_files_only=True
    )
    controlled = StableDiffusionControlNetPipeline(**pipeline.components, controlnet=controlnet,
                                                   requires_safety_checker=False)  # fmt: skip
    controlled.set_progress_bar_config(disable=True)
    prompts = ["a fish on a pink background"]
    free = draw(pipeline, prompts)[0]
    led = draw(controlled, prompts, image=hint[None])[0]

    def overlap(picture: torch.Tensor) -> float:
        """How much of the hint's edges lie on the picture's, within 2 pixels."""
        own = functional.max_pool2d(_edges(picture)[None, :1], 5, stride=1, padding=2)
        return float((own * hint[:1]).sum() / hint[:1].sum())

    assert overlap(led) > 0.6
    assert overlap(led) > overlap(free) + 0.1
