"""CLIP's tokenizer, from the files in the package."""

from __future__ import annotations

import pytest

from onediff_ext.hosts.diffusers.checkpoints.tokenizer import (
    END_OF_TEXT,
    OPEN_CLIP_PAD,
    make_tokenizer,
)

START, END = 49406, 49407


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("a photo of a cat", [320, 1125, 539, 320, 2368]),
        ("A  Photo\nof a CAT", [320, 1125, 539, 320, 2368]),
        ("hi! there", [1883, 256, 997]),
        ("", []),
    ],
)
@pytest.mark.parametrize("pad", [END_OF_TEXT, OPEN_CLIP_PAD])
def test_known_prompts(text: str, tokens: list[int], pad: str) -> None:
    assert make_tokenizer(pad)(text).input_ids == [START, *tokens, END]


@pytest.mark.parametrize(("pad", "expected"), [(END_OF_TEXT, END), (OPEN_CLIP_PAD, 0)])
def test_padding(pad: str, expected: int) -> None:
    tokenizer = make_tokenizer(pad)
    assert len(tokenizer) == 49408
    tokens = tokenizer("a cat", padding="max_length", truncation=True).input_ids
    assert tokens == [START, 320, 2368, END] + [expected] * 73


def test_truncation() -> None:
    tokens = make_tokenizer()("cat " * 100, truncation=True).input_ids
    assert len(tokens) == 77
    assert tokens[-1] == END
