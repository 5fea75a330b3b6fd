"""When each picture of a batch has alike predictions, in both orders of its halves."""

from __future__ import annotations

import pytest
import torch

from onediff_ext.engine.guidance.alike_predictions import AlikePredictions


def predictions(alike: list[bool], is_prompt_first: bool) -> torch.Tensor:
    """Of the prompt and of the negative prompt, [2B, 1, 2, 2]."""
    prompt = torch.stack([torch.full((1, 2, 2), 1.0 + row) for row in range(len(alike))])
    other = torch.tensor([[[1.0, -1.0], [1.0, -1.0]]])
    both = zip(prompt, alike, strict=True)
    negative = torch.stack([one if is_alike else other for one, is_alike in both])
    return torch.cat([prompt, negative] if is_prompt_first else [negative, prompt])


@pytest.mark.parametrize("is_prompt_first", [False, True])
def test_each_picture_ends_at_the_step_after_its_own(is_prompt_first: bool) -> None:
    found = AlikePredictions(0.99)
    for alike, ended in (
        ([False, False, False], [False, False, False]),
        ([False, True, False], [False, False, False]),
        ([True, False, False], [False, True, False]),
        ([False, False, True], [True, True, False]),
    ):
        found.begin_step()
        given = predictions(alike, is_prompt_first)
        kept = given.clone()
        (output,) = found.compared((given,), is_prompt_first)
        assert torch.equal(given, kept)
        prompt = slice(0, 3) if is_prompt_first else slice(3, 6)
        negative = slice(3, 6) if is_prompt_first else slice(0, 3)
        assert torch.equal(output[prompt], given[prompt])
        for row, has_ended in enumerate(ended):
            expected = given[prompt if has_ended else negative][row]
            assert torch.equal(output[negative][row], expected)
        assert not found.have_all_ended
    found.begin_step()
    assert found.have_all_ended


def test_another_number_of_pictures_begins_again() -> None:
    found = AlikePredictions(0.99)
    found.compared(predictions([True, True], False))
    found.begin_step()
    assert found.have_all_ended
    given = predictions([True, False, False], False)
    assert torch.equal(found.compared(given), given)
    found.begin_step()
    assert not found.have_all_ended


def test_what_is_no_number_ends_nothing() -> None:
    found = AlikePredictions(0.01)
    found.compared(torch.full((2, 1, 2, 2), float("nan")))
    found.begin_step()
    assert not found.have_all_ended
