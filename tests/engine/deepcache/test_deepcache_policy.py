"""When features are reused: by kind of call, by evaluation, never across what voids them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from onediff_ext.core.deepcache_options import DeepCacheOptions
from onediff_ext.core.errors import OptionError
from onediff_ext.engine.deepcache.deepcache_forward import DeepCache
from onediff_ext.engine.deepcache.unet_adapter import Uncached, UNetAdapter, UNetCall


class TwoPartUNet(nn.Module):
    """The deep part is the mean of x, the shallow part adds x: [B, 4, h, w] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.replay: torch.Tensor | None = None
        self.keep: Callable[[torch.Tensor], None] | None = None

    def forward(self, x: torch.Tensor, context: torch.Tensor, state: str = "") -> torch.Tensor:
        if self.replay is not None:
            return self.replay + x
        deep = x.mean(dim=(2, 3), keepdim=True)
        if self.keep is not None:
            self.keep(deep)
        return deep + x


class TwoPartAdapter(UNetAdapter):
    """Knows `TwoPartUNet`; refuses calls whose state is "odd"."""

    def __init__(self, unet: TwoPartUNet) -> None:
        self.unet = unet

    def describe(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> UNetCall | Uncached:
        x, context = args
        state = kwargs.get("state", "")
        if state == "odd":
            return Uncached("odd")
        return UNetCall((x.shape, context.shape), state, x.shape[0])

    def max_depth(self) -> int:
        return 2

    @contextmanager
    def full(self, depth, feature):
        self.unet.keep = feature.store
        try:
            yield
        finally:
            self.unet.keep = None

    @contextmanager
    def shallow(self, depth, feature):
        self.unet.replay = feature.tensor
        try:
            yield
        finally:
            self.unet.replay = None

    def shallow_arguments(self, depth, args, kwargs):
        return tuple(args), dict(kwargs)


class VariantLog:
    """A forward that notes which variant it runs as, where a capture would stand."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.cache: DeepCache | None = None
        self.variants: list[Any] = []
        self.features: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self.cache is not None
        self.variants.append(self.cache.variant)
        self.features.append(self.cache.feature)
        return self.forward(*args, **kwargs)


class Host:
    """Calls a UNet as samplers do, and says which calls were full."""

    def __init__(self, options: object = 3, **picture: Any) -> None:
        self.unet = TwoPartUNet()
        self.log = VariantLog(self.unet.forward)
        self.unet.forward = self.log
        self.cache = DeepCache(self.unet, TwoPartAdapter(self.unet))
        self.log.cache = self.cache
        self.cache.install()
        self.cache.begin_picture(DeepCacheOptions.parse(options), **picture)

    def call(self, batch: int = 2, tokens: int = 77, side: int = 8, **kwargs: Any) -> str:
        """One call: "F" for a full one, "S" for a shallow one, "." for a plain one."""
        with torch.no_grad():
            self.unet(torch.randn(batch, 4, side, side), torch.zeros(batch, tokens, 8), **kwargs)
        variant = self.log.variants[-1]
        return "." if variant is None else {"full": "F", "shallow": "S"}[variant[0]]

    def calls(self, count: int, **kwargs: Any) -> str:
        return "".join(self.call(**kwargs) for _ in range(count))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_a_plain_sampler():
    assert Host().calls(8) == "FSSFSSFS"
    assert Host("light").calls(5) == "FSFSF"
    assert Host("strong").calls(6) == "FSSSSF"
    assert Host("off").calls(3) == "..."


def test_a_shallow_call_uses_the_feature_of_the_last_full_one():
    host = Host()
    first, second = torch.randn(2, 2, 4, 8, 8).unbind()
    context = torch.zeros(2, 77, 8)
    with torch.no_grad():
        host.unet(first, context)
        found = host.unet(second, context)
    assert torch.equal(found, first.mean(dim=(2, 3), keepdim=True) + second)


def test_the_range_and_the_centre_are_shares_of_the_picture():
    assert Host("4 start=0.3 end=0.8", evaluations=10).calls(10) == "FFFSSSFSFF"
    uneven = Host("5 schedule=nonuniform", evaluations=50).calls(50)
    assert uneven.count("F") == 10
    assert uneven != Host("5", evaluations=50).calls(50)


def test_batches_that_alternate_have_features_of_their_own():
    # s_min_uncond: prompt and negative prompt together, then the prompt alone, in turn.
    host = Host()
    assert "".join(host.call(batch=2 - i % 2) for i in range(10)) == "FFSSFFSSFF"


def test_prompt_and_negative_prompt_of_different_length_have_features_of_their_own():
    host, seen = Host(), []
    for _ in range(7):
        host.cache.begin_evaluation()
        seen.append(host.call(batch=1, tokens=154) + host.call(batch=1, tokens=77))
    assert seen == ["FF", "SS", "SS", "FF", "SS", "SS", "FF"]


def test_calls_of_one_evaluation_with_equal_shapes_have_features_of_their_own():
    # A host that splits a batch for want of memory: which half it is cannot be seen from shapes.
    host = Host()
    with torch.no_grad():
        context = torch.zeros(1, 77, 8)
        prompt, negative = torch.zeros(1, 4, 8, 8), torch.ones(1, 4, 8, 8)
        for _ in range(2):
            host.cache.begin_evaluation()
            found = [host.unet(x, context).mean().item() for x in (prompt, negative)]
    assert [v[0] for v in host.log.variants] == ["full", "full", "shallow", "shallow"]
    assert found == [0, 2]


def test_a_hires_pass_begins_with_a_full_call():
    host = Host()
    assert host.calls(2) == "FS"
    host.cache.begin_picture()
    assert host.calls(2) == "FS"
    assert host.calls(2, side=16) == "FS"


def test_what_begins_or_ends_in_the_middle_makes_a_full_call():
    host = Host("strong")
    assert host.calls(2) == "FS"
    assert host.calls(2, state="ControlNet") == "FS"
    assert host.calls(2) == "FS"
    host.cache.note("ControlNet in range", True)
    assert host.calls(2) == "FS"
    host.cache.note("ControlNet in range", True)
    assert host.calls(1) == "S"
    host.cache.invalidate()  # a LoRA or the checkpoint has changed
    assert host.calls(2) == "FS"


def test_a_call_that_is_not_known_is_a_plain_one_and_time_goes_on():
    host = Host()
    assert host.calls(2) + host.calls(2, state="odd") + host.calls(1) == "FS..F"
    assert host.cache.counts == {"full": 2, "shallow": 1, "plain": 2}


def test_a_picture_that_is_refused_is_drawn_plainly_and_says_why():
    host = Host(3, refusal_reason="nothing to win")
    assert host.calls(3) == "..."
    assert host.cache.reason == "nothing to win"
    host.cache.begin_picture()
    assert host.calls(3) == "FSS"
    assert host.cache.reason is None


def test_nothing_is_reused_while_gradients_are_on():
    host = Host()
    host.unet(torch.randn(2, 4, 8, 8), torch.zeros(2, 77, 8))
    assert host.log.variants == [None]


def test_a_depth_that_leaves_nothing_out_is_refused():
    with pytest.raises(OptionError, match="0 to 2"):
        Host("3 depth=3")


def test_memory_is_given_back_after_the_picture_and_after_its_last_evaluation():
    host = Host(3, evaluations=4)
    host.calls(3)
    assert host.cache.size_bytes == 2 * 4 * 4  # [2, 4, 1, 1] in float32
    host.calls(1)
    host.log.features.clear()
    gc.collect()
    assert host.cache.size_bytes == 0
    host.cache.begin_picture()
    host.calls(2)
    host.cache.end_picture()
    host.log.features.clear()
    assert host.cache.size_bytes == 0


def test_the_last_evaluation_may_be_several_calls():
    host = Host(3, evaluations=2)
    x, long, short = torch.ones(1, 4, 8, 8), torch.zeros(1, 154, 8), torch.zeros(1, 77, 8)
    with torch.no_grad():
        for _ in range(2):
            host.cache.begin_evaluation()
            host.unet(x, long)
            host.unet(x, short)
    assert dict(host.cache.counts) == {"full": 2, "shallow": 2}


def test_a_picture_may_begin_in_the_middle():
    host = Host("3 start=0.5", evaluations=8)
    host.cache.begin_picture(evaluations=8, first=6)
    host.calls(2)
    assert dict(host.cache.counts) == {"full": 1, "shallow": 1}


def test_a_capture_that_holds_its_feature_finds_it_again_at_the_same_address():
    host = Host()
    host.calls(2)
    captured = host.log.variants[-1]
    held = host.log.features[-1]
    address = held.tensor.data_ptr()
    host.cache.end_picture()
    assert host.cache.size_bytes > 0
    host.cache.begin_picture()
    assert host.calls(2) == "FS"
    assert host.log.variants[-1] == captured
    assert host.log.features[-1] is held
    assert held.tensor.data_ptr() == address


def test_a_capture_whose_feature_is_gone_is_never_met_again():
    host = Host()
    host.calls(2)
    variants = set(host.log.variants)
    host.log.features.clear()
    host.cache.end_picture()
    host.cache.begin_picture()
    host.calls(2)
    assert variants.isdisjoint(host.log.variants[2:])


def test_on_then_off_leaves_the_unet_as_it_was():
    host = Host()
    host.calls(2)
    host.cache.remove()
    assert vars(host.unet)["forward"] is host.log
    assert not host.cache.is_installed
    host.log.cache = DeepCache(host.unet, TwoPartAdapter(host.unet))
    assert host.calls(2) == ".."


class BrokenError(RuntimeError):
    """The error that the UNet of these tests raises."""


def test_an_exception_leaves_nothing_behind():
    host = Host()
    host.calls(1)
    works, host.log.forward = host.log.forward, _raise
    with pytest.raises(BrokenError):
        host.call()
    assert host.cache.variant is None
    host.log.forward = works
    assert host.unet.keep is None
    assert host.unet.replay is None
    assert host.calls(2) == "SF"


def _raise(*args: Any, **kwargs: Any) -> Any:
    raise BrokenError
