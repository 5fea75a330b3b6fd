"""DeepCache inside the WebUIs, on stand-ins of their UNets and samplers: one contract for all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from onediff_ext.core.deepcache_options import OFF, DeepCacheOptions
from onediff_ext.core.options import CompileOptions
from onediff_ext.engine.deepcache.deepcache_forward import DeepCache, deepcache_of
from onediff_ext.hosts.a1111.host import A1111Host
from onediff_ext.hosts.forge.host import ForgeHost
from onediff_ext.hosts.forge.reforge import ReForgeHost
from onediff_ext.hosts.unet_adapters import adapter_for
from onediff_ext.webui.acceleration import Acceleration
from tests.support import a1111_stand_in, forge_stand_in
from tests.support.ldm_models import LDM_UNETS
from tests.support.ldm_stand_in import written_in
from tests.support.sampler_stand_in import CFG, SPLIT, Entry, sample

MEDIUM = DeepCacheOptions(3)
ADAPTERS = {"a1111": A1111Host, "forge": ForgeHost, "reforge": ReForgeHost}

# Where each host's own UNets come from.
HOMES = {
    "a1111": "ldm.modules.diffusionmodules.openaimodel",
    "forge": "backend.nn.unet",
    "reforge": "ldm_patched.ldm.modules.diffusionmodules.openaimodel",
}


class Job:
    """`p`: a picture of 12 steps."""

    steps, scheduler, is_hr_pass = 12, "Automatic", False

    def close(self) -> None:
        """Nothing to give back."""


class Host:
    """A stand-in of a host with a UNet of the full form, and the acceleration over it."""

    def __init__(self, name: str, stand_in: Any, options: CompileOptions) -> None:
        self.name, self.stand_in, self.options = name, stand_in, options
        self.new_unet()
        self.acceleration = Acceleration(ADAPTERS[name]())
        self.decides: list[str] = []

    @property
    def unet(self) -> Any:
        if self.name == "a1111":
            return self.stand_in.model.model.diffusion_model
        return self.stand_in.unet

    def new_unet(self) -> None:
        """Another checkpoint: the same module in A1111, another one in the others."""
        unet = LDM_UNETS[self.name]()
        cls = type(unet)
        if cls.forward.__globals__["__name__"] != HOMES[self.name]:
            cls.forward = written_in(cls.forward, HOMES[self.name])
        if self.name == "a1111":
            model = self.stand_in.model
            if type(model.model.diffusion_model) is type(unet):
                with torch.no_grad():
                    for parameter in self.unet.parameters():
                        parameter.mul_(1.1)
                model.sd_checkpoint_info = copy.copy(model.sd_checkpoint_info)
                model.sd_checkpoint_info.name_for_extra += "-b"
            else:
                model.model.diffusion_model = unet
        else:
            type(unet).__name__ = "UNetModel"
            base = self.stand_in.engine.forge_objects.unet.model
            if isinstance(base.diffusion_model, type(unet)):
                with torch.no_grad():
                    for parameter in unet.parameters():
                        parameter.mul_(1.1)
            base.diffusion_model = unet

    def lora(self, strength: float) -> None:
        """A LoRA as each host keeps it."""
        if self.name == "a1111":
            self.stand_in.lora.module.loaded_networks = [
                SimpleNamespace(name="a", te_multiplier=1.0, unet_multiplier=strength, dyn_dim=None)
            ]
        elif self.name == "forge":
            self.patcher.lora_patches = {("a.safetensors", strength, 1.0, False): ()}
        else:
            self.patcher.patches_uuid = object()
        with torch.no_grad():
            self.unet.input_blocks[1][0].first.weight.mul_(1 + strength)

    @property
    def patcher(self) -> Any:
        return self.stand_in.engine.forge_objects.unet

    def call(self, x: Any, timesteps: Any, context: Any, **arguments: Any) -> torch.Tensor:
        """One call of the UNet, as the host makes it."""
        if self.name != "a1111":
            arguments.setdefault("transformer_options", {})
        with torch.no_grad() if self.name == "a1111" else torch.inference_mode():
            result: torch.Tensor = self.unet(x, timesteps, context=context, **arguments)
            return result.clone()

    def draw(
        self, deepcache: DeepCacheOptions | None, job: Job | None = None, **how: Any
    ) -> torch.Tensor:
        """A whole job with one pass; None leaves the extension out of it."""
        if deepcache is None:
            return sample(lambda _: None, self.call, Job(), **how)
        p = job or Job()
        self.acceleration.begin(p, self.options, deepcache=deepcache)
        latent = self.run(p, **how)
        self.acceleration.after_sampling(p)
        self.acceleration.end(p)
        return latent

    def run(self, p: Job, **how: Any) -> torch.Tensor:
        """One pass of a job that has begun."""
        self.acceleration.before_sampling(p)
        return sample(self.acceleration.before_step, self.call, p, **how)

    @property
    def calls(self) -> tuple[int, int]:
        """Full and shallow calls of the last job."""
        counts = self.acceleration._reused.counts
        return counts["full"], counts["shallow"]

    @property
    def features_bytes(self) -> int:
        parts = [*self.acceleration._attached, *self.acceleration._parked]
        return sum(part.reuse.size_bytes for part in parts)

    def attributes(self) -> dict[str, Any]:
        return {
            name: (
                {key: id(value) for key, value in vars(module).items()},
                list(module._modules.items()),
                len(module._forward_hooks),
                len(module._forward_pre_hooks),
            )
            for name, module in self.unet.named_modules()
        }


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> CompileOptions:
    store = tmp_path_factory.mktemp("store")
    return CompileOptions(backend="eager", build="wait", store=store, workers=1)


@pytest.fixture(params=sorted(ADAPTERS))
def host(request: pytest.FixtureRequest, options: CompileOptions) -> Iterator[Host]:
    with ExitStack() as stack:
        if request.param == "a1111":
            stand_in: Any = stack.enter_context(a1111_stand_in.a1111())
        else:
            stand_in = stack.enter_context(forge_stand_in.running(request.param))
        yield Host(request.param, stand_in, options)


def by_hand(host: Host, deepcache: DeepCacheOptions, **how: Any) -> torch.Tensor:
    """The same picture with the engine's DeepCache alone, told of each prediction."""
    cache = DeepCache(host.unet, adapter_for(host.unet))
    cache.install()
    cache.begin_picture(deepcache)
    try:
        return sample(lambda _: cache.begin_evaluation(), host.call, Job(), **how)
    finally:
        cache.remove()


def alternating(number: int) -> Any:
    """s_min_uncond: every other prediction leaves the negative prompt out."""
    return CFG if number % 2 == 0 else [(1, 77)]


LAYOUTS: dict[str, Callable[[int], Any]] = {
    "cfg": lambda _: CFG,
    "split": lambda _: SPLIT,
    "one at a time": lambda _: [(1, 77), (1, 77)],
    "a AND b": lambda _: [(3, 77)],
    "s_min_uncond": alternating,
}


def test_off_touches_nothing(host: Host) -> None:
    expected = host.draw(None)
    installed = []

    def look(_: int) -> None:
        installed.append(deepcache_of(host.unet))

    for deepcache in (OFF, DeepCacheOptions.parse("1"), DeepCacheOptions.parse("off")):
        assert torch.equal(host.draw(deepcache, before_call=look), expected)
        assert host.acceleration.status().deepcache == ""
    assert set(installed) == {None}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pictures_are_those_of_the_engine(host: Host, layout: str) -> None:
    expected = by_hand(host, MEDIUM, layout=LAYOUTS[layout])
    assert torch.equal(host.draw(MEDIUM, layout=LAYOUTS[layout]), expected)
    assert not torch.equal(expected, host.draw(OFF, layout=LAYOUTS[layout]))


def test_the_status_line_says_what_was_reused(host: Host) -> None:
    host.draw(MEDIUM)
    assert host.calls == (4, 8)
    assert host.acceleration.status().deepcache == "DeepCache: 8 of 12 UNet calls shallow"
    assert "8 of 12 UNet calls shallow" in host.acceleration.status().line()
    host.draw(OFF)
    assert host.acceleration.status().deepcache == ""


def test_prompt_and_negative_prompt_have_features_of_their_own(host: Host) -> None:
    host.draw(MEDIUM, layout=lambda _: SPLIT)
    assert host.calls == (8, 16)
    host.draw(MEDIUM, layout=alternating)
    assert host.calls == (2 * 3, 2 * 3)  # each kind at every second prediction; full after 4


@pytest.mark.parametrize("sampler", ["Heun", "DPM2"])
def test_samplers_that_ask_twice_a_step(host: Host, sampler: str) -> None:
    host.draw(MEDIUM, sampler=sampler, calls=2)
    assert host.calls == (8, 16)


def test_a_sampler_that_asks_more_often_than_expected(host: Host) -> None:
    p = Job()
    host.acceleration.begin(p, host.options, deepcache=MEDIUM)
    host.acceleration.before_sampling(p)

    def before_step(parameters: Any) -> None:
        parameters.denoiser.total_steps = 6
        host.acceleration.before_step(parameters)

    sample(before_step, host.call, p)
    host.acceleration.end(p)
    assert host.calls == (4, 8)


def test_image_to_image_at_low_strength(host: Host) -> None:
    p = Job()
    p.steps = 30
    host.draw(MEDIUM, p, keep=0.2)
    assert host.calls == (2, 4)


def test_shares_of_the_run(host: Host) -> None:
    host.draw(DeepCacheOptions.parse("3 start=0.5"))
    assert host.calls == (6 + 2, 4)


@pytest.mark.parametrize(
    ("sampler", "schedule", "steps", "said"),
    [
        ("LCM", "Automatic", 20, "nothing to win with LCM"),
        ("Euler", "Turbo", 20, "nothing to win with Turbo"),
        ("Euler", "Automatic", 6, "needs 10 steps"),
    ],
)
def test_few_steps_are_refused_with_a_reason(
    host: Host, sampler: str, schedule: str, steps: int, said: str
) -> None:
    p = Job()
    p.steps, p.scheduler = steps, schedule
    expected = sample(lambda _: None, host.call, p)
    assert torch.equal(host.draw(MEDIUM, p, sampler=sampler), expected)
    assert said in host.acceleration.status().line()
    assert deepcache_of(host.unet) is None


def test_a_distilled_checkpoint_is_refused(host: Host) -> None:
    model = host.stand_in.model if host.name == "a1111" else host.stand_in.engine
    model.sd_checkpoint_info.name_for_extra = "dream_lightning_v2"
    host.draw(MEDIUM)
    assert "dream_lightning_v2" in host.acceleration.status().deepcache


def test_without_the_unet_there_is_nothing_to_reuse(host: Host) -> None:
    p = Job()
    ignored = frozenset({"unet"})
    host.acceleration.begin(p, host.options, ignored, deepcache=MEDIUM)
    host.run(p)
    host.acceleration.end(p)
    assert "needs the UNet" in host.acceleration.status().deepcache


def test_a_unet_of_another_form_says_so(host: Host) -> None:
    del host.unet.middle_block
    unet = host.unet
    unet.middle_block = None
    p = Job()
    host.acceleration.begin(p, host.options, deepcache=MEDIUM)
    host.acceleration.before_sampling(p)
    sample(host.acceleration.before_step, lambda x, *_: x, p)
    host.acceleration.end(p)
    assert "does not know the blocks" in host.acceleration.status().deepcache


# ------------------------------------------------------------------ passes, pictures, memory


def test_a_hires_pass_begins_anew(host: Host) -> None:
    p = Job()
    host.acceleration.begin(p, host.options, deepcache=MEDIUM)
    host.run(p)
    assert host.calls == (0, 0)  # added when a run ends
    host.run(p, size=(34, 50), keep=0.5)
    host.acceleration.after_sampling(p)
    host.acceleration.end(p)
    assert host.calls == (4 + 2, 8 + 4)


def test_pictures_do_not_see_each_other(host: Host) -> None:
    first = host.draw(MEDIUM)
    host.draw(MEDIUM, size=(16, 16))
    p = Job()
    host.acceleration.begin(p, host.options, deepcache=MEDIUM)
    again = [host.run(p) for _ in range(2)]  # batch count 2
    host.acceleration.end(p)
    assert torch.equal(again[0], first)
    assert torch.equal(again[1], first)


@pytest.mark.parametrize("size", [(64, 64), (17, 25), (40, 56), (90, 120), (120, 90)])
def test_memory_is_one_tensor_and_given_back(host: Host, size: tuple[int, int]) -> None:
    height, width = size
    seen = []

    def look(_: int) -> None:
        seen.append(host.features_bytes)

    host.draw(MEDIUM, size=size, before_call=look)
    channels = host.unet.output_blocks[-2][0].second.out_channels
    assert max(seen) == 2 * channels * height * width * 4
    assert host.features_bytes == 0


def test_memory_is_free_before_the_vae_decodes(host: Host) -> None:
    p = Job()
    host.acceleration.begin(p, host.options, deepcache=MEDIUM)
    host.acceleration.before_sampling(p)

    def interrupted(number: int) -> None:
        if number == 5:
            assert host.features_bytes > 0
            raise InterruptedError

    with pytest.raises(InterruptedError):
        sample(host.acceleration.before_step, host.call, p, before_call=interrupted)
    host.acceleration.after_sampling(p)  # hosts decode what an interrupted run has come to
    assert host.features_bytes == 0
    host.acceleration.end(p)
    assert host.calls == (2, 3)


def test_calls_outside_a_run_are_plain(host: Host) -> None:
    x, context = torch.randn(2, 4, 9, 9), torch.randn(2, 77, 24)
    expected = host.call(x, torch.full((2,), 5.0), context)
    p = Job()
    host.acceleration.begin(p, host.options, deepcache=MEDIUM)
    host.run(p)
    host.acceleration.after_sampling(p)
    for _ in range(3):
        assert torch.equal(host.call(x, torch.full((2,), 5.0), context), expected)
    assert host.features_bytes == 0
    host.acceleration.end(p)


def test_every_attribute_is_as_before(host: Host) -> None:
    before = host.attributes()
    host.draw(MEDIUM)
    assert host.attributes() == before


def test_an_exception_leaves_nothing_behind(host: Host) -> None:
    before, expected = host.attributes(), host.draw(MEDIUM)

    def fail(number: int) -> None:
        if number == 4:
            raise RuntimeError("in the middle")

    p = Job()
    host.acceleration.begin(p, host.options, deepcache=MEDIUM)
    with pytest.raises(RuntimeError, match="in the middle"):
        host.run(p, before_call=fail)
    p.close()  # as hosts do, however a job ends
    assert host.attributes() == before
    assert host.features_bytes == 0
    assert torch.equal(host.draw(MEDIUM), expected)


def test_a_job_inside_another(host: Host) -> None:
    """A detailer draws a face with a job of its own, without DeepCache."""
    expected, plain = host.draw(MEDIUM), host.draw(OFF, size=(16, 16))
    outer, inner = Job(), Job()
    host.acceleration.begin(outer, host.options, deepcache=MEDIUM)
    assert torch.equal(host.run(outer), expected)
    host.acceleration.begin(inner, host.options, deepcache=OFF)
    assert torch.equal(host.run(inner, size=(16, 16)), plain)
    host.acceleration.end(inner)
    assert torch.equal(host.run(outer), expected)
    host.acceleration.end(outer)
    assert host.features_bytes == 0


def test_another_extension_that_wraps_the_unet_meanwhile(host: Host) -> None:
    expected = host.draw(MEDIUM)
    plain = host.draw(OFF)

    class Foreign(nn.Module):
        def __init__(self, forward: Any) -> None:
            super().__init__()
            self.inner = [forward]

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner[0](*args, **kwargs)

    p = Job()
    host.acceleration.begin(p, host.options, deepcache=MEDIUM)
    host.run(p)
    host.unet.forward = Foreign(host.unet.forward).forward
    host.acceleration.end(p)
    for _ in range(2):  # what runs the UNet from now on may do more at some of the steps
        assert torch.equal(host.draw(MEDIUM), plain)
        assert "another extension runs" in host.acceleration.status().deepcache
        assert torch.equal(host.draw(OFF), plain)
    del host.unet.forward
    assert torch.equal(host.draw(MEDIUM), expected)
    assert torch.equal(host.draw(OFF), plain)


# ------------------------------------------------------------------ what voids features


def full_calls(host: Host, before_call: Callable[[int], None], **how: Any) -> list[int]:
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


def test_a_plain_run_is_full_at_every_third(host: Host) -> None:
    assert full_calls(host, lambda _: None) == [0, 3, 6, 9]


def test_a_lora_that_changes_on_the_way(host: Host) -> None:
    def change(number: int) -> None:
        if number == 3:
            host.lora(0.2)

    # Looked at before each prediction; here the change comes after that of number 3.
    assert full_calls(host, change) == [0, 3, 4, 7, 10]


def test_a_refiner_takes_the_models_place(host: Host) -> None:
    """The hosts exchange the model, or its weights, before they announce the prediction."""
    p = Job()
    host.acceleration.begin(p, host.options, deepcache=MEDIUM)
    host.acceleration.before_sampling(p)

    def before_step(parameters: Any) -> None:
        if parameters.denoiser.step == 7:
            host.new_unet()
        host.acceleration.before_step(parameters)

    sample(before_step, host.call, p)
    host.acceleration.after_sampling(p)
    host.acceleration.end(p)
    # 0, 3, 6 of the first model, 7 and 10 of the other one.
    assert host.calls == (5, 7)
    assert host.features_bytes == 0


def test_a_prompt_that_changes_on_the_way(host: Host) -> None:
    switch = [Entry(4), Entry(10_000)]  # [a:b:5]: from prediction 5 on the other text
    assert full_calls(host, lambda _: None, prompt=switch) == [0, 3, 5, 8, 11]


def test_prompts_that_alternate_are_drawn_as_without_deepcache(host: Host) -> None:
    """[a|b] is another text at each step: whatever were reused would be the other text's."""
    each = [Entry(number) for number in range(12)]
    expected = host.draw(OFF, prompt=each)
    assert torch.equal(host.draw(MEDIUM, prompt=each), expected)
    assert host.calls == (12, 0)


def test_a_controlnet_that_begins_and_ends(host: Host) -> None:
    if host.name == "a1111":
        pytest.skip("the extension for A1111 runs the UNet itself: the next test")
    arguments: dict[str, Any] = {}

    def control(number: int) -> None:
        arguments["on"] = 4 <= number < 8

    def call(x: Any, timesteps: Any, context: Any) -> torch.Tensor:
        residual = torch.full((2, 32, 5, 7), 0.1)
        lists = {"input": [], "middle": [residual], "output": []}
        return host.call(x, timesteps, context, control=lists if arguments["on"] else None)

    p = Job()
    host.acceleration.begin(p, host.options, deepcache=MEDIUM)
    host.acceleration.before_sampling(p)
    sample(host.acceleration.before_step, call, p, before_call=control)
    host.acceleration.end(p)
    # 0, 3; begins at 4, 7; ends at 8, 11.
    assert host.calls == (6, 6)


def test_an_extension_that_runs_the_unet_itself(host: Host) -> None:
    """What it adds may begin and end on the way: nothing is reused."""
    plain = host.draw(None)
    own = host.unet.forward
    host.unet.forward = lambda *args, **kwargs: own(*args, **kwargs) * 1.5
    try:
        theirs = host.draw(None)
        assert not torch.equal(theirs, plain)
        assert torch.equal(host.draw(MEDIUM), theirs)
        assert host.calls == (0, 0)
        status = host.acceleration.status()
        assert status.deepcache.startswith("DeepCache is off: another extension runs the")
        assert "DeepCache is off" in status.line()
    finally:
        del host.unet.forward
    assert torch.equal(host.draw(OFF), plain)
    host.draw(MEDIUM)
    assert host.calls == (4, 8)
