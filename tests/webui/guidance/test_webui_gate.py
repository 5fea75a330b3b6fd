"""Frozen cross-attention inside the WebUIs, on UNets with the transformer blocks of each host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from onediff_ext.core.guidance_options import ALL_STEPS, GuidanceOptions
from onediff_ext.core.options import CompileOptions
from onediff_ext.core.shapes import BatchShape
from onediff_ext.engine.blocks.block_kind import BlockKind, KindState
from onediff_ext.engine.guidance.attention_gate import (
    CHANGED,
    CHANGED_ATTENTION,
    NO_ATTENTION,
    NOT_KEPT,
)
from onediff_ext.webui.warm_up_jobs import WarmUpJobs
from tests.support.deepcache_webui_host import ADAPTERS, MEDIUM, DeepCacheWebUI, Job
from tests.support.running_stand_in import running_stand_in
from tests.support.sampler_stand_in import Entry, FakeDenoiser
from tests.webui.guidance import test_webui_guidance as interval_tests
from tests.webui.guidance.test_webui_guidance import (
    SCALE,
    STEPS,
    Batch,
    Texts,
    alike,
    draw,
    said,
    sample,
)

GATE, HALF = GuidanceOptions.parse("gate:0.5"), GuidanceOptions.parse("interval:0-0.5")
GUIDED = 6
FROZEN = f"Guidance and cross-attention left out in {STEPS - GUIDED} of {STEPS} UNet calls"


class OwnBlocks(DeepCacheWebUI):
    """The UNet is the stand-in's own, with the host's classes of blocks."""

    def new_unet(self) -> None:
        """Keep it."""


@pytest.fixture(params=sorted(ADAPTERS))
def host(request: pytest.FixtureRequest, options: CompileOptions) -> Iterator[OwnBlocks]:
    with running_stand_in(request.param) as stand_in:
        host = OwnBlocks(request.param, stand_in, options)
        host.unet.eval().requires_grad_(False)
        yield host


def by_hand(host: OwnBlocks, size: tuple[int, int] = (17, 9), pictures: int = 2) -> torch.Tensor:
    """The loop of `sample`, with cross-attention written out.

    Prompt and negative prompt are calls of their own.
    """
    layer = host.unet.transformer.attn2
    own, texts = layer.forward, Texts(Batch(pictures))
    kept: list[torch.Tensor] = []

    def keeping(*args: Any, **kwargs: Any) -> torch.Tensor:
        kept.append(own(*args, **kwargs))
        return kept[-1]

    x = first_latents(pictures, size)
    try:
        for number in range(STEPS):
            time = torch.full((pictures,), 900.0 - 20 * number)
            if number == GUIDED - 1:
                layer.forward = keeping
            if number == GUIDED:
                frozen = (kept[0] + kept[1]) / 2
                layer.forward = lambda *_, **__: frozen  # noqa: B023
            prompt = host.call(x, time, texts.prompts)
            if number < GUIDED:
                negative = host.call(x, time, texts.negatives)
                prompt = negative + SCALE * (prompt - negative)
            x = x - 0.02 * prompt
    finally:
        del layer.forward
    return x


def first_latents(pictures: int, size: tuple[int, int]) -> torch.Tensor:
    return torch.randn(pictures, 4, *size, generator=torch.Generator().manual_seed(3))


def attended(host: OwnBlocks) -> list[BlockKind]:
    """The kinds of blocks without their cross-attention."""
    parts = [*host.graphs.models.attached, *host.graphs.models.suspended]
    kinds = [kind for part in parts for kind in part.component.kinds()]
    return [kind for kind in kinds if "attended" in kind.key.entries["call"]]


@pytest.mark.parametrize("pictures", [1, 2])
def test_pictures_are_those_of_the_loop_written_out(host: OwnBlocks, pictures: int) -> None:
    expected, before = by_hand(host, pictures=pictures), host.attributes()

    def batches(_: int) -> Batch:
        return Batch(pictures)

    whole = draw(host, ALL_STEPS, batches=batches)
    assert not attended(host)
    for _ in range(3):
        assert alike(draw(host, GATE, batches=batches), expected)
        assert said(host) == FROZEN
        assert said(host) in host.graphs.status().line()
        assert host.attributes() == before
    assert [kind.state for kind in attended(host)] == [KindState.READY]
    assert not alike(whole, expected)
    assert not alike(draw(host, HALF, batches=batches), expected)
    assert alike(draw(host, ALL_STEPS, batches=batches), whole)


def test_a_block_whose_other_layers_read_the_prompt_runs_eager(host: OwnBlocks) -> None:
    host.unet.transformer.disable_self_attn = True
    expected = by_hand(host)
    for _ in range(2):
        assert alike(draw(host, GATE), expected)
    assert said(host) == FROZEN
    assert not attended(host)


def test_a_second_pass_of_another_size_has_outputs_of_its_own(
    host: OwnBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [(17, 9), (24, 20), (17, 9)]
    expected = [by_hand(host, size) for size in sizes]
    p = Job()
    host.graphs.begin(p, host.options, guidance_steps=GATE)
    for size, hand in zip(sizes, expected, strict=True):
        host.graphs.before_sampling(p)
        monkeypatch.setattr(
            interval_tests, "first_latents", lambda n, size=size: first_latents(n, size)
        )
        assert alike(sample(host, host.graphs.before_step, p), hand)
    host.graphs.after_sampling(p)
    host.graphs.end(p)
    assert said(host) == "Guidance and cross-attention left out in 18 of 36 UNet calls"


def test_an_exception_leaves_nothing_to_the_next_picture(host: OwnBlocks) -> None:
    before, expected = host.attributes(), by_hand(host)
    for at in (GUIDED - 1, GUIDED, GUIDED + 2):
        p = Job()
        host.graphs.begin(p, host.options, guidance_steps=GATE)
        host.graphs.before_sampling(p)

        def interrupted(number: int, at: int = at) -> Batch:
            if number == at:
                raise KeyboardInterrupt
            return Batch()

        with pytest.raises(KeyboardInterrupt):
            sample(host, host.graphs.before_step, p, interrupted)
        p.close()
        assert host.attributes() == before
        assert alike(draw(host, GATE), expected)


def test_a_text_that_changes_after_the_gate_has_cross_attention_again(
    host: OwnBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scheduled(end: int) -> None:
        monkeypatch.setattr(
            interval_tests,
            "FakeDenoiser",
            lambda p, name, total, _: FakeDenoiser(p, name, total, [Entry(end), Entry(10_000)]),
        )

    half = draw(host, HALF)
    scheduled(GUIDED - 2)
    assert alike(draw(host, GATE), by_hand(host))
    assert said(host) == FROZEN
    scheduled(GUIDED - 1)  # the next text is that of the first step after the gate
    assert alike(draw(host, GATE), half)
    assert said(host) == f"Guidance left out, cross-attention in 0 calls: {CHANGED}"
    scheduled(GUIDED + 1)
    draw(host, GATE)
    assert said(host) == f"Guidance left out, cross-attention in 2 calls: {CHANGED}"


def test_a_gates_step_in_parts_keeps_nothing(host: OwnBlocks) -> None:
    def batches(number: int) -> Batch:
        return Batch(negatives=int(number != GUIDED - 1))

    expected = sample(host, lambda _: None, Job(), lambda n: Batch(negatives=int(n < GUIDED - 1)))
    assert alike(draw(host, GATE, batches=batches), expected)
    assert said(host) == f"Guidance left out, cross-attention in 0 calls: {NOT_KEPT}"


def test_a_layer_that_an_extension_changes_is_computed(host: OwnBlocks) -> None:
    half = draw(host, HALF)
    handle = host.unet.transformer.attn2.register_forward_hook(lambda *_: None)
    assert alike(draw(host, GATE), half)
    assert said(host) == f"Guidance left out, cross-attention in 0 calls: {CHANGED_ATTENTION}"
    handle.remove()
    assert alike(draw(host, GATE), by_hand(host))


def test_a_unet_without_known_blocks_leaves_guidance_alone_out(
    host: OwnBlocks, options: CompileOptions
) -> None:
    other = DeepCacheWebUI(host.name, host.stand_in, options)
    half = draw(other, HALF)
    assert alike(draw(other, GATE), half)
    assert said(other) == f"Guidance left out, cross-attention in 0 calls: {NO_ATTENTION}"
    draw(other, GATE, MEDIUM)
    assert "UNet calls shallow" in other.graphs.status().line()


def test_a_warm_up_builds_what_the_first_picture_needs(host: OwnBlocks) -> None:
    before, expected = host.attributes(), by_hand(host)
    warm_ups, shapes = WarmUpJobs(host.graphs), [BatchShape(72, 136, 2)]
    assert warm_ups.run(shapes, host.options) is not None
    assert not attended(host)
    assert warm_ups.run(shapes, host.options, guidance_steps=GATE) is not None
    assert [kind.state for kind in attended(host)] == [KindState.READY]
    assert host.attributes() == before
    session = host.graphs.session
    assert session is not None
    built = session.count("built")
    assert alike(draw(host, GATE), expected)
    assert session.count("built") == built
