"""Blocks that cannot be trusted run eager, and the reason is counted."""

from __future__ import annotations

import pkgutil

import pytest
import torch

from onediff_ext.core.errors import BackendError
from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.hosts.diffusers.compile import compile_pipe
from tests.support import models
from tests.support.draw import draw_latents, relative_error
from tests.support.session_fixtures import InstantWorker


@pytest.fixture
def pipe_and_latents():
    pipe = models.sd15()
    return pipe, draw_latents(pipe)


def _spoiled(session, monkeypatch, spoil):
    load = session.backend.load

    def load_spoiled(payload, device):
        graph = load(payload, device)
        return lambda arguments: tuple(spoil(output) for output in graph(arguments))

    monkeypatch.setattr(session.backend, "load", load_spoiled)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda output: output * 1.05, "differs from eager"),
        (lambda output: output * 1.001, "is off by"),
        (lambda output: output * float("nan"), "NaN"),
        (lambda output: output[:, :1], "gave float32"),
        (lambda output: output.double(), "gave float64"),
        (lambda output: 1 / 0, "failed while running"),
    ],
)
def test_a_wrong_graph_is_never_used(
    pipe_and_latents, make_session, monkeypatch, tmp_path, spoil, reason
):
    pipe, expected = pipe_and_latents
    # A store of its own: that these graphs are bad is remembered.
    session = make_session(store=tmp_path / "store")
    monkeypatch.setattr(
        session.build_context,
        "new_worker",
        lambda cache, in_background: InstantWorker("eager", cache),
    )
    _spoiled(session, monkeypatch, spoil)
    compile_pipe(pipe, session=session)
    for _ in range(3):
        assert relative_error(draw_latents(pipe), expected) < 1e-4
    used = [kind for kind in session.kinds if kind.calls > 2]
    assert {kind.state for kind in used} == {KindState.FAILED}
    assert all(reason in kind.reason for kind in used)
    assert any(reason in fallback.reason for fallback in session.fallbacks())


def test_a_kind_that_cannot_be_built_runs_eager(
    pipe_and_latents, make_session, tmp_path, monkeypatch
):
    pipe, expected = pipe_and_latents
    session = make_session(store=tmp_path / "store")

    def refuse(worker, program, device):
        raise BackendError("no compiler here")

    monkeypatch.setattr(session.build_context, "build_in", refuse)
    compile_pipe(pipe, session=session)
    for _ in range(2):
        assert relative_error(draw_latents(pipe), expected) < 1e-4
    assert {kind.reason for kind in session.kinds} == {"could not be built: no compiler here"}
    assert session.fallbacks()[0].count > 0


def test_a_graph_that_cannot_be_loaded_is_built_again(make_session, tmp_path, monkeypatch):
    first = make_session(store=tmp_path / "store")
    draw_latents(compile_pipe(models.sd15(), session=first, ignores="vae"))
    second = make_session(store=tmp_path / "store")
    load, calls = second.backend.load, []

    def load_once_broken(payload, device):
        calls.append(1)
        if len(calls) == 1:
            raise BackendError("bytes of another machine")
        return load(payload, device)

    monkeypatch.setattr(second.backend, "load", load_once_broken)
    pipe = models.sd15()
    expected = draw_latents(pipe)
    compile_pipe(pipe, session=second, ignores="vae")
    draw_latents(pipe)
    assert relative_error(draw_latents(pipe), expected) < 1e-4
    assert all(kind.state is KindState.READY for kind in second.kinds)


def test_an_unknown_attention_processor_is_left_alone(pipe_and_latents, make_session):
    from diffusers.models.attention_processor import AttnProcessor2_0

    class Darker(AttnProcessor2_0):
        def __call__(self, attn, hidden_states, *args, **kwargs):
            return 0.5 * super().__call__(attn, hidden_states, *args, **kwargs)

    pipe, before = pipe_and_latents
    session = make_session()
    compile_pipe(pipe, session=session, ignores="vae")
    draw_latents(pipe)
    draw_latents(pipe)
    original = pipe.unet.attn_processors
    pipe.unet.set_attn_processor(Darker())
    darker = draw_latents(pipe)
    assert any("Darker" in fallback.reason for fallback in session.fallbacks())
    reference = models.sd15()
    reference.unet.set_attn_processor(Darker())
    assert relative_error(darker, draw_latents(reference)) < 1e-4
    assert relative_error(darker, before) > 1e-3
    pipe.unet.set_attn_processor(original)
    assert relative_error(draw_latents(pipe), before) < 1e-4


def test_hooks_and_replaced_forwards_inside_a_block_are_honoured(pipe_and_latents, make_session):
    pipe, before = pipe_and_latents
    session = make_session()
    compile_pipe(pipe, session=session, ignores="vae")
    draw_latents(pipe)
    draw_latents(pipe)
    linear = pipe.unet.mid_block.attentions[0].transformer_blocks[0].ff.net[2]
    handle = linear.register_forward_hook(lambda module, args, output: output * 0)
    changed = draw_latents(pipe)
    assert relative_error(changed, before) > 1e-4
    assert any("hook" in fallback.reason for fallback in session.fallbacks())
    handle.remove()
    assert relative_error(draw_latents(pipe), before) < 1e-4
    block = pipe.unet.mid_block.attentions[0].transformer_blocks[0]
    handle = block.register_forward_hook(lambda module, args, output: output * 0)
    assert relative_error(draw_latents(pipe), before) > 1e-4  # on the block itself
    handle.remove()
    linear.forward = lambda x: torch.zeros(*x.shape[:-1], linear.out_features)
    assert relative_error(draw_latents(pipe), changed) < 1e-4
    del linear.forward


@pytest.mark.parametrize(
    "path",
    [
        "diffusers.models.attention.BasicTransformerBlock",
        "diffusers.models.activations.GEGLU",
        "diffusers.models.resnet.ResnetBlock2D",
        "torch.nn.SiLU",
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_patched_classes(pipe_and_latents, make_session, monkeypatch, path, when):
    """A graph knows nothing of a patch made since, and must not hand one on to the next process."""
    pipe, plain = pipe_and_latents
    cls = pkgutil.resolve_name(path)
    own = cls.forward

    def changed(self, *args, **kwargs):
        return own(self, *args, **kwargs) * 1.5

    with monkeypatch.context() as patch:
        patch.setattr(cls, "forward", changed)
        expected = draw_latents(pipe)
    assert relative_error(plain, expected) > 1e-2
    session = make_session("eager")
    with monkeypatch.context() as patch:
        if when == "before":
            patch.setattr(cls, "forward", changed)
        compile_pipe(pipe, session=session)
        for _ in range(2):
            draw_latents(pipe)
        patch.setattr(cls, "forward", changed)
        assert relative_error(draw_latents(pipe), expected) < 1e-4
        reason = f"{cls.__name__} is patched by {__name__} (forward)"
        assert reason in {fallback.reason for fallback in session.fallbacks()}
    for _ in range(2):
        draw_latents(pipe)
    assert relative_error(draw_latents(pipe), plain) < 1e-4
    assert not any(kind.graph is None for kind in session.kinds)


def test_training_and_gradients_run_eager(make_session):
    unet = models.sd15().unet.requires_grad_(True)
    holder = type("Holder", (), {})()
    holder.unet = unet
    session = make_session()
    compile_pipe(holder, session=session)
    unet(**models.unet_inputs(unet)).sample.sum().backward()
    assert unet.conv_in.weight.grad is not None
    assert {fallback.reason for fallback in session.fallbacks()} == {"gradients are enabled"}


def test_more_images_than_a_graph_allows_run_eager(make_session):
    unet = models.sd15().unet
    holder = type("Holder", (), {})()
    holder.unet = unet
    inputs = models.unet_inputs(unet, 70, 8, 8)
    with torch.no_grad():
        expected = unet(**inputs).sample
        session = make_session()
        compile_pipe(holder, session=session)
        assert relative_error(unet(**inputs).sample, expected) < 1e-5
    assert "63 images" in session.fallbacks()[0].reason
