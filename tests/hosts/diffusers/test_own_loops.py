"""Loops of users over bare modules: what is written between two pictures counts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from onediff_ext.building import foreground_scheduler
from onediff_ext.hosts.diffusers.compile import undo_compile
from onediff_ext.hosts.diffusers.compile_module import compile_module
from onediff_ext.session.session import Session
from tests.support import adapter_weights, models
from tests.support.draw import relative_error
from tests.support.transformer_models import lora_state, noise, sd3, sd3_embeddings

SCHEDULE = [981.0, 661.0, 331.0, 1.0]
NOISE = noise(1, 4, 8, 8, seed=5)
PROMPTS = [noise(1, 77, models.TEXT_WIDTH, seed=seed) for seed in range(3)]


class Pair:
    """A model with a LoRA, and its eager twin.

    Args:
        model: It is compiled.
        session: Has its graphs.
    """

    def __init__(self, model: Any, session: Session) -> None:
        self.model, self.session, self.twin = model, session, copy.deepcopy(model)
        compile_module(model, session=session)

    @torch.no_grad()
    def agree(self, *args: Any, **kwargs: Any) -> int:
        """Call both, and compare. Returns the picture's epoch."""
        found, expected = (
            model(*args, return_dict=False, **kwargs)[0] for model in (self.model, self.twin)
        )
        assert relative_error(found, expected) < 1e-4
        return self.session.epoch

    def write(self) -> None:
        """Turn the LoRA's sign, in a way that torch does not count."""
        for model in (self.model, self.twin):
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.data.neg_()


@pytest.fixture
def session(make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setattr(foreground_scheduler, "QUIET_S", 60.0)  # a slow machine is no silence
    return make_session(spot_checks=False)


@pytest.fixture
def pair(session: Session) -> Iterator[Pair]:
    pipe: Any = models.sd15()
    pipe.load_lora_weights(adapter_weights.lora_tensors(pipe, text=False), adapter_name="a")
    made = Pair(pipe.unet, session)
    for _ in range(2):  # graphs are built and compared
        for t in torch.tensor(SCHEDULE):
            made.agree(NOISE, t, PROMPTS[0])
    yield made
    undo_compile(made.model)


@pytest.mark.parametrize("sliced", [False, True])
def test_schedules_of_several_pictures_in_one_table(sliced: bool, pair: Pair) -> None:
    """The rows lie one behind another in memory, as the steps of one schedule do."""
    table, prompts = torch.tensor([SCHEDULE] * len(PROMPTS)), torch.cat(PROMPTS)
    found = []
    for number, timesteps in enumerate(table):
        for t in timesteps:
            prompt = prompts[number : number + 1] if sliced else PROMPTS[number]
            found.append(pair.agree(NOISE, t, prompt))
        pair.write()
    assert [found.count(epoch) for epoch in dict.fromkeys(found)] == [4, 4, 4]


def test_the_rest_of_a_schedule_draws_another_picture(pair: Pair) -> None:
    timesteps = torch.tensor(SCHEDULE)
    begun = [pair.agree(NOISE, t, PROMPTS[1]) for t in timesteps[:2]]
    pair.write()
    rest = [pair.agree(NOISE, t, PROMPTS[2]) for t in timesteps[2:]]
    assert len(set(begun)) == len(set(rest)) == 1
    assert begun[0] < rest[0]


def test_a_timestep_in_a_buffer(pair: Pair) -> None:
    first, buffer = torch.tensor(SCHEDULE[0]), torch.tensor(0.0)
    before = pair.agree(NOISE, first, PROMPTS[1])
    assert [pair.agree(NOISE, buffer.fill_(t), PROMPTS[1]) for t in SCHEDULE[1:]] == [before] * 3
    pair.write()
    assert pair.agree(NOISE, buffer.fill_(900.0), PROMPTS[1]) > before


def test_modes_in_which_no_number_may_be_read(pair: Pair) -> None:
    inputs = (NOISE, torch.tensor(900.0), PROMPTS[0])
    for model in (pair.model, pair.twin):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            for _ in range(2):
                assert model(*map(mode.from_tensor, inputs)).sample.shape == NOISE.shape
        with torch.no_grad():
            make_fx(lambda *given, model=model: model(*given).sample)(*inputs)
    pair.agree(*inputs)


def test_a_complex_timestep(pair: Pair) -> None:
    pair.agree(NOISE, torch.tensor(900.0 + 1j), PROMPTS[0])


def test_a_unet_and_a_transformer_in_turn(pair: Pair) -> None:
    """Modules with equal options share a session."""
    pipe = sd3()
    pipe.load_lora_weights(lora_state(pipe.transformer, ("attn.to_q", "ff.net.2")))
    other = Pair(pipe.transformer, pair.session)
    embeddings = sd3_embeddings(40)
    inputs = (noise(1, 16, 8, 8), embeddings["prompt_embeds"], embeddings["pooled_prompt_embeds"])
    for _ in range(4):
        first = [pair.agree(NOISE, t, PROMPTS[0]) for t in torch.tensor(SCHEDULE)]
        other.write()
        second = [other.agree(*inputs, t.expand(1)) for t in torch.tensor(SCHEDULE)]
        assert len(set(first)) == len(set(second)) == 1
        assert first[0] < second[0]
    undo_compile(other.model)
