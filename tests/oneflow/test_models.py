"""UNets and VAEs of every layout through OneFlow: results, changed weights, shown reasons."""

from __future__ import annotations

import pytest
import torch

from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.hosts.diffusers.compile import compile_pipe, new_session, undo_compile
from tests.support import models
from tests.support.draw import relative_error

SIZES = ((1, 16, 16), (2, 16, 16), (1, 17, 15), (2, 17, 15), (1, 24, 40), (2, 24, 40))


@pytest.fixture(scope="module")
def session(flow, shared_store):
    return new_session({"backend": "oneflow", "build": "wait", "store": shared_store})


def _all_ready(session) -> bool:
    assert session.fallbacks() == []
    return all(k.state in (KindState.READY, KindState.UNCHECKED) for k in session.kinds)


@pytest.mark.parametrize("name", ["sd15", "sd2", "sdxl"])
def test_unets_equal_torch(name, session):
    unet = models.one_width(name).unet  # OneFlow plans each kind for each of the sizes
    inputs = [models.unet_inputs(unet, *size) for size in SIZES]
    kept = {n: p.clone() for n, p in unet.state_dict().items()}
    holder = type("Holder", (), {"unet": unet})()
    with torch.no_grad():
        expected = [unet(**i).sample for i in inputs]
        compile_pipe(holder, session=session)
        unet(**inputs[0])  # finds and builds
        unet(**inputs[0])  # compares
        for i, reference in zip(inputs, expected, strict=True):
            copies = {n: t.clone() for n, t in i.items() if isinstance(t, torch.Tensor)}
            found = unet(**i).sample
            assert (found - reference).abs().max() < 1e-4
            assert relative_error(found, reference) < 1e-4
            assert all(torch.equal(i[n], t) for n, t in copies.items())
    assert _all_ready(session)
    assert all(torch.equal(p, kept[n]) for n, p in unet.state_dict().items())
    undo_compile(holder)


def test_vaes_equal_torch(session):
    vae = models.vae()
    latents = [torch.randn(b, 4, h, w) for b, h, w in SIZES]
    holder = type("Holder", (), {"vae": vae})()
    with torch.no_grad():
        expected = [vae.decode(z).sample for z in latents]
        encoded = [vae.encode(x).latent_dist.mean for x in expected]
        compile_pipe(holder, session=session)
        for _ in range(2):
            vae.encode(vae.decode(latents[0]).sample)
        for z, picture, latent in zip(latents, expected, encoded, strict=True):
            assert (vae.decode(z).sample - picture).abs().max() < 1e-4
            assert (vae.encode(picture).latent_dist.mean - latent).abs().max() < 1e-4
    assert _all_ready(session)
    undo_compile(holder)


def test_half_precision_on_a_cpu_runs_eager_and_says_why(flow, tmp_path):
    # In the layout that compile_pipe gives the weights: some CPUs sum in another order for each.
    unet = models.unet().to(torch.bfloat16).to(memory_format=torch.channels_last)
    inputs = models.unet_inputs(unet, 1, 8, 8)
    holder = type("Holder", (), {"unet": unet})()
    with torch.no_grad():
        expected = unet(**inputs).sample
        session = new_session(
            {"backend": "oneflow", "build": "wait", "store": tmp_path, "workers": 1}
        )
        compile_pipe(holder, session=session)
        unet(**inputs)
        assert torch.equal(unet(**inputs).sample, expected)
    reasons = {kind.reason for kind in session.kinds}
    assert {kind.state for kind in session.kinds} == {KindState.FAILED}
    for reason in reasons:
        assert reason.startswith("could not be built: OneFlow has no kernel for ")
        assert "\n" not in reason
    assert {f.reason for f in session.fallbacks()} == reasons
