"""Guidance steps inside the WebUIs: equal to the loop written out, and why batches run whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from onediff_ext.core.guidance_options import ALL_STEPS, GuidanceOptions
from onediff_ext.engine.guidance.guided_forward import GuidedForward
from onediff_ext.hosts.ldm_guidance import OTHER_BATCH, OTHER_LATENTS, PATCHED
from tests.support.deepcache_webui_host import MEDIUM, DeepCacheWebUI, Job
from tests.support.sampler_stand_in import Entry, FakeDenoiser

STEPS, SCALE = 12, 5.0
HALF = GuidanceOptions.parse("interval:0-0.5")


class Batch(NamedTuple):
    """One prediction as a host draws it.

    Args:
        pictures: How many.
        prompts: Rows for each picture; more than one with AND.
        negatives: Rows for each picture; 0 with NGMS.
        split: Whether prompt and negative prompt are calls of their own.
        again: Whether an extension calls the UNet once more for the prompt.
        moved: Whether their latents differ, as those of two regions.
        options: More of Forge's ``transformer_options``.
    """

    pictures: int = 2
    prompts: int = 1
    negatives: int = 1
    split: bool = False
    again: bool = False
    moved: bool = False
    options: Mapping[str, Any] = MappingProxyType({})


class Texts:
    """The encoded prompts and negative prompts."""

    def __init__(self, batch: Batch) -> None:
        noise = torch.Generator().manual_seed(10)
        self.prompts = torch.randn(batch.pictures * batch.prompts, 77, 24, generator=noise)
        self.negatives = torch.randn(batch.pictures, 77, 24, generator=noise)


def first_latents(pictures: int) -> torch.Tensor:
    return torch.randn(pictures, 4, 17, 9, generator=torch.Generator().manual_seed(3))


def sample(
    host: DeepCacheWebUI,
    before_step: Callable[[Any], None],
    p: Any,
    batches: Callable[[int], Batch] = lambda _: Batch(),
    total: int | None = STEPS,
    count: int = STEPS,
) -> torch.Tensor:
    """One run of a sampler with classifier-free guidance; returns the latents [B, 4, h, w]."""
    denoiser = FakeDenoiser(p, "Euler", total or 0, [Entry(10_000)])
    x = first_latents(batches(0).pictures)
    for number in range(count):
        batch = batches(number)
        texts = Texts(batch)
        before_step(
            SimpleNamespace(denoiser=denoiser, text_cond=texts.prompts, text_uncond=texts.negatives)
        )
        x = x - 0.02 * _guided(host, x, 900.0 - 20 * number, texts, batch)
        denoiser.step += 1
    return x


def _guided(
    host: DeepCacheWebUI, x: torch.Tensor, timestep: float, texts: Texts, batch: Batch
) -> torch.Tensor:
    """One prediction. A1111 has the prompts first; Forge tells its order, here the other one."""
    is_forge = host.name != "a1111"
    parts = [(0, texts.prompts)] + [(1, texts.negatives)] * batch.negatives
    parts = parts[::-1] if is_forge else parts
    found: dict[int, torch.Tensor] = {}
    groups = [[part] for part in parts] if batch.split else [parts]
    for group in [*groups, *([[(0, texts.prompts)]] if batch.again else [])]:
        latents = [x.repeat_interleave(len(text) // len(x), 0) for _, text in group]
        if batch.moved:
            latents = [latent + number for number, latent in enumerate(latents)]
        given = torch.cat(latents)
        arguments: dict[str, Any] = {}
        if is_forge:
            arguments["transformer_options"] = {
                "cond_or_uncond": [part for part, _ in group],
                "sigmas": torch.full((len(x),), timestep),
                "cond_mark": torch.cat([torch.full((len(x),), float(p)) for p, _ in group]),
                **batch.options,
            }
        context = torch.cat([text for _, text in group])
        drawn = host.call(given, torch.full((len(given),), timestep), context, **arguments)
        sizes = [len(text) for _, text in group]
        found |= {part: rows for (part, _), rows in zip(group, drawn.split(sizes), strict=True)}
    prompts = found[0].view(len(x), -1, *x.shape[1:]).mean(1)
    negative = found.get(1, prompts)
    return negative + SCALE * (prompts - negative)


def draw(
    host: DeepCacheWebUI, options: GuidanceOptions, deepcache: Any = None, **how: Any
) -> torch.Tensor:
    """A whole job with one pass."""
    p = Job()
    more = {} if deepcache is None else {"deepcache": deepcache}
    host.graphs.begin(p, host.options, guidance_steps=options, **more)
    host.graphs.before_sampling(p)
    latents = sample(host, host.graphs.before_step, p, **how)
    host.graphs.after_sampling(p)
    host.graphs.end(p)
    return latents


def by_hand(host: DeepCacheWebUI, guided: range, pictures: int = 2) -> torch.Tensor:
    """The same with the prompt alone in the other steps."""
    p = Job()

    def batches(number: int) -> Batch:
        return Batch(pictures, negatives=int(number in guided))

    return sample(host, lambda _: None, p, batches)


def alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).norm() < 1e-4 * expected.norm())


def said(host: DeepCacheWebUI) -> str:
    return host.graphs.status().guidance


@pytest.mark.parametrize("pictures", [1, 2])
def test_pictures_are_those_of_the_loop_written_out(host: DeepCacheWebUI, pictures: int) -> None:
    expected = by_hand(host, range(6), pictures)
    before = host.attributes()
    whole = draw(host, ALL_STEPS, batches=lambda _: Batch(pictures))
    assert said(host) == ""
    found = draw(host, HALF, batches=lambda _: Batch(pictures))
    assert alike(found, expected)
    assert not alike(whole, expected)
    assert said(host) == "Guidance left out in 6 of 12 UNet calls"
    assert said(host) in host.graphs.status().line()
    assert host.attributes() == before
    assert torch.equal(draw(host, ALL_STEPS, batches=lambda _: Batch(pictures)), whole)


def test_an_interval_in_the_middle(host: DeepCacheWebUI) -> None:
    found = draw(host, GuidanceOptions.parse("interval:0.25-0.75"))
    assert alike(found, by_hand(host, range(3, 9)))


def test_with_deepcache_the_other_batch_makes_a_full_call(host: DeepCacheWebUI) -> None:
    draw(host, HALF, MEDIUM)
    assert host.calls == (4, 8)  # 0, 3; 6, 9
    assert said(host) == "Guidance left out in 6 of 12 UNet calls"
    draw(host, GuidanceOptions.parse("interval:0-0.34"), MEDIUM)
    assert host.calls == (5, 7)  # 0, 3; 5, 8, 11
    line = host.graphs.status().line()
    assert "UNet calls shallow; Guidance left out" in line


def test_adaptive_guidance_ends(host: DeepCacheWebUI) -> None:
    found = draw(host, GuidanceOptions.parse("adaptive:0.0001"))
    assert alike(found, by_hand(host, range(1)))
    assert said(host) == "Guidance left out in 11 of 12 UNet calls"


WHOLE: dict[str, tuple[Callable[[int], Batch], str]] = {
    "a AND b": (lambda _: Batch(prompts=2), OTHER_BATCH),
    "without a negative prompt": (lambda _: Batch(negatives=0), OTHER_BATCH),
    "split": (lambda _: Batch(split=True), OTHER_BATCH),
    "called again": (lambda _: Batch(again=True), OTHER_BATCH),
    "regions": (lambda _: Batch(moved=True), OTHER_LATENTS),
}


@pytest.mark.parametrize("name", WHOLE)
def test_other_batches_run_whole(host: DeepCacheWebUI, name: str) -> None:
    batches, reason = WHOLE[name]
    expected = draw(host, ALL_STEPS, batches=batches)
    assert torch.equal(draw(host, HALF, batches=batches), expected)
    assert said(host) == f"Guidance in all steps: {reason}"


def test_ngms_leaves_its_own_steps_out(host: DeepCacheWebUI) -> None:
    def alternating(number: int) -> Batch:
        return Batch(negatives=number % 2)

    expected = sample(
        host, lambda _: None, Job(), lambda n: Batch(negatives=int(n % 2 == 1 and n < 6))
    )
    assert alike(draw(host, HALF, batches=alternating), expected)
    assert said(host) == "Guidance left out in 3 of 12 UNet calls"


@pytest.mark.parametrize(
    ("added", "reason"),
    [
        ({"patches": {"attn2_patch": [print]}}, PATCHED),
        ({"patches_replace": {"attn1": {"a": print}}}, PATCHED),
        ({"block_modifiers": [print]}, PATCHED),
        ({"group_norm_wrapper": print}, PATCHED),
        ({"regions": torch.ones(4, 1)}, "an argument may have other rows: regions"),
    ],
)
def test_what_extensions_add_runs_whole(
    host: DeepCacheWebUI, added: dict[str, Any], reason: str
) -> None:
    if host.name == "a1111":
        pytest.skip("it has no such options")
    draw(host, HALF, batches=lambda _: Batch(options=added))
    assert said(host) == f"Guidance in all steps: {reason}"


def test_a_sampler_that_asks_more_often_than_expected(host: DeepCacheWebUI) -> None:
    draw(host, HALF, count=15)
    assert said(host) == "Guidance left out in 9 of 15 UNet calls"
    draw(host, GuidanceOptions.parse("interval:0.5-1"), count=15)
    assert said(host) == "Guidance left out in 6 of 15 UNet calls"


def test_a_sampler_that_does_not_say_how_many_steps_there_are(host: DeepCacheWebUI) -> None:
    expected = draw(host, ALL_STEPS, total=None)
    assert torch.equal(draw(host, HALF, total=None), expected)
    assert "does not say how many steps" in said(host)


def test_a_second_pass_begins_at_its_first_step(host: DeepCacheWebUI) -> None:
    p = Job()
    host.graphs.begin(p, host.options, guidance_steps=HALF)
    for _ in range(2):
        host.graphs.before_sampling(p)
        found = sample(host, host.graphs.before_step, p)
        assert alike(found, by_hand_within(host))
    host.graphs.after_sampling(p)
    host.graphs.end(p)
    assert said(host) == "Guidance left out in 12 of 24 UNet calls"


def by_hand_within(host: DeepCacheWebUI) -> torch.Tensor:
    """`by_hand`, while a job's graphs and guidance steps are in place: on another thread."""
    import threading

    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(by_hand(host, range(6))))
    thread.start()
    thread.join()
    return found[0]


def test_an_exception_leaves_the_unet_as_it_was(host: DeepCacheWebUI) -> None:
    before = host.attributes()
    p = Job()
    host.graphs.begin(p, host.options, guidance_steps=HALF)
    host.graphs.before_sampling(p)

    def interrupted(number: int) -> Batch:
        if number == 8:
            raise KeyboardInterrupt
        return Batch()

    with pytest.raises(KeyboardInterrupt):
        sample(host, host.graphs.before_step, p, interrupted)
    assert isinstance(vars(host.unet)["forward"], GuidedForward)
    p.close()  # of the host, after any error
    assert host.attributes() == before
    assert alike(draw(host, HALF), by_hand(host, range(6)))


def test_without_the_unet_the_status_says_so(host: DeepCacheWebUI) -> None:
    p = Job()
    host.graphs.begin(p, host.options, frozenset({"unet"}), guidance_steps=HALF)
    host.graphs.before_sampling(p)
    sample(host, host.graphs.before_step, p)
    host.graphs.end(p)
    assert said(host) == "Guidance in all steps: the UNet is not among the components"
