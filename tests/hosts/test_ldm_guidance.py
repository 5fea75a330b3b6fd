"""What a WebUI's call of its UNet says of prompt and negative prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onediff_ext.engine.guidance.guided_forward import GuidedCall
from onediff_ext.hosts.ldm_guidance import OTHER_BATCH, PATCHED, draws_one_latent, read_ldm_call

X = torch.zeros(4, 4, 8, 8)


def forge(parts: list[int], **more: Any) -> GuidedCall | str:
    """A call of Forge with two pictures."""
    options = {"cond_or_uncond": parts, **more}
    given = {"timesteps": torch.zeros(4), "context": torch.zeros(4, 77, 8)}
    return read_ldm_call((X,), {**given, "transformer_options": options}, 3, 12, (2, 2))


@pytest.mark.parametrize(("parts", "rows"), [([0, 1], [0, 1]), ([1, 0], [2, 3])])
def test_the_prompts_half_of_forges_options(parts: list[int], rows: list[int]) -> None:
    mark = torch.arange(4.0)
    options = {
        "cond_mark": mark, "sigmas": torch.ones(2), "cond_indices": rows, "uncond_indices": [9],
        "uuids": ["prompt" if part == 0 else "negative" for part in parts],
        "sample_sigmas": torch.arange(4.0), "sampling_sigmas": torch.arange(4.0),
        "transformer_index": 0,
    }  # fmt: skip
    call = forge(parts, **options)
    assert isinstance(call, GuidedCall)
    assert (call.step, call.steps, call.is_prompt_first) == (3, 12, parts == [0, 1])
    found = call.of_prompt["transformer_options"]
    assert (found["cond_or_uncond"], found["cond_indices"], found["uncond_indices"]) == (
        [0], [0, 1], [],
    )  # fmt: skip
    assert found["cond_mark"].tolist() == mark[rows].tolist()
    assert found["sigmas"].shape == (2,)
    # A schedule may be as long as the batch.
    assert found["sample_sigmas"].shape == found["sampling_sigmas"].shape == (4,)
    assert (found["uuids"], found["transformer_index"]) == (["prompt"], 0)
    assert options["cond_indices"] == rows


@pytest.mark.parametrize("parts", [[], [0], [1], [0, 0], [0, 1, 0], [0, 1, 1]])
def test_other_parts_run_whole(parts: list[int]) -> None:
    assert forge(parts) == OTHER_BATCH


def test_a_call_of_some_of_a_prompts_parts_runs_whole() -> None:
    """Forge draws the parts of a prompt with AND in several calls where memory is short."""
    given = {"transformer_options": {"cond_or_uncond": [1, 0]}}
    assert read_ldm_call((X,), given, 0, 9, (6, 2)) == OTHER_BATCH
    assert read_ldm_call((X,), given, 0, 9, None) == OTHER_BATCH
    assert isinstance(read_ldm_call((X,), given, 0, 9, (2, 2)), GuidedCall)


@pytest.mark.parametrize(
    ("rows", "is_known"),
    [((2, 2), True), ((1, 1), False), ((3, 1), False), ((4, 4), False), (None, False)],
)
def test_the_rows_of_a1111(rows: tuple[int, int] | None, is_known: bool) -> None:
    call = read_ldm_call((X, torch.zeros(4)), {"context": torch.zeros(4, 77, 8)}, 0, 9, rows)
    assert isinstance(call, GuidedCall) is is_known
    if isinstance(call, GuidedCall):
        assert call.is_prompt_first


@pytest.mark.parametrize(
    ("added", "is_known"),
    [
        ({"patches": {}}, True),
        ({"wrappers": {"a": []}}, True),
        ({"wrappers": {"a": [print]}}, False),
        ({"patches": {"attn2": [print]}}, False),
        ({"group_norm_wrapper": print}, False),
    ],
)
def test_functions_of_extensions_run_whole(added: dict[str, Any], is_known: bool) -> None:
    call = forge([0, 1], **added)
    assert isinstance(call, GuidedCall) is is_known
    assert is_known or call == PATCHED


def test_unknown_tensors_run_whole() -> None:
    call = read_ldm_call((X,), {"regions": [torch.zeros(4)]}, 0, 9, (2, 2))
    assert call == "an argument may have other rows: regions"
    assert isinstance(read_ldm_call((X,), {"regions": 3}, 0, 9, (2, 2)), GuidedCall)


def test_regions_are_other_latents() -> None:
    assert draws_one_latent((X,), {})
    assert not draws_one_latent((), {"x": torch.arange(4.0)[:, None, None, None]})
