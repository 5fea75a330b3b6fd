"""One picture on two devices, here twice the CPU, with a recorder in place of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from onediff_ext.engine.cfg_parallel.call_halves import NOTHING_TO_SPLIT
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.torch_versions import OutOfMemoryError
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile
from onediff_ext.hosts.diffusers.deepcache import enable_deepcache
from onediff_ext.session import speed_trial
from onediff_ext.session.cfg_parallel import CHANGES, DEEPCACHE, WHAT, CfgParallel
from onediff_ext.session.model_component import Component
from onediff_ext.session.session import Session
from tests.support import models
from tests.support.draw import relative_error
from tests.support.frozen_recorder import FrozenRecorder

ROUNDING = 1e-5
STEPS = 5


class World:
    """A compiled pipeline that draws on two devices, and its twin that stays eager."""

    def __init__(self, session: Session, recorder: FrozenRecorder, model: str) -> None:
        self.session, self.recorder = session, recorder
        self.pipe, self.twin = getattr(models, model)(), getattr(models, model)()
        compile_pipe(self.pipe, session=session, ignores=["vae"])

    @property
    def component(self) -> Component:
        state = compiled_state(self.pipe)
        assert state is not None
        return state.components[0]

    @property
    def parallel(self) -> CfgParallel:
        found = self.component.cfg_parallel
        assert found is not None
        return found

    def draw(self, pipe: Any, **options: Any) -> torch.Tensor:
        arguments = {
            "prompt": "a fox",
            "negative_prompt": "blurry",
            "height": 64,
            "width": 72,
            "num_inference_steps": STEPS,
            "guidance_scale": 5.0,
            "generator": torch.Generator().manual_seed(3),
            "output_type": "latent",
        }
        found: torch.Tensor = pipe(**{**arguments, **options}).images
        return found

    def assert_right(self, **options: Any) -> None:
        """Our picture is the twin's, drawn on both devices."""
        ours, theirs = self.draw(self.pipe, **options), self.draw(self.twin, **options)
        assert relative_error(ours, theirs) < ROUNDING
        assert self.parallel.reason == ""
        assert len(self.parallel.devices) == 2

    @property
    def both(self) -> tuple[Any, Any]:
        return self.pipe.unet, self.twin.unet


class Clock:
    """Forwards take as long as a test says.

    Attributes:
        one_s, two_s: Seconds of a forward on one device and on two.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.one_s, self.two_s = 0.029, 0.017
        self._on_two, own = 0, CfgParallel._run_halves

        def counted(*args: Any) -> Any:
            self._on_two += 1
            return own(*args)

        monkeypatch.setattr(CfgParallel, "_run_halves", counted)
        monkeypatch.setattr(speed_trial, "stopwatch", self._start)

    def _start(self, _: torch.device) -> Callable[[], Callable[[], float]]:
        before = self._on_two

        def stop() -> Callable[[], float]:
            seconds = self.two_s if self._on_two > before else self.one_s
            return lambda: seconds

        return stop


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture(params=["sd15", "sdxl"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def world(make_session: Callable[..., Session], model: str, clock: Clock) -> Iterator[World]:
    recorder, session = FrozenRecorder(), make_session(spot_checks=False, cfg_parallel="cpu")
    session.cuda_graphs = CudaGraphCache(recorder, limit=8)
    world = World(session, recorder, model)
    for _ in range(4):  # its graphs are built after the first; then the devices are timed
        world.draw(world.pipe)
    yield world
    undo_compile(world.pipe)
    assert recorder.freed == 0


def test_only_both_halves_are_replayed_and_the_picture_is_that_of_one_device(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs block by block, and nothing is compared with a forward on one device."""
    in_python = []
    for runner in [*world.parallel.runners, *world.component.runners]:
        monkeypatch.setattr(runner, "_prepare", lambda *_, who=runner: in_python.append(who))
    before, compared = [m.replays for m in world.recorder.forwards], world.parallel.comparisons
    pictures = 3
    for _ in range(pictures):
        world.assert_right()
    after = [made.replays for made in world.recorder.forwards]
    grown = [b - a for a, b in zip(before, after, strict=True)]
    assert grown.count(pictures * STEPS) == 2  # each half at each step
    assert sum(grown) == 2 * pictures * STEPS
    assert in_python == []
    assert world.parallel.comparisons == compared
    assert not world.session.fallbacks()


def test_a_size_that_is_slower_on_two_devices_is_drawn_on_one(world: World, clock: Clock) -> None:
    clock.two_s = 0.116
    for _ in range(5):
        world.draw(world.pipe, height=80)
    assert world.parallel.reason == "two GPUs are slower here: 116 against 29 ms"
    assert any("116 against 29 ms" in reason for reason in world.session.status().reasons)
    assert world.parallel.devices == ()
    ours, theirs = (world.draw(pipe, height=80) for pipe in (world.pipe, world.twin))
    assert relative_error(ours, theirs) < ROUNDING
    world.assert_right()  # of a size that is faster on two


def test_undo_frees_the_replica_and_restores_the_model(world: World) -> None:
    parallel, expected = world.parallel, world.draw(world.twin)
    undo_compile(world.pipe)
    assert parallel.runners == []
    assert torch.equal(world.draw(world.pipe), expected)


@pytest.mark.parametrize("model", ["sdxl"])
def test_changed_weights_follow_also_those_that_torch_does_not_count(world: World) -> None:
    for unet in world.both:
        with torch.no_grad():
            unet.conv_in.weight.mul_(1.25)
    world.assert_right()
    for unet in world.both:
        unet.conv_out.weight.data.mul_(0.5)
    world.assert_right()
    for unet in world.both:
        unet.conv_out.weight = torch.nn.Parameter(unet.conv_out.weight.detach() * 1.5)
    world.assert_right()


@pytest.mark.parametrize("model", ["sd15"])
def test_a_lora_and_its_scale_follow(world: World) -> None:
    from peft import LoraConfig

    for unet in world.both:
        torch.manual_seed(5)
        targets = ["to_k", "to_q", "conv1"]
        unet.add_adapter(
            LoraConfig(r=4, lora_alpha=4, target_modules=targets, init_lora_weights=False), "x"
        )
    world.assert_right()
    for unet in world.both:
        unet.set_adapters(["x"], [0.3])
    world.assert_right()
    world.assert_right(cross_attention_kwargs={"scale": 0.5})
    for unet in world.both:
        unet.delete_adapters("x")
    world.assert_right()


@pytest.mark.parametrize("model", ["sd15"])
@pytest.mark.parametrize("is_counted", [True, False])
def test_a_change_while_a_picture_is_drawn_ends_it_on_one_device(
    world: World, is_counted: bool
) -> None:
    def change(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 2 and is_counted:
            with torch.no_grad():
                pipe.unet.conv_out.weight.mul_(1.5)
        elif step == 2:
            pipe.unet.mid_block.attentions[0].proj_in.weight = torch.nn.Parameter(
                pipe.unet.mid_block.attentions[0].proj_in.weight.detach() * 1.5
            )
        return {}

    ours = world.draw(world.pipe, callback_on_step_end=change)
    assert world.parallel.reason == CHANGES
    assert relative_error(ours, world.draw(world.twin, callback_on_step_end=change)) < ROUNDING
    world.assert_right()


@pytest.mark.parametrize("model", ["sd15"])
def test_what_cannot_be_split_runs_on_one_device_and_says_why(world: World) -> None:
    ours, theirs = (
        world.draw(pipe, guidance_scale=1.0, negative_prompt=None)
        for pipe in (world.pipe, world.twin)
    )
    assert relative_error(ours, theirs) < ROUNDING
    assert world.parallel.reason == NOTHING_TO_SPLIT
    assert (WHAT, NOTHING_TO_SPLIT) in {(f.what, f.reason) for f in world.session.fallbacks()}
    world.assert_right()
    handle = world.pipe.unet.down_blocks[0].register_forward_hook(lambda *_: None)
    ours = world.draw(world.pipe)
    assert relative_error(ours, world.draw(world.twin)) < ROUNDING
    assert "has a hook of another extension" in world.parallel.reason
    handle.remove()
    world.assert_right()
    enable_deepcache(world.pipe, "2")
    world.draw(world.pipe, num_inference_steps=10)
    assert world.parallel.reason == DEEPCACHE
    enable_deepcache(world.pipe, "off")
    world.assert_right()


@pytest.mark.parametrize("model", ["sd15"])
@pytest.mark.parametrize(
    ("error", "reason"),
    [(OutOfMemoryError("full"), "memory is short on cpu"), (ValueError("odd"), "ValueError: odd")],
)
def test_a_failing_replica_costs_no_picture(
    world: World, error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    component = world.parallel._replica_component
    assert component is not None

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(component, "compute", fail)
    ours = world.draw(world.pipe)
    assert relative_error(ours, world.draw(world.twin)) < ROUNDING
    assert reason in world.parallel.reason


@pytest.mark.parametrize("model", ["sd15"])
def test_a_wrong_replica_is_found_by_its_first_comparison(world: World) -> None:
    replica = world.parallel._replica
    assert replica is not None
    for unet in world.both:
        with torch.no_grad():
            unet.conv_in.weight.mul_(1.25)
    copy = replica.copy_weights
    replica.copy_weights = lambda: (copy(), replica.model.conv_out.weight.data.mul_(1.1))[0]  # type: ignore[method-assign]
    ours = world.draw(world.pipe)
    assert relative_error(ours, world.draw(world.twin)) < ROUNDING
    assert "the result of two devices differs" in world.parallel.reason


@pytest.mark.parametrize("model", ["sdxl"])
def test_two_pictures_at_once_and_other_sizes(world: World) -> None:
    world.assert_right(num_images_per_prompt=2)
    world.assert_right(height=80)
    world.assert_right(guidance_scale=1.0, negative_prompt=None, num_images_per_prompt=3)
