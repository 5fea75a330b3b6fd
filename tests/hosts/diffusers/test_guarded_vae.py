"""NaN in the VAE: found, retried in a wider dtype, remembered; never a black picture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onediff_ext.core.options import CompileOptions
from onediff_ext.hosts.diffusers.compile import compile_pipe, new_session, undo_compile
from onediff_ext.hosts.diffusers.vae.guarded_vae import GuardedVae, wider_dtype
from tests.support import models
from tests.support.quick_builds import quick_builds
from tests.support.vae_stand_ins import MeasuredMemory, latents, overflowing_vae

DECODED = "VAE decoded in fp32: it overflows in fp16"
ENCODED = "VAE encoded in fp32: it overflows in fp16"


def careful(vae: Any, overflowing: set[str] | None = None) -> GuardedVae:
    pipe = SimpleNamespace(vae=vae)
    return GuardedVae(pipe, overflowing=overflowing, memory=MeasuredMemory(None))


def pictures(count: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 3, 64, 72, generator=generator) * 2 - 1


def weights(vae: Any) -> list[tuple[Any, ...]]:
    return [(p.dtype, p.data_ptr(), p.stride()) for p in vae.parameters()]


class CallCounter:
    """A forward pre-hook that notes the dtype of each call's input, and how many pictures."""

    def __init__(self, module: Any) -> None:
        self.calls: list[tuple[torch.dtype, int]] = []
        module.register_forward_pre_hook(self)

    def __call__(self, module: Any, args: tuple[torch.Tensor, ...]) -> None:
        self.calls.append((args[0].dtype, args[0].shape[0]))


@torch.no_grad()
def test_a_decoder_that_runs_over_is_run_in_a_wider_dtype() -> None:
    expected = overflowing_vae("decoder").decode(latents(2)).sample
    vae = overflowing_vae("decoder").half()
    z = latents(2).half()
    assert not vae.decode(z).sample.isfinite().all()  # or the test would show nothing
    before, counter, guard = weights(vae), CallCounter(vae.decoder), careful(vae)
    with guard.drawing() as run:
        found = vae.decode(z, return_dict=False)[0]
    assert found.dtype == torch.float16
    assert (found.float() - expected).abs().max() < 0.05
    assert [run.error(0), run.error(1)] == [None, None]
    assert [str(note) for note in run.notes] == [DECODED]
    assert counter.calls == [(torch.float16, 2), (torch.float32, 2)]
    assert weights(vae) == before  # the user's weights are where and what they were
    assert not {"encode", "decode"} & vars(vae).keys()

    with guard.drawing() as later:  # starts right away in the dtype that works
        assert torch.equal(vae.decode(z).sample, found)
    assert counter.calls[2:] == [(torch.float32, 2)]
    assert [str(note) for note in later.notes] == [DECODED]
    assert weights(vae) == before


@torch.no_grad()
def test_an_encoder_that_runs_over_is_run_in_a_wider_dtype() -> None:
    expected = overflowing_vae("encoder").encode(pictures()).latent_dist.mean
    vae = overflowing_vae("encoder").half()
    before, counter, overflowing = weights(vae), CallCounter(vae.encoder), set[str]()
    with careful(vae, overflowing).drawing() as run:
        found = vae.encode(pictures().half()).latent_dist
    assert found.mean.dtype == torch.float16
    assert (found.mean.float() - expected).norm() < 0.05 * expected.norm()
    assert [str(note) for note in run.notes] == [ENCODED]
    assert overflowing == {"encoder"}  # the decoder goes on in fp16
    assert weights(vae) == before
    with careful(vae, overflowing).drawing():  # another Painter of the same checkpoint
        vae.encode(pictures().half(), return_dict=False)
    assert counter.calls == [(torch.float16, 1), (torch.float32, 1), (torch.float32, 1)]


@torch.no_grad()
def test_only_pictures_that_ran_over_are_done_again() -> None:
    vae = models.vae().half()
    z = latents(3).half()
    z[1] *= 6e4 / z[1].abs().max()  # beyond what the first convolutions can take
    own = vae.decode(z).sample
    assert own.isfinite().flatten(1).all(1).tolist() == [True, False, True]
    counter = CallCounter(vae.decoder)
    with careful(vae).drawing() as run:
        found = vae.decode(z).sample
    assert counter.calls == [(torch.float16, 3), (torch.float32, 1)]
    assert torch.equal(found[[0, 2]], own[[0, 2]])
    assert found.isfinite().all()
    assert run.error(1) is None


@torch.no_grad()
def test_what_does_not_run_over_is_left_alone() -> None:
    vae = models.vae()
    expected = vae.decode(latents(2)).sample, vae.encode(pictures()).latent_dist.parameters
    counter = CallCounter(vae.decoder)
    with careful(vae).drawing() as run:
        assert torch.equal(vae.decode(latents(2)).sample, expected[0])
        assert torch.equal(vae.encode(pictures()).latent_dist.parameters, expected[1])
    assert (run.notes, run.error(0)) == ([], None)
    assert len(counter.calls) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_vae_that_runs_over_in_a_wide_dtype_is_named(dtype: torch.dtype) -> None:
    vae = models.vae().to(dtype)
    vae.decoder.conv_out.bias[0] = torch.nan
    counter = CallCounter(vae.decoder)
    with careful(vae).drawing() as run:
        vae.decode(latents(2).to(dtype))
    assert len(counter.calls) == 1  # no other dtype would help
    error = run.error(1)
    assert error is not None
    assert error.message.startswith("The VAE overflowed (NaN) in ")
    assert "another VAE" in error.hint


@pytest.mark.parametrize(
    ("dtype", "hint"), [(torch.float16, "--dtype bf16"), (torch.float32, "another sampler")]
)
@torch.no_grad()
def test_latents_that_are_nan_are_the_unets(dtype: torch.dtype, hint: str) -> None:
    vae = models.vae().to(dtype)
    z = latents(2).to(dtype)
    z[1, 0, 3, 3] = torch.nan
    counter = CallCounter(vae.decoder)
    with careful(vae).drawing() as run:
        vae.decode(z)
    assert len(counter.calls) == 1
    assert run.error(0) is None
    error = run.error(1)
    assert error is not None
    assert error.message.startswith("The UNet or transformer overflowed (NaN)")
    assert hint in error.hint


@torch.no_grad()
def test_a_picture_that_the_vae_cannot_read_is_told_from_a_unet_that_runs_over() -> None:
    vae = models.vae()
    vae.encoder.conv_out.bias[0] = torch.nan
    with careful(vae).drawing() as run:
        z = vae.encode(pictures()).latent_dist.mode()
        vae.decode(z)
    error = run.error(0)
    assert error is not None
    assert "when it read the input picture" in error.message


@torch.no_grad()
def test_an_error_in_the_middle_leaves_the_vae_as_it_was() -> None:
    vae = overflowing_vae("decoder").half()
    before, own = weights(vae), dict(vars(vae))
    guard = careful(vae, {"decoder"})
    handle = vae.decoder.conv_out.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), guard.drawing():
        vae.decode(latents().half())
    handle.remove()
    assert (weights(vae), vars(vae)) == (before, own)


@torch.no_grad()
def test_a_wider_dtype_names_other_kinds(tmp_path_factory: pytest.TempPathFactory) -> None:
    store = tmp_path_factory.mktemp("store")
    session = new_session(CompileOptions(backend="eager", build="wait", store=store, workers=1))
    vae = overflowing_vae("decoder").half()
    expected = overflowing_vae("decoder").decode(latents()).sample
    pipe = SimpleNamespace(vae=vae)
    compile_pipe(pipe, session=session, ignores=("vae_encoder",))
    guard = careful(vae)

    def decode() -> torch.Tensor:
        with guard.drawing():
            pixels: torch.Tensor = vae.decode(latents().half()).sample
        return pixels

    with quick_builds():
        for _ in range(3):  # builds, compares, uses
            assert (decode().float() - expected).abs().max() < 0.05
    dtypes = {kind.key.entries["weight dtype"] for kind in session.kinds}
    assert dtypes == {"float16", "float32"}
    used = [kind for kind in session.kinds if kind.key.entries["weight dtype"] == "float32"]
    assert {kind.state.value for kind in used} == {"ready"}
    assert [kind.label for kind in session.kinds if kind.state.value == "failed"] == []
    undo_compile(pipe)


def test_wider_on_a_cpu() -> None:
    assert wider_dtype(torch.device("cpu")) == torch.float32


@pytest.mark.gpu
def test_wider_on_a_gpu() -> None:
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    expected = torch.bfloat16 if bf16 else torch.float32
    assert wider_dtype(torch.device("cuda")) == expected


@pytest.mark.gpu
@torch.no_grad()
def test_running_out_of_a_gpus_memory() -> None:
    """torch's own error, in a process with a small memory limit."""
    vae = models.vae().half().cuda()
    z = latents(1, 120, 140).half().cuda()
    expected = vae.decode(z).sample
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    allowed = torch.cuda.memory_reserved() + 100 * 2**20
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    try:
        with GuardedVae(SimpleNamespace(vae=vae)).drawing() as run:
            found = vae.decode(z).sample
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found.shape == expected.shape
    assert found.isfinite().all()
    assert [note.what for note in run.notes] == ["VAE decoded in tiles"]
