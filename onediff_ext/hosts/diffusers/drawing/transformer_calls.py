"""How a picture is drawn with a transformer model: arguments, sizes and prompts of its pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onediff_ext.core.shapes import round_up
from onediff_ext.hosts.diffusers.transformer_models import SIDE_STEP_PX, TransformerModel

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from onediff_ext.hosts.diffusers.drawing.draw_settings import DrawSettings


def drawn_size(width_px: int, height_px: int) -> tuple[int, int]:
    """Return (width, height) in pixels that the model draws: rounded up to multiples of 16."""
    rows, columns = round_up(height_px, width_px, SIDE_STEP_PX)
    return columns * SIDE_STEP_PX, rows * SIDE_STEP_PX


@dataclass(frozen=True)
class ReadPictures:
    """Preprocessed pictures of one size.

    Args:
        pixels: Of the drawn size, [B, 3, H, W].
        size_px: (width, height) before they were padded.
    """

    pixels: torch.Tensor
    size_px: tuple[int, int]

    def __getitem__(self, part: slice) -> ReadPictures:
        return ReadPictures(self.pixels[part], self.size_px)

    def __len__(self) -> int:
        return len(self.pixels)


def padded(image: Image.Image) -> Image.Image:
    """Return a picture of the drawn size; its last row and column are repeated."""
    from PIL import Image

    width, height = drawn_size(*image.size)
    if (width, height) == image.size:
        return image
    result = Image.new(image.mode, (width, height))
    result.paste(image, (0, 0))
    if width > image.width:
        right = result.crop((image.width - 1, 0, image.width, height))
        result.paste(right.resize((width - image.width, height)), (image.width, 0))
    if height > image.height:
        below = result.crop((0, image.height - 1, width, image.height))
        result.paste(below.resize((width, height - image.height)), (0, image.height))
    return result


def call_arguments(
    model: TransformerModel,
    pipe: Any,
    settings: DrawSettings,
    prompts: Sequence[str],
) -> dict[str, Any]:
    """Return the pipeline's arguments for prompts and guidance."""
    arguments: dict[str, Any] = {
        "prompt": list(prompts),
        model.guidance_name: settings.guidance,
        "max_sequence_length": _room(model, pipe, [*prompts, settings.negative_prompt]),
    }
    if model.takes_negative:
        arguments["negative_prompt"] = [settings.negative_prompt] * len(prompts)
    return arguments


def ignored_text(model: TransformerModel, pipe: Any, settings: DrawSettings) -> list[str]:
    """Return a warning for each prompt that is cut, and for a negative prompt without effect."""
    warnings = []
    for what, prompt in (
        ("prompt", settings.prompt),
        ("negative prompt", settings.negative_prompt if model.takes_negative else ""),
    ):
        tokens = _count(pipe, prompt)
        if tokens > model.most_tokens:
            warnings.append(
                f"The {what} has {tokens} tokens; what comes after {model.most_tokens} is ignored."
            )
    if settings.negative_prompt and not model.takes_negative:
        warnings.append("This model takes no negative prompt; it is ignored.")
    return warnings


def _room(model: TransformerModel, pipe: Any, prompts: Sequence[str]) -> int:
    """The length that prompts are padded or cut to. A long prompt gets more, where there is."""
    if model.most_tokens == model.tokens:
        return model.tokens
    longest = max(_count(pipe, prompt) for prompt in prompts)
    return model.tokens if longest <= model.tokens else model.most_tokens


def _count(pipe: Any, prompt: str) -> int:
    """Tokens of a prompt, as the text encoder with the most room sees it."""
    names = ("tokenizer_3", "tokenizer_2", "tokenizer")
    tokenizer = next(filter(None, (getattr(pipe, name, None) for name in names)))
    return len(tokenizer(prompt).input_ids)
