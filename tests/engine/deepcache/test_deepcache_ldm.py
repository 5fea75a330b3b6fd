"""DeepCache on UNets of the form that the WebUIs have, called as each of them does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from onediff_ext.core.deepcache_options import DeepCacheOptions
from onediff_ext.core.errors import OptionError
from onediff_ext.engine.cuda_graphs.half_batches import run_in_halves
from onediff_ext.engine.deepcache.deepcache_forward import DeepCache
from onediff_ext.hosts.ldm_deepcache_unet import LdmUNet
from onediff_ext.hosts.unet_adapters import adapter_for
from tests.support.ldm_models import LDM_UNETS, CompvisUNet, ForgeUNet

HOSTS = sorted(LDM_UNETS)
SIZES = [(16, 16), (17, 25), (12, 9), (30, 11)]
DEPTHS = [0, 1, 3, 6]


def inputs(seed: int, height: int = 17, width: int = 25, batch: int = 2) -> dict[str, Any]:
    """x [B, 4, h, w], timesteps [B], context [B, 77, 24]."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(batch, 4, height, width, generator=generator),
        "timesteps": torch.full((batch,), 900.0 - 40 * seed),
        "context": torch.randn(batch, 77, 24, generator=torch.Generator().manual_seed(99)),
    }


class ShortOfMemory:
    """A forward that some calls run in halves, as one that has no memory for the whole batch."""

    def __init__(self, forward: Any) -> None:
        self.forward, self.halved = forward, False

    def __call__(self, **given: Any) -> Any:
        if not self.halved:
            return self.forward(**given)
        return run_in_halves(self.forward, (), given, torch.OutOfMemoryError("none left"))


def residuals(unet: CompvisUNet, given: dict[str, Any], seed: int) -> dict[str, list[Any]]:
    """The tensors that a ControlNet adds: for each skip connection, the middle, and the encoder."""
    shapes, hooks = [], []
    for block in [*unet.input_blocks, unet.middle_block]:
        hooks.append(block[-1].register_forward_hook(lambda *a: shapes.append(a[2].shape)))
    unet(**given)
    for hook in hooks:
        hook.remove()
    generator = torch.Generator().manual_seed(seed)
    *skips, middle = [torch.randn(shape, generator=generator) for shape in shapes]
    into = [0.1 * torch.randn(s.shape, generator=generator) for s in skips]
    return {"output": skips, "middle": [middle], "input": into[::-1]}


def by_hand(
    unet: CompvisUNet, given: dict[str, Any], depth: int, deep: torch.Tensor | None, control: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise prediction and the feature at `depth`, whose value may be given: what DeepCache is,
    written out."""
    x, context, emb = given["x"], given["context"], unet.embed(given["timesteps"])
    count = len(unet.input_blocks)
    hs, h = [], x
    for i, block in enumerate(unet.input_blocks):
        h = unet_block(unet, block, h, emb, context)
        if control:
            h = h + control["input"][count - 1 - i]
        hs.append(h)
    h = unet_block(unet, unet.middle_block, h, emb, context)
    if control:
        h = h + control["middle"][0]
    for k, block in enumerate(unet.output_blocks):
        skip = hs.pop()
        if control:
            skip = skip + control["output"][count - 1 - k]
        if k == count - depth - 1:
            deep = h if deep is None else deep
            h = deep
        if isinstance(unet, ForgeUNet):
            shape = hs[-1].shape if hs else None
            h = unet_block(unet, block, torch.cat([h, skip], 1), emb, context, shape)
        else:
            if h.shape[2:] != skip.shape[2:]:
                h = torch.nn.functional.interpolate(h, skip.shape[2:])
            h = unet_block(unet, block, torch.cat([h, skip], 1), emb, context)
    assert deep is not None
    return unet.out(h), deep


def unet_block(unet: Any, block: Any, h: Any, emb: Any, context: Any, shape: Any = None) -> Any:
    """One block, by its layers."""
    return type(block).forward(block, h, emb, context, shape)


def cached(unet: CompvisUNet, options: object) -> DeepCache:
    """DeepCache around a UNet."""
    cache = DeepCache(unet, adapter_for(unet))
    cache.install()
    cache.begin_picture(DeepCacheOptions.parse(options))
    return cache


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_equals_deepcache_written_out(host: str, depth: int):
    unet = LDM_UNETS[host]()
    reference = copy.deepcopy(unet)
    cache = cached(unet, f"3 depth={depth}")
    with torch.no_grad():
        for height, width in SIZES:
            cache.begin_picture()
            deep = None
            for step in range(5):
                given = inputs(step, height, width)
                expected, deep = by_hand(reference, given, depth, deep if step % 3 else None, None)
                torch.testing.assert_close(unet(**given), expected, atol=1e-5, rtol=1e-4)
    assert cache.counts == {"full": 2, "shallow": 3}


@pytest.mark.parametrize("host", HOSTS)
def test_interval_one_and_full_calls_are_the_unets_own_bit_for_bit(host: str):
    unet = LDM_UNETS[host]()
    with torch.no_grad():
        expected = [unet(**inputs(step)) for step in range(4)]
        cache = cached(unet, 1)
        assert all(torch.equal(unet(**inputs(step)), expected[step]) for step in range(4))
        cache.begin_picture(DeepCacheOptions(3))
        assert torch.equal(unet(**inputs(0)), expected[0])
        assert not torch.equal(unet(**inputs(1)), expected[1])


@pytest.mark.parametrize("host", ["forge", "reforge"])
@pytest.mark.parametrize("depth", [0, 2, 3])
def test_control_reaches_the_blocks_that_it_is_for(host: str, depth: int):
    unet = LDM_UNETS[host]()
    reference = copy.deepcopy(unet)
    cache = cached(unet, f"3 depth={depth}")
    with torch.no_grad():
        deep = None
        for step in range(3):
            given = inputs(step)
            control = residuals(reference, given, seed=step)
            expected, deep = by_hand(reference, given, depth, deep, control)
            kept = {name: list(values) for name, values in control.items()}
            found = unet(**given, control=kept, transformer_options={})
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert cache.counts == {"full": 1, "shallow": 2}


def test_control_that_begins_or_ends_makes_a_full_call():
    unet = ForgeUNet()
    reference = copy.deepcopy(unet)
    cache = cached(unet, 5)
    seen = ""
    with torch.no_grad():
        for step in range(6):
            given = inputs(step)
            control = residuals(reference, given, step) if 2 <= step < 4 else None
            full = cache.counts["full"]
            unet(**given, control=control, transformer_options={})
            seen += "F" if cache.counts["full"] > full else "S"
    assert seen == "FSFSFS"


def test_forges_parts_have_features_of_their_own():
    unet = ForgeUNet()
    cache = cached(unet, 3)
    with torch.no_grad():
        for step in range(4):
            cache.begin_evaluation()
            for part in (0, 1):
                given = inputs(step, batch=1)
                given["context"] = given["context"] * (1 - 2 * part)
                unet(**given, transformer_options={"cond_or_uncond": [part]})
    assert cache.counts == {"full": 4, "shallow": 4}


def test_patches_see_every_block_with_its_number_and_may_write_in_place():
    unet = ForgeUNet()
    cached(unet, 2)
    numbers: list[list[int]] = []

    def scale(h: torch.Tensor, skip: torch.Tensor, options: dict[str, Any]) -> Any:
        numbers[-1].append(options["block"][1])
        h[:, : h.shape[1] // 2] *= 1.1  # as FreeU does
        return h, skip

    pictures = []
    with torch.no_grad():
        for step in (0, 1, 1):
            numbers.append([])
            patches = {"patches": {"output_block_patch": [scale]}}
            if step == 1 and len(pictures) == 2:
                unet.forward.begin_picture()  # type: ignore[operator]
                unet(**inputs(0), transformer_options=copy.copy(patches))
                numbers[-1].clear()
            pictures.append(unet(**inputs(step), transformer_options=patches))
    assert numbers == [list(range(len(unet.output_blocks)))] * 3
    assert torch.equal(pictures[1], pictures[2])  # the feature itself was not written to


def test_hooks_that_change_shapes_between_blocks_make_plain_calls():
    unet = ForgeUNet()
    cache = cached(unet, 2)
    with torch.no_grad():
        for step in range(2):
            unet(**inputs(step), transformer_options={"block_modifiers": [print]})
    assert cache.counts == {"plain": 2}


def test_a_call_that_cannot_be_read_makes_a_plain_call(monkeypatch: pytest.MonkeyPatch):
    unet = ForgeUNet()
    expected = copy.deepcopy(unet)(**inputs(0))
    cache = cached(unet, 2)
    monkeypatch.setattr(LdmUNet, "describe", lambda *_: 1 / 0)
    with torch.no_grad():
        torch.testing.assert_close(unet(**inputs(0)), expected)
    assert cache.counts == {"plain": 1}


@pytest.mark.parametrize("host", HOSTS)
def test_off_leaves_the_unet_as_it_was(host: str):
    unet = LDM_UNETS[host]()
    before = {name: (dict(vars(m)), dict(m._modules)) for name, m in unet.named_modules()}
    cache = cached(unet, "2 depth=1")
    with torch.no_grad():
        unet(**inputs(0))
        unet(**inputs(1))
        with pytest.raises(RuntimeError):
            unet(**{**inputs(2), "context": torch.zeros(2, 77, 5)})
    cache.remove()
    after = {name: (dict(vars(m)), dict(m._modules)) for name, m in unet.named_modules()}
    assert before == after
    assert not any(m._forward_hooks for m in unet.modules())


def test_memory_of_the_feature_is_that_of_one_tensor():
    unet = CompvisUNet()
    cache = cached(unet, 3)
    with torch.no_grad():
        for height, width in SIZES:
            cache.begin_picture(evaluations=3)
            unet(**inputs(0, height, width))
            assert cache.size_bytes == 2 * 16 * height * width * 4
            unet(**inputs(1, height, width))
            unet(**inputs(2, height, width))
            assert cache.size_bytes == 0


def test_inference_mode_and_back():
    unet = ForgeUNet()
    cached(unet, 2)
    with torch.inference_mode():
        first = [unet(**inputs(step)) for step in range(2)]
    unet.forward.begin_picture()  # type: ignore[operator]
    with torch.no_grad():
        second = [unet(**inputs(step)) for step in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_copied_unet_runs_its_own_forward():
    unet = CompvisUNet()
    cached(unet, 2)
    twin = copy.deepcopy(unet)
    with torch.no_grad():
        twin.out[1].weight.zero_()
        assert not torch.equal(twin(**inputs(0)), unet(**inputs(0)))


def test_unets_of_other_forms_are_refused():
    with pytest.raises(OptionError, match="does not know"):
        adapter_for(torch.nn.Linear(2, 2))
    with pytest.raises(OptionError, match="does not know"):
        LdmUNet(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("host", HOSTS)
def test_a_call_that_has_to_be_halved(host: str):
    """A full call in halves keeps nothing; a shallow one cannot be halved, and is full instead."""
    unet = LDM_UNETS[host]()
    expected = [unet(**inputs(seed)) for seed in range(6)]
    memory = ShortOfMemory(unet.forward)
    unet.forward = memory
    cache = DeepCache(unet, adapter_for(unet))
    cache.install()
    cache.begin_picture(DeepCacheOptions(3))
    made = []
    with torch.no_grad():
        for seed in range(6):
            memory.halved = seed in (0, 3)  # the first full call, and what would be a shallow one
            full = cache.counts["full"]
            output = unet(**inputs(seed))
            made.append("full" if cache.counts["full"] > full else "shallow")
            if made[-1] == "full":
                assert torch.allclose(output, expected[seed], atol=1e-5)
    assert made == ["full", "full", "shallow", "full", "full", "shallow"]
