"""DeepCache inside the WebUIs: the life of its features over passes, jobs and changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onediff_ext.core.deepcache_options import OFF
from tests.support.deepcache_webui_host import MEDIUM, DeepCacheWebUI, Job
from tests.support.sampler_stand_in import Entry, sample

# ------------------------------------------------------------------ passes, pictures, memory


def test_a_hires_pass_begins_again(host: DeepCacheWebUI) -> None:
    p = Job()
    host.graphs.begin(p, host.options, deepcache=MEDIUM)
    host.run(p)
    assert host.calls == (0, 0)  # added when a run ends
    host.run(p, size=(34, 50), keep=0.5)
    host.graphs.after_sampling(p)
    host.graphs.end(p)
    assert host.calls == (4 + 2, 8 + 4)


def test_pictures_do_not_see_each_other(host: DeepCacheWebUI) -> None:
    first = host.draw(MEDIUM)
    host.draw(MEDIUM, size=(16, 16))
    p = Job()
    host.graphs.begin(p, host.options, deepcache=MEDIUM)
    again = [host.run(p) for _ in range(2)]  # batch count 2
    host.graphs.end(p)
    assert torch.equal(again[0], first)
    assert torch.equal(again[1], first)


@pytest.mark.parametrize("size", [(64, 64), (17, 25), (40, 56), (90, 120), (120, 90)])
def test_memory_is_one_tensor_and_given_back(host: DeepCacheWebUI, size: tuple[int, int]) -> None:
    height, width = size
    seen = []

    def look(_: int) -> None:
        seen.append(host.features_bytes)

    host.draw(MEDIUM, size=size, before_call=look)
    channels = host.unet.output_blocks[-2][0].second.out_channels
    assert max(seen) == 2 * channels * height * width * 4
    assert host.features_bytes == 0


def test_memory_is_free_before_the_vae_decodes(host: DeepCacheWebUI) -> None:
    p = Job()
    host.graphs.begin(p, host.options, deepcache=MEDIUM)
    host.graphs.before_sampling(p)

    def interrupted(number: int) -> None:
        if number == 5:
            assert host.features_bytes > 0
            raise InterruptedError

    with pytest.raises(InterruptedError):
        sample(host.graphs.before_step, host.call, p, before_call=interrupted)
    host.graphs.after_sampling(p)  # hosts decode what an interrupted run has come to
    assert host.features_bytes == 0
    host.graphs.end(p)
    assert host.calls == (2, 3)


def test_calls_outside_a_run_are_plain(host: DeepCacheWebUI) -> None:
    x, context = torch.randn(2, 4, 9, 9), torch.randn(2, 77, 24)
    expected = host.call(x, torch.full((2,), 5.0), context)
    p = Job()
    host.graphs.begin(p, host.options, deepcache=MEDIUM)
    host.run(p)
    host.graphs.after_sampling(p)
    for _ in range(3):
        assert torch.equal(host.call(x, torch.full((2,), 5.0), context), expected)
    assert host.features_bytes == 0
    host.graphs.end(p)


def test_every_attribute_is_as_before(host: DeepCacheWebUI) -> None:
    before = host.attributes()
    host.draw(MEDIUM)
    assert host.attributes() == before


def test_an_exception_leaves_nothing_behind(host: DeepCacheWebUI) -> None:
    before, expected = host.attributes(), host.draw(MEDIUM)

    def fail(number: int) -> None:
        if number == 4:
            raise RuntimeError("in the middle")

    p = Job()
    host.graphs.begin(p, host.options, deepcache=MEDIUM)
    with pytest.raises(RuntimeError, match="in the middle"):
        host.run(p, before_call=fail)
    p.close()  # as hosts do, however a job ends
    assert host.attributes() == before
    assert host.features_bytes == 0
    assert torch.equal(host.draw(MEDIUM), expected)


def test_a_job_inside_another(host: DeepCacheWebUI) -> None:
    """A detailer draws a face with a job of its own, without DeepCache."""
    expected, plain = host.draw(MEDIUM), host.draw(OFF, size=(16, 16))
    outer, inner = Job(), Job()
    host.graphs.begin(outer, host.options, deepcache=MEDIUM)
    assert torch.equal(host.run(outer), expected)
    host.graphs.begin(inner, host.options, deepcache=OFF)
    assert torch.equal(host.run(inner, size=(16, 16)), plain)
    host.graphs.end(inner)
    assert torch.equal(host.run(outer), expected)
    host.graphs.end(outer)
    assert host.features_bytes == 0


def test_another_extension_that_wraps_the_unet_meanwhile(host: DeepCacheWebUI) -> None:
    expected = host.draw(MEDIUM)
    plain = host.draw(OFF)

    class Foreign(nn.Module):
        def __init__(self, forward: Any) -> None:
            super().__init__()
            self.inner = [forward]

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner[0](*args, **kwargs)

    p = Job()
    host.graphs.begin(p, host.options, deepcache=MEDIUM)
    host.run(p)
    host.unet.forward = Foreign(host.unet.forward).forward
    host.graphs.end(p)
    for _ in range(2):  # what runs the UNet from now on may do more at some of the steps
        assert torch.equal(host.draw(MEDIUM), plain)
        assert "another extension runs" in host.graphs.status().deepcache
        assert torch.equal(host.draw(OFF), plain)
    del host.unet.forward
    assert torch.equal(host.draw(MEDIUM), expected)
    assert torch.equal(host.draw(OFF), plain)


# ------------------------------------------------------------------ what voids features


def full_calls(host: DeepCacheWebUI, before_call: Callable[[int], None], **how: Any) -> list[int]:
    """The predictions of a job in which the UNet's middle ran."""
    current, full = [0], set()

    def note(number: int) -> None:
        current[0] = number
        before_call(number)
        for handle in handles:
            handle.remove()
        handles[:] = [
            host.unet.middle_block[0].register_forward_hook(lambda *_: full.add(current[0]))
        ]

    handles: list[Any] = []
    host.draw(MEDIUM, before_call=note, **how)
    for handle in handles:
        handle.remove()
    return sorted(full)


def test_a_plain_run_is_full_at_every_third(host: DeepCacheWebUI) -> None:
    assert full_calls(host, lambda _: None) == [0, 3, 6, 9]


def test_a_lora_that_changes_on_the_way(host: DeepCacheWebUI) -> None:
    def change(number: int) -> None:
        if number == 3:
            host.lora(0.2)

    # Looked at before each prediction; here the change comes after that of number 3.
    assert full_calls(host, change) == [0, 3, 4, 7, 10]


def test_a_refiner_takes_the_models_place(host: DeepCacheWebUI) -> None:
    """The hosts exchange the model, or its weights, before they announce the prediction."""
    p = Job()
    host.graphs.begin(p, host.options, deepcache=MEDIUM)
    host.graphs.before_sampling(p)

    def before_step(parameters: Any) -> None:
        if parameters.denoiser.step == 7:
            host.new_unet()
        host.graphs.before_step(parameters)

    sample(before_step, host.call, p)
    host.graphs.after_sampling(p)
    host.graphs.end(p)
    # 0, 3, 6 of the first model, 7 and 10 of the other one.
    assert host.calls == (5, 7)
    assert host.features_bytes == 0


def test_a_prompt_that_changes_on_the_way(host: DeepCacheWebUI) -> None:
    switch = [Entry(4), Entry(10_000)]  # [a:b:5]: from prediction 5 on the other text
    assert full_calls(host, lambda _: None, prompt=switch) == [0, 3, 5, 8, 11]


def test_prompts_that_alternate_are_drawn_as_without_deepcache(host: DeepCacheWebUI) -> None:
    """[a|b] is another text at each step: whatever were reused would be the other text's."""
    each = [Entry(number) for number in range(12)]
    expected = host.draw(OFF, prompt=each)
    assert torch.equal(host.draw(MEDIUM, prompt=each), expected)
    assert host.calls == (12, 0)


def test_a_controlnet_that_begins_and_ends(host: DeepCacheWebUI) -> None:
    if host.name == "a1111":
        pytest.skip("the extension for A1111 runs the UNet itself: the next test")
    arguments: dict[str, Any] = {}

    def control(number: int) -> None:
        arguments["on"] = 4 <= number < 8

    def call(x: Any, timesteps: Any, context: Any) -> torch.Tensor:
        residual = torch.full((2, 32, 5, 3), 0.1)
        lists = {"input": [], "middle": [residual], "output": []}
        return host.call(x, timesteps, context, control=lists if arguments["on"] else None)

    p = Job()
    host.graphs.begin(p, host.options, deepcache=MEDIUM)
    host.graphs.before_sampling(p)
    sample(host.graphs.before_step, call, p, before_call=control)
    host.graphs.end(p)
    # 0, 3; begins at 4, 7; ends at 8, 11.
    assert host.calls == (6, 6)


def test_an_extension_that_runs_the_unet_itself(host: DeepCacheWebUI) -> None:
    """An extension's additions may begin and end within a picture: nothing is reused."""
    plain = host.draw(None)
    own = host.unet.forward
    host.unet.forward = lambda *args, **kwargs: own(*args, **kwargs) * 1.5
    try:
        theirs = host.draw(None)
        assert not torch.equal(theirs, plain)
        assert torch.equal(host.draw(MEDIUM), theirs)
        assert host.calls == (0, 0)
        status = host.graphs.status()
        assert status.deepcache.startswith("DeepCache is off: another extension runs the")
        assert "DeepCache is off" in status.line()
    finally:
        del host.unet.forward
    assert torch.equal(host.draw(OFF), plain)
    host.draw(MEDIUM)
    assert host.calls == (4, 8)
