"""Classes of whole models that are patched or exchanged while graphs are in use.

As in `test_soundness.py`, each test compares a compiled model with an eager twin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onediff_ext.hosts.diffusers.compile import compiled_state, undo_compile
from onediff_ext.hosts.diffusers.compile_module import compile_module
from onediff_ext.hosts.diffusers.deepcache import disable_deepcache, enable_deepcache
from onediff_ext.session.session import Session
from tests.support import models
from tests.support.settled_twins import Twins


@pytest.fixture
def session(make_session: Callable[..., Session]) -> Session:
    return make_session(spot_checks=False)


def patched(cls: type, scale: float = 0.5) -> Callable[..., Any]:
    """The class's forward with the first argument scaled."""
    own = cls.forward

    def forward(self: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(self, sample * scale, *args, **kwargs)

    return forward


def test_a_patched_class_of_unets(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(session)
    cls = type(twins.unets[0])
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(cls, "forward", patched(cls))
            assert max(twins.error(seed) for seed in range(10, 15)) < 1e-4
            component = compiled_state(twins.pipe).components[0]
            assert "another extension runs the UNet2DConditionModel" in str(component.foreign)
            assert twins.captured.replayed  # its parts
        assert max(twins.error(seed) for seed in range(20, 25)) < 1e-4
        assert twins.captured.reason == ""
        assert twins.captured.replayed


def test_a_class_that_is_patched_before_and_restored_after_compiling(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = type(models.unet())
    with monkeypatch.context() as patch:
        patch.setattr(cls, "forward", patched(cls))
        reason = "another extension runs the UNet2DConditionModel itself"
        twins = Twins(session, reason=reason)
    assert max(twins.error(seed) for seed in range(10, 16)) < 1e-4
    assert twins.captured.reason == ""
    undo_compile(twins.pipe)
    assert not [m for m in twins.unets[0].modules() if "forward" in vars(m)]


def test_a_unet_that_gets_another_class(session: Session) -> None:
    twins = Twins(session)
    cls = type(twins.unets[0])

    class Sub(cls):  # type: ignore[misc, valid-type]
        forward = patched(cls)

    for unet in twins.unets:
        unet.__class__ = Sub
    assert max(twins.error(seed) for seed in range(10, 15)) < 1e-4
    for unet in twins.unets:
        unet.__class__ = cls
    assert max(twins.error(seed) for seed in range(20, 25)) < 1e-4
    assert twins.captured.reason == ""


def test_a_class_of_a_part_of_a_foreign_forward(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(session)
    cls = type(twins.unets[0])
    monkeypatch.setattr(cls, "forward", patched(cls))
    assert max(twins.error(seed) for seed in range(10, 15)) < 1e-4
    part = type(twins.unets[0].mid_block)
    monkeypatch.setattr(part, "forward", patched(part))
    assert max(twins.error(seed) for seed in range(20, 25)) < 1e-4


def test_a_patched_class_of_decoders(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = models.vae(seed=1).decoder, models.vae(seed=1).decoder
    theirs.load_state_dict(ours.state_dict())
    compile_module(ours, session=session)
    latent = torch.randn(1, 4, 8, 8)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(ours(latent), theirs(latent), rtol=1e-4, atol=1e-4)
        monkeypatch.setattr(type(ours), "forward", patched(type(ours)))
        torch.testing.assert_close(ours(latent), theirs(latent), rtol=1e-4, atol=1e-4)
    undo_compile(ours)


def test_a_patched_class_of_controlnets(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    unet = models.unet(seed=1)
    ours, theirs = models.controlnet_for(unet, 1), models.controlnet_for(unet, 1)
    theirs.load_state_dict(ours.state_dict())
    compile_module(ours, session=session)
    hint = torch.rand(2, 3, 128, 128)

    def residual(net: Any) -> torch.Tensor:
        given = models.unet_inputs(unet, height_latent=16, width_latent=16, seed=1)
        found: torch.Tensor = net(**given, controlnet_cond=hint).mid_block_res_sample
        return found

    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(residual(ours), residual(theirs), rtol=1e-4, atol=1e-4)
        monkeypatch.setattr(type(ours), "forward", patched(type(ours)))
        torch.testing.assert_close(residual(ours), residual(theirs), rtol=1e-4, atol=1e-4)
    undo_compile(ours)


def test_a_class_that_is_patched_under_deepcache(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = models.sd15(seed=3), models.sd15(seed=3)
    theirs.unet.load_state_dict(ours.unet.state_dict())
    enable_deepcache(ours, "1")  # each call is a full one
    cls = type(ours.unet)
    monkeypatch.setattr(cls, "forward", patched(cls))
    with torch.no_grad():
        found, expected = (
            pipe.unet(**models.unet_inputs(pipe.unet, seed=1)).sample for pipe in (ours, theirs)
        )
    torch.testing.assert_close(found, expected)
    disable_deepcache(ours)


def test_a_patched_helper_of_a_helper(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """FreeU's `apply_freeu` calls `fourier_filter`, in a module of no model."""
    from diffusers.utils import torch_utils

    twins = Twins(session, lambda unet: unet.enable_freeu(s1=0.9, s2=0.2, b1=1.4, b2=1.6))
    own = torch_utils.fourier_filter
    monkeypatch.setattr(torch_utils, "fourier_filter", lambda x, **more: own(x, **more) * 0.5)
    assert max(twins.error(seed) for seed in range(10, 14)) < 1e-4


def test_a_class_is_patched_after_it_has_lost_a_name(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls: Any = torch.nn.SiLU
    cls.note = "an extension's"
    twins = Twins(session)
    del cls.note
    assert max(twins.error(seed) for seed in range(10, 16)) < 1e-4
    assert twins.captured.reason == ""
    monkeypatch.setattr(cls, "forward", patched(cls))
    assert max(twins.error(seed) for seed in range(20, 24)) < 1e-4


def test_a_class_gets_another_base(session: Session) -> None:
    from diffusers.models.attention import FeedForward

    class Scaled(torch.nn.Module):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs) * 1.5

    twins, own = Twins(session), FeedForward.__bases__
    FeedForward.__bases__ = (Scaled,)
    try:
        assert max(twins.error(seed) for seed in range(10, 14)) < 1e-4
    finally:
        FeedForward.__bases__ = own
    assert max(twins.error(seed) for seed in range(20, 26)) < 1e-4
    assert twins.captured.reason == ""


def test_a_class_has_an_attribute_that_its_instances_had(session: Session) -> None:
    from diffusers.models.resnet import ResnetBlock2D

    twins, cls = Twins(session), ResnetBlock2D
    try:
        for unet in twins.unets:
            del unet.mid_block.resnets[0].output_scale_factor
        for value in (1.0, 1.7, property(lambda _: 2.5)):
            cls.output_scale_factor = value
            assert max(twins.error(seed) for seed in range(10, 14)) < 1e-4
    finally:
        del cls.output_scale_factor


def test_a_class_has_tuples_that_its_instances_had(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(session)
    for unet in twins.unets:
        attributes = vars(unet.mid_block.resnets[0].conv1)
        del attributes["padding"], attributes["dilation"]
    for size in (2, 2), (1, 1):
        monkeypatch.setattr(torch.nn.Conv2d, "padding", size, raising=False)
        monkeypatch.setattr(torch.nn.Conv2d, "dilation", size, raising=False)
        assert max(twins.error(seed) for seed in range(10, 14)) < 1e-4


@pytest.mark.parametrize("name", ["ResnetBlock2D", "Downsample2D"])
def test_code_that_is_replaced_in_place(
    session: Session, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from diffusers.models import downsampling, resnet

    cls = getattr({"ResnetBlock2D": resnet, "Downsample2D": downsampling}[name], name)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.kept(*args, **kwargs) * 0.5

    own = cls.forward
    copied = type(own)(own.__code__, own.__globals__, "kept", own.__defaults__, own.__closure__)
    twins = Twins(session)
    monkeypatch.setattr(cls, "kept", copied, raising=False)
    assert max(twins.error(seed) for seed in range(10, 14)) < 1e-4
    monkeypatch.setattr(own, "__code__", forward.__code__)
    assert max(twins.error(seed) for seed in range(20, 24)) < 1e-4


class Around:
    """A hook of another extension that keeps what ran before, as diffusers' hooks do."""

    def __init__(self, module: Any) -> None:
        self.module, self.kept = module, module.forward
        module.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.kept(*args, **kwargs)

    def remove(self) -> None:
        self.module.forward = self.kept


def block_of(unet: Any) -> Any:
    return unet.down_blocks[0].resnets[0]


def part_of(unet: Any) -> Any:
    return unet.mid_block


@pytest.mark.parametrize("choose", [block_of, part_of, lambda unet: unet])
def test_a_class_that_is_patched_under_a_hook(
    session: Session, monkeypatch: pytest.MonkeyPatch, choose: Callable[[Any], Any]
) -> None:
    twins = Twins(session)
    cls = type(choose(twins.unets[0]))
    hooks = [Around(choose(unet)) for unet in twins.unets]
    assert max(twins.error(seed) for seed in range(10, 13)) < 1e-4
    with monkeypatch.context() as patch:
        patch.setattr(cls, "forward", patched(cls))
        assert max(twins.error(seed) for seed in range(20, 24)) < 1e-4
        for hook in hooks:  # in eager the module keeps the old function
            hook.remove()
        assert max(twins.error(seed) for seed in range(30, 34)) < 1e-4
    assert max(twins.error(seed) for seed in range(40, 44)) < 1e-4


def test_a_class_that_is_patched_under_a_hook_on_a_part_of_a_foreign_forward(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(session)
    monkeypatch.setattr(type(twins.unets[0]), "forward", patched(type(twins.unets[0])))
    assert max(twins.error(seed) for seed in range(10, 14)) < 1e-4
    for unet in twins.unets:
        Around(part_of(unet))
    assert max(twins.error(seed) for seed in range(20, 24)) < 1e-4
    cls = type(part_of(twins.unets[0]))
    monkeypatch.setattr(cls, "forward", patched(cls))
    assert max(twins.error(seed) for seed in range(30, 34)) < 1e-4


@pytest.mark.parametrize("choose", [block_of, part_of, lambda unet: unet])
def test_a_hook_that_keeps_a_patched_method(
    session: Session, monkeypatch: pytest.MonkeyPatch, choose: Callable[[Any], Any]
) -> None:
    twins = Twins(session)
    cls = type(choose(twins.unets[0]))
    with monkeypatch.context() as patch:
        patch.setattr(cls, "forward", patched(cls))
        for unet in twins.unets:
            Around(choose(unet))
        assert max(twins.error(seed) for seed in range(10, 14)) < 1e-4
    assert max(twins.error(seed) for seed in range(20, 26)) < 1e-4


def end_job(component: Any, hooks: list[Around]) -> None:
    """Take hooks and runners away, as a host does after a job; eager modules as they were."""
    for hook in hooks:
        hook.remove()
    component.suspend()
    for hook in hooks:
        vars(hook.module).pop("forward", None)


@pytest.mark.parametrize("choose", [block_of, lambda unet: unet])
def test_a_hook_of_an_earlier_job_keeps_nothing(
    session: Session, monkeypatch: pytest.MonkeyPatch, choose: Callable[[Any], Any]
) -> None:
    twins = Twins(session)
    component = compiled_state(twins.pipe).components[0]
    hooks = [Around(choose(unet)) for unet in twins.unets]
    assert max(twins.error(seed) for seed in range(10, 13)) < 1e-4
    end_job(component, hooks)
    component.install()
    assert max(twins.error(seed) for seed in range(20, 23)) < 1e-4
    cls = type(choose(twins.unets[0]))
    with monkeypatch.context() as patch:
        patch.setattr(cls, "forward", patched(cls))
        assert max(twins.error(seed) for seed in range(30, 34)) < 1e-4
    assert max(twins.error(seed) for seed in range(40, 44)) < 1e-4
    assert twins.captured.reason == ""


def test_a_class_that_is_patched_between_jobs_after_a_hook(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(session)
    component = compiled_state(twins.pipe).components[0]
    for choose in (block_of, lambda unet: unet):
        hooks = [Around(choose(unet)) for unet in twins.unets]
        assert max(twins.error(seed) for seed in range(10, 13)) < 1e-4
        end_job(component, hooks)
        with monkeypatch.context() as patch:
            cls = type(choose(twins.unets[0]))
            patch.setattr(cls, "forward", patched(cls))
            component.install()
            assert max(twins.error(seed) for seed in range(20, 24)) < 1e-4
        assert max(twins.error(seed) for seed in range(30, 34)) < 1e-4
