"""Frozen cross-attention: pictures equal T-GATE written out, eager, compiled and captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.engine.blocks.block_tree import BlockTree
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.export.exporter import export_block
from onediff_ext.engine.guidance.guided_forward import GuidedForward
from onediff_ext.engine.quantization import QuantizedWeights, outlines, plan
from onediff_ext.hosts.diffusers.blocks import TransformerFamily
from onediff_ext.hosts.diffusers.compile import compile_pipe
from onediff_ext.hosts.diffusers.guidance_steps import guidance_steps_for
from onediff_ext.session.session import Session
from tests.engine.test_quantization import ERROR, LINEARS, _block, _call
from tests.support import models
from tests.support.draw import relative_error
from tests.support.frozen_recorder import FrozenRecorder
from tests.support.plain_gate import plain_gate

NewSession = Callable[..., Session]
STEPS, GUIDED = 5, 2
GATE = GuidanceOptions.parse("gate:0.4")
PROMPTS = ("a cat", "a red car", "two ships at night")
# Height and width of odd numbers of cells, and the pictures at once.
SIZES = [(72, 104, 1), (72, 104, 2), (104, 72, 1), (64, 64, 2), (72, 104, 1)]


def draw(pipe: Any, height: int, width: int, batch: int, prompt: str = "a cat") -> torch.Tensor:
    with torch.no_grad():
        latents: torch.Tensor = pipe(
            prompt=[prompt] * batch, negative_prompt=["blurred"] * batch, height=height,
            width=width, num_inference_steps=STEPS, output_type="latent",
            generator=[torch.Generator().manual_seed(n) for n in range(batch)],
        ).images  # fmt: skip
    return latents


def gated(pipe: Any, *how: Any, options: GuidanceOptions = GATE) -> torch.Tensor:
    return gated_and_look(pipe, *how, options=options)[0]


def gated_and_look(
    pipe: Any, *how: Any, options: GuidanceOptions = GATE
) -> tuple[torch.Tensor, GuidedForward]:
    with guidance_steps_for(pipe, options) as guided:
        latents = draw(pipe, *how)
    assert guided is not None
    assert guided.gate is not None
    return latents, guided


def expected(pipe: Any, *how: Any) -> torch.Tensor:
    with plain_gate(pipe, GUIDED):
        return draw(pipe, *how)


@pytest.mark.parametrize("model", ["sd15", "sd2", "sdxl"])
def test_eager_pictures_equal_those_written_out(model: str) -> None:
    pipe = getattr(models, model)()
    for size in SIZES:
        for prompt in PROMPTS[:2]:
            found, guided = gated_and_look(pipe, *size, prompt)
            assert relative_error(found, expected(pipe, *size, prompt)) < 1e-4
            assert guided.counts == {"guidance": GUIDED, "prompt": STEPS - GUIDED}
            assert guided.gate is not None
            assert (guided.gate.frozen, guided.gate.reason) == (STEPS - GUIDED, "")
    plain = draw(pipe, *SIZES[0])
    assert relative_error(gated(pipe, *SIZES[0]), plain) > 1e-3
    assert torch.equal(draw(pipe, *SIZES[0]), plain)


def test_compiled_pictures_equal_those_written_out(make_session: NewSession) -> None:
    reference, pipe = models.one_width("sd15"), models.one_width("sd15")
    session = make_session("inductor")
    compile_pipe(pipe, session=session, ignores=["vae"])
    plain = [draw(pipe, *SIZES[0]) for _ in range(2)][1]
    kinds = len(session.kinds)
    gated(pipe, *SIZES[0])  # builds
    assert len(session.kinds) == kinds + 1  # the block without its cross-attention
    built = session.count("built")
    for size in SIZES:
        for prompt in PROMPTS[:2]:
            found = gated(pipe, *size, prompt)
            assert relative_error(found, expected(reference, *size, prompt)) < 1e-4
    assert session.count("built") == built
    assert len(session.kinds) == kinds + 1
    assert session.fallbacks() == []
    assert torch.equal(draw(pipe, *SIZES[0]), plain)


@pytest.fixture
def recorder() -> FrozenRecorder:
    return FrozenRecorder()


@pytest.fixture
def session(make_session: NewSession, recorder: FrozenRecorder) -> Session:
    session = make_session()
    session.cuda_graphs = CudaGraphCache(recorder, limit=16)
    return session


@pytest.mark.parametrize("model", ["sd15", "sdxl"])
def test_captured_pictures_equal_those_written_out(
    model: str, session: Session, recorder: FrozenRecorder
) -> None:
    reference, pipe = getattr(models, model)(), getattr(models, model)()
    compile_pipe(pipe, session=session, ignores=["vae"])
    sizes = SIZES[1:3]
    for turn in range(7):
        prompt = PROMPTS[turn % 3]
        for size in sizes:
            found = gated(pipe, *size, prompt)
            assert relative_error(found, expected(reference, *size, prompt)) < 1e-4
    # Whole, the gate's step, and frozen, at each size.
    assert len(session.cuda_graphs) == 6
    assert len(recorder.prompts) == len(sizes)  # keys and values of the steps before the gate
    made = recorder.recorded
    before = recorder.replays
    gated(pipe, *sizes[0])
    assert recorder.recorded == made
    assert recorder.replays - before >= STEPS
    assert session.fallbacks() == []


@torch.no_grad()
def test_in_8_bits_a_block_is_close_to_the_exact_one_with_the_same_copies() -> None:
    family, block = TransformerFamily(), _block()
    output = torch.randn(2, 20, 64)
    call = family.with_attention(_call(), output)
    tree = BlockTree.of(block, family)
    names, weights = tree.names, tree.weights()
    assert weights is not None
    whole = plan(names, weights, "int8", LINEARS, family.prompt_layers)
    assert whole is not None
    program = export_block(
        tree.copy(), family, names, outlines(weights, whole), call, torch.device("cpu"),
        quantization=whole,
    )  # fmt: skip
    found = program.module()(QuantizedWeights(whole).apply(weights, 0), *call.tensors)[0]
    block.attn2.forward = lambda *_, **__: output
    error = relative_error(found, block(call.tensors[0]))
    assert 1e-4 < error < ERROR["int8"]
