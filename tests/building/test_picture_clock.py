"""Which calls of a bare module belong to one picture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from onediff_ext.building.picture_clock import ModelCall, PictureClock, PromptTensor
from onediff_ext.core.components import ComponentId, Role

SCHEDULE = [981.0, 661.0, 331.0, 1.0]
UNET, DECODER, ENCODER = (
    ComponentId(role) for role in (Role.UNET, Role.VAE_DECODER, Role.VAE_ENCODER)
)
CONTROL, CONTROL_2 = ComponentId(Role.CONTROLNET), ComponentId(Role.CONTROLNET, 1)


class Loop:
    """A user's loop over models; each call says whether it continued the picture."""

    def __init__(self) -> None:
        self.clock, self.prompt = PictureClock(), torch.zeros(2, 77, 8)

    def __call__(
        self, timestep: object = None, part: ComponentId = UNET, *, side: int = 8, model: int = 0
    ) -> bool:
        prompt = () if part.role.is_vae else (PromptTensor(self.prompt),)
        return self.clock.continues(
            ModelCall(part, hash((part, model)), ((2, 4, side, side),), timestep, prompt)
        )


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_steps_of_one_scheduler_are_one_picture(loop: Loop) -> None:
    for _ in range(3):  # a new tensor each time, as `set_timesteps` makes it
        timesteps = torch.tensor(SCHEDULE)
        assert [loop(t) for t in timesteps] == [False, True, True, True]


def test_a_schedule_that_begins_again_is_a_new_picture(loop: Loop) -> None:
    timesteps = torch.tensor(SCHEDULE)
    for _ in range(2):
        assert [loop(t) for t in timesteps] == [False, True, True, True]
    assert [loop(t) for t in timesteps[1:]] == [False, True, True]  # an img2img's


def test_a_value_is_not_read_from_an_element_of_a_schedule(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That would wait for the GPU."""
    timesteps = torch.tensor(SCHEDULE)
    monkeypatch.setattr(torch.Tensor, "__float__", None)
    monkeypatch.setattr(torch.Tensor, "item", None)
    assert [loop(t.expand(2)) for t in timesteps] == [False, True, True, True]


def test_two_evaluations_of_one_step_are_one_picture_after_the_first_step(loop: Loop) -> None:
    timesteps = torch.tensor(SCHEDULE)
    calls = [loop(t) for t in timesteps for _ in range(2)]
    assert calls == [False, False, True, True, True, True, True, True]


def test_pictures_of_one_step_are_told_apart(loop: Loop) -> None:
    timesteps, only = torch.tensor(SCHEDULE[:1]), torch.tensor(999)
    assert not any(loop(t) for _ in range(3) for t in timesteps)
    assert not any(loop(only) for _ in range(3))


@pytest.mark.parametrize(
    "number", [float, int, np.int64, torch.tensor, lambda t: torch.full((2,), t)]
)
def test_numbers_that_fall_with_one_prompt_are_one_picture(loop: Loop, number: Any) -> None:
    for _ in range(2):
        assert [loop(number(t)) for t in SCHEDULE] == [False, True, True, True]
    loop.prompt = torch.zeros(2, 77, 8)  # an interrupted picture, and an img2img that begins later
    assert not loop(number(0.5))


def test_a_number_that_is_written_after_its_step(loop: Loop) -> None:
    first, buffer = torch.tensor(SCHEDULE[0]), torch.tensor(0.0)
    loop(first)
    assert [loop(buffer.fill_(t)) for t in SCHEDULE[1:]] == [True] * 3
    assert not loop(buffer.fill_(900.0))  # an img2img's first step


def test_a_timestep_on_a_gpu_that_is_computed_for_each_call_tells_nothing(loop: Loop) -> None:
    meta = [torch.tensor(t, device="meta") for t in SCHEDULE]  # its value cannot be read either
    assert not any(loop(t) for t in meta)


def test_another_shape_or_model_is_a_new_picture(loop: Loop) -> None:
    timesteps = torch.tensor(SCHEDULE)
    assert [loop(t, side=8 + i // 2) for i, t in enumerate(timesteps)] == [
        False, True, False, True,
    ]  # fmt: skip
    assert [loop(t, model=i // 2) for i, t in enumerate(timesteps)] == [False, True, False, True]


def test_a_transformer_after_a_unet_draws_another_picture(loop: Loop) -> None:
    found = []
    for part in (UNET, ComponentId(Role.TRANSFORMER)):
        found += [loop(t, part) for t in torch.tensor(SCHEDULE)]
    assert found == [False, True, True, True] * 2


def test_the_models_of_a_picture_are_called_in_their_order(loop: Loop) -> None:
    for _ in range(2):
        timesteps = torch.tensor(SCHEDULE)
        found = [loop(part=ENCODER)]
        for t in timesteps:
            found += [loop(t, CONTROL), loop(t, CONTROL_2), loop(t)]
        found.append(loop(part=DECODER))
        assert found == [False] + [True] * 13


def test_a_controlnet_after_the_unet_of_another_picture_begins_its_own(loop: Loop) -> None:
    for t in torch.tensor(SCHEDULE):
        loop(t)
    timesteps = torch.tensor(SCHEDULE)
    assert [loop(timesteps[0], CONTROL), loop(timesteps[0])] == [False, True]


def test_tiles_of_a_vae_are_uncertain(loop: Loop) -> None:
    loop(torch.tensor(SCHEDULE)[0])
    assert [loop(part=DECODER) for _ in range(3)] == [True, False, False]


def test_nothing_is_known_of_a_call_without_arguments(loop: Loop) -> None:
    timesteps = torch.tensor(SCHEDULE)
    loop(timesteps[0])
    assert not loop.clock.continues(None)
    assert not loop(timesteps[1])
    assert ModelCall.of(UNET, loop, (), {}).shapes == ()


class OfUNet:
    def forward(self, sample: Any, timestep: Any, encoder_hidden_states: Any) -> None: ...


class OfTransformer:
    def forward(
        self, hidden_states: Any, encoder_hidden_states: Any, pooled: Any, timestep: Any
    ) -> None: ...


class OfLists:
    def forward(self, x: Any, t: Any, cap_feats: Any) -> None: ...


class OfAnything:
    def forward(self, *args: Any, **kwargs: Any) -> None: ...


SAMPLE, TIMESTEP, PROMPT = torch.zeros(2, 4, 8, 8), torch.tensor(1), torch.zeros(2, 77, 8)


@pytest.mark.parametrize(
    ("model", "order"),
    [
        (OfUNet(), {"sample": SAMPLE, "timestep": TIMESTEP, "encoder_hidden_states": PROMPT}),
        (
            OfTransformer(),
            {
                "hidden_states": SAMPLE,
                "encoder_hidden_states": PROMPT,
                "pooled": torch.zeros(2, 8),
                "timestep": TIMESTEP,
            },
        ),
    ],
)
def test_a_call_is_read_from_any_form_of_arguments(model: Any, order: dict[str, Any]) -> None:
    for count in range(len(order) + 1):
        names = list(order)
        args = [order[name] for name in names[:count]]
        call = ModelCall.of(UNET, model, args, {name: order[name] for name in names[count:]})
        assert (call.shapes, call.timestep) == (((2, 4, 8, 8),), TIMESTEP)
        (prompt,) = call.prompt
        assert prompt.is_same(PromptTensor(PROMPT))


@pytest.mark.parametrize("model", [OfUNet(), OfTransformer()])
def test_the_latent_is_known_by_its_name_in_any_order_of_keywords(model: Any) -> None:
    latent = "sample" if isinstance(model, OfUNet) else "hidden_states"
    named = {"timestep": TIMESTEP, "encoder_hidden_states": PROMPT, latent: SAMPLE}
    assert ModelCall.of(UNET, model, (), named).shapes == (SAMPLE.shape,)


def test_lists_of_latents_and_prompts_are_read() -> None:
    latents, prompts = [torch.zeros(16, 1, 8, 8), torch.zeros(16, 1, 8, 12)], [PROMPT, PROMPT + 1]
    call = ModelCall.of(UNET, OfLists(), (latents, TIMESTEP), {"cap_feats": prompts})
    assert call.shapes == ((16, 1, 8, 8), (16, 1, 8, 12))
    assert call.timestep is TIMESTEP
    same, other = (
        ModelCall.of(UNET, OfLists(), (latents, TIMESTEP, given), {})
        for given in (list(prompts), prompts[:1])
    )
    assert call.has_prompt_of(same)
    assert not call.has_prompt_of(other)


def test_arguments_without_names_tell_nothing() -> None:
    """Each such call is a picture of its own."""
    clock, timesteps = PictureClock(), torch.tensor(SCHEDULE)
    calls = [ModelCall.of(UNET, OfAnything(), (SAMPLE, t, PROMPT), {}) for t in timesteps]
    assert not any(map(clock.continues, calls))


def test_slices_of_prompts_are_not_taken_for_steps_of_a_schedule() -> None:
    """A transformer has the prompt where a UNet has the timestep."""
    clock, model, prompts = PictureClock(), OfTransformer(), torch.zeros(3, 77, 8)
    found = []
    for number in range(3):  # a new schedule for each picture
        prompt, pooled = prompts[number : number + 1], torch.zeros(1, 8)
        for t in torch.tensor(SCHEDULE):
            call = ModelCall.of(UNET, model, (SAMPLE, prompt, pooled, t.expand(2)), {})
            found.append(clock.continues(call))
    assert found == [False, True, True, True] * 3


@pytest.mark.parametrize("number", [lambda t: t, float])
def test_prompts_that_take_turns_are_guidance(loop: Loop, number: Any) -> None:
    embeddings = torch.zeros(2, 77, 8)
    found = []
    for t in torch.tensor(SCHEDULE):
        for i in range(2):
            loop.prompt = embeddings[i : i + 1]  # made again at each step
            found.append(loop(number(t)))
    assert found == [False, False, True, True, True, True, True, True]


def test_another_prompt_at_a_later_step_is_a_new_picture(loop: Loop) -> None:
    timesteps = torch.tensor(SCHEDULE)
    assert [loop(t) for t in timesteps[:2]] == [False, True]
    loop.prompt = loop.prompt.clone()
    assert [loop(t) for t in timesteps[2:]] == [False, True]


@pytest.mark.parametrize(
    "form", [torch.Tensor.to_sparse, lambda t: torch.nested.nested_tensor([t], layout=torch.jagged)]
)
def test_prompts_of_any_layout_are_read(form: Any) -> None:
    prompt = form(PROMPT)
    one, other = (ModelCall.of(UNET, OfUNet(), (SAMPLE, TIMESTEP, prompt), {}) for _ in range(2))
    assert one.has_prompt_of(other)
