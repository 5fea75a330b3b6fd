"""diffusers' other pipelines of transformer models draw eager's pictures: from pictures, masked,
with ControlNets, and several models in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch

from onediff_ext.core.components import ComponentId, Role
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile
from onediff_ext.hosts.diffusers.probe import probe
from onediff_ext.session.session import Session
from tests.support import transformer_models as models
from tests.support.draw import relative_error
from tests.support.frozen_recorder import FrozenRecorder
from tests.support.transformer_pipelines import PIPELINES

MakeSession = Callable[..., Session]

# One for each class of VAE that has graphs; the other pipelines' VAEs are the same.
_WITH_VAE = ("flux, image to image", "flux2-klein, inpainting")


@pytest.mark.parametrize("which", PIPELINES)
def test_whole_forwards_are_replayed(which: str, make_session: MakeSession) -> None:
    """With the pictures' tokens, ControlNet's residuals, and the VAE."""
    variant = PIPELINES[which]
    pipe, twin, session = variant.make(), variant.make(), make_session()
    session.cuda_graphs = CudaGraphCache(FrozenRecorder(), limit=8)
    has_vae = which in _WITH_VAE
    compile_pipe(pipe, session=session, ignores=() if has_vae else ("vae",))
    for _ in range(4):
        found = variant.draw(pipe)
    assert relative_error(found, variant.draw(twin)) < 1e-4
    status = session.status()
    assert status.blocks_compiled == status.blocks_needed
    assert not status.reasons
    components = compiled_state(pipe).components
    roles = {c.role for c in components}
    assert Role.TRANSFORMER in roles
    assert (Role.VAE_ENCODER in roles) == (Role.VAE_DECODER in roles) == has_vae
    assert (Role.CONTROLNET in roles) == ("ControlNet" in which)
    replayed = [c.captured for c in components if c.captured is not None]
    assert [captured.reason for captured in replayed] == [""] * len(replayed)
    assert all(captured.replayed for captured in replayed)
    undo_compile(pipe)


@pytest.mark.parametrize("which", [which for which in PIPELINES if which.endswith("ControlNet")])
def test_the_probe_runs_controlnets_too(which: str, make_session: MakeSession) -> None:
    """So a warm-up finds the kinds of all blocks."""
    pipe, session = PIPELINES[which].make(), make_session()
    compile_pipe(pipe, session=session, ignores=("vae",))
    probe(pipe)
    for component in compiled_state(pipe).components:
        assert {runner.used is not None for runner in component.runners} == {True}
    undo_compile(pipe)


class TwoExperts(diffusers.DiffusionPipeline):
    """A pipeline with two denoisers, as Wan 2.2's: one for much noise, another for the rest."""

    def __init__(self, transformer: Any, transformer_2: Any) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, transformer_2=transformer_2)

    @torch.no_grad()
    def __call__(self, tokens: int) -> torch.Tensor:
        """Draw four steps of a latent [1, 24, C]."""
        latent, ids = models.noise(1, 24, 4 * models.LATENT_CHANNELS), torch.zeros(24, 3)
        given = models.flux_embeddings(tokens)
        for timestep in (0.9, 0.7, 0.4, 0.1):
            model = self.transformer if timestep > 0.5 else self.transformer_2
            latent = (
                latent
                - 0.25
                * model(
                    hidden_states=latent,
                    encoder_hidden_states=given["prompt_embeds"],
                    pooled_projections=given["pooled_prompt_embeds"],
                    timestep=torch.full((1,), timestep),
                    guidance=torch.full((1,), 3.5),
                    img_ids=ids,
                    txt_ids=torch.zeros(tokens, 3),
                ).sample
            )
        return latent


def test_two_denoisers_share_graphs_and_not_weights(make_session: MakeSession) -> None:
    """Each has its CUDA graphs; one that is replaced is compiled at the next picture."""
    pipe, twin = (
        TwoExperts(models.flux_transformer(0), models.flux_transformer(1)) for _ in range(2)
    )
    session = make_session()
    session.cuda_graphs = CudaGraphCache(FrozenRecorder(), limit=8)
    compile_pipe(pipe, session=session)
    for seed in (1, 5):
        for each in (pipe, twin):
            each.transformer_2 = models.flux_transformer(seed)
        for tokens in (5, 5, 5, 9):
            assert relative_error(pipe(tokens), twin(tokens)) < 1e-4
        components = {c.identity: c for c in compiled_state(pipe).components}
        one, two = (ComponentId(Role.TRANSFORMER, number) for number in range(2))
        assert list(components) == [one, two]
        assert components[one].kinds() == components[two].kinds() == session.kinds
        assert len(session.kinds) == 2
        assert all(component.captured.replayed for component in components.values())
    undo_compile(pipe)
    assert not [m for m in pipe.transformer_2.modules() if "forward" in vars(m)]
