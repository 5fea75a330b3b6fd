"""The page says how the VAE ran, and remembers the parts of a VAE that overflow."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("diffusers", reason="the page draws with diffusers, which is not installed")

import torch

from onediff_ext.core.errors import PictureError
from onediff_ext.core.options import CompileOptions
from onediff_ext.hosts.diffusers.checkpoints.ldm_saving import save_ldm
from onediff_ext.hosts.diffusers.drawing.draw_settings import DrawSettings
from onediff_ext.hosts.diffusers.jobs.img2img_job import Img2ImgJob
from onediff_ext.panel.choices import Choices
from onediff_ext.panel.phrases import phrases_in
from onediff_ext.pictures.batch.batch_job import BatchJob
from onediff_ext.pictures.size_rules import parse_size_rule
from onediff_ext.standalone.app import StandaloneApp
from onediff_ext.standalone.drawing_tabs import from_text
from onediff_ext.standalone.folder_job import run_folder
from tests.support import models
from tests.support.sample_pictures import save_pictures
from tests.support.vae_stand_ins import overflowing_vae

SETTINGS = DrawSettings(prompt="a fox", steps=1, strength=1.0, scheduler="Euler")
NOTE = "VAE decoded in fp32: it overflows in fp16"


@pytest.fixture
def standalone_app(tmp_path: Path) -> StandaloneApp:
    """An application in fp16 with a checkpoint whose decoder overflows."""
    pipe = models.sd15()
    pipe.vae = overflowing_vae("decoder")
    model = save_ldm(pipe, tmp_path / "overflowing.safetensors")
    options = CompileOptions(store=tmp_path / "store", build="never")
    standalone_app = StandaloneApp(torch.device("cpu"), "fp16", options)
    standalone_app.load(model)
    return standalone_app


def draw(standalone_app: StandaloneApp, folder: Path) -> str:
    return from_text(
        standalone_app, Choices(), SETTINGS, 64, 64, 1, 5, folder, lambda step, of: None
    ).said[-1]


def test_the_line_below_a_picture_says_it(standalone_app: StandaloneApp, tmp_path: Path) -> None:
    assert draw(standalone_app, tmp_path) == NOTE
    first = standalone_app.loaded().checkpoint.path
    standalone_app.load(save_ldm(models.sd15(seed=1), tmp_path / "good.safetensors"))
    assert NOTE not in draw(standalone_app, tmp_path)
    standalone_app.load(first)
    decoder = standalone_app.loaded().pipe.vae.decoder
    dtypes = []
    decoder.register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
    draw(standalone_app, tmp_path)
    assert dtypes == [torch.float32]  # it is not tried in fp16 a second time


def test_a_folders_progress_says_it(standalone_app: StandaloneApp, tmp_path: Path) -> None:
    batch = BatchJob(
        inputs=[save_pictures(tmp_path / "in", a=(64, 64))],
        output_dir=tmp_path / "out",
        size_rule=parse_size_rule("own"),
        seed=0,
    )
    job = Img2ImgJob(batch, SETTINGS, identity={})
    last = [progress.of_vae for progress in run_folder(standalone_app, Choices(), job)][-1]
    assert last == [NOTE]
    assert "fp32" in (said := phrases_in("ja_JP").translated(NOTE))
    assert "decoded" not in said


def test_nan_of_the_unet_is_an_error_with_the_next_step(
    standalone_app: StandaloneApp, tmp_path: Path
) -> None:
    standalone_app.loaded().pipe.unet.conv_out.bias.data[0] = torch.nan
    with pytest.raises(PictureError, match="The UNet or transformer overflowed") as raised:
        draw(standalone_app, tmp_path)
    assert "--dtype bf16" in raised.value.hint
