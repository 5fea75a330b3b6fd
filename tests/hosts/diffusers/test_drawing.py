"""Drawing: what makes the GPU wait, and what is done once for each job."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from PIL import Image

from onediff_ext.hosts.diffusers.drawing.image_generator import (
    DrawSettings,
    ImageGenerator,
    _pictures,
)
from onediff_ext.hosts.diffusers.drawing.sampler_noise import noise_sent_ahead
from onediff_ext.hosts.diffusers.drawing.step_clock import StepClock
from onediff_ext.hosts.diffusers.schedulers import make_scheduler
from onediff_ext.pictures.png_chunks import INFOTEXT_KEYWORD, read_png
from tests.support import models
from tests.support.sample_pictures import gradient, save_pictures

if TYPE_CHECKING:
    from tests.support.command_line import CommandLine

pytest_plugins = ("tests.support.command_line",)

FEW = ("--steps", "2", "--strength", "1")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def image_generator(command_line: CommandLine, name: str = "sd15") -> ImageGenerator:
    from onediff_ext.hosts.diffusers.checkpoints.load import load_checkpoint

    return ImageGenerator(load_checkpoint(command_line.checkpoint(name)))


class _Event:
    """Stands in for a CUDA event of a device with a chosen speed."""

    log: list[str]
    count: int

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.number = _Event.count = _Event.count + 1

    def record(self, stream: object) -> None:
        _Event.log.append(f"{self.number} handed over")

    def synchronize(self) -> None:
        _Event.log.append(f"{self.number} done")

    def elapsed_time(self, later: _Event) -> float:
        return 1000.0 * (later.number - self.number)


def test_one_step_is_in_hand_while_the_next_one_is_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _Event.log, _Event.count = [], 0
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    clock = StepClock(torch.device("cuda"), lambda number: _Event.log.append(f"{number} told"))
    for step in range(3):
        assert clock("pipe", step, "timestep", {"latents": step}) == {"latents": step}
    assert _Event.log == [
        "1 handed over", "1 told",
        "2 handed over", "1 done", "2 told",
        "3 handed over", "2 done", "3 told",
    ]  # fmt: skip
    assert clock.seconds() == [1.0, 1.0]


@pytest.mark.parametrize("name", ["sd15", "sd15_inpaint", "sdxl", "sdxl_refiner"])
def test_image_to_image_with_guidance_in_some_steps(
    command_line: CommandLine, name: str, tmp_path: Path
) -> None:
    from onediff_ext.core.guidance_options import GuidanceOptions

    save_pictures(tmp_path, a=(64, 72))
    generator = image_generator(command_line, name)
    batches: list[int] = []
    conv_in = generator.pipe.unet.conv_in
    conv_in.register_forward_hook(lambda _, args, __: batches.append(args[0].shape[0]))
    half = GuidanceOptions.parse("interval:0-0.5")
    settings = DrawSettings("a fox", steps=8, strength=0.5, guidance_steps=half)
    generator.check(settings, "img2img")
    with Image.open(tmp_path / "a.png") as picture:
        drawn = generator.img2img(settings, generator.read([picture.convert("RGB")]), [5])
    assert batches == [2, 2, 1, 1]
    assert drawn.uneven
    assert "forward" not in vars(generator.pipe.unet)


@pytest.mark.parametrize("device", DEVICES)
def test_steps_are_timed(device: str) -> None:
    clock = StepClock(torch.device(device), lambda _: None)
    for _ in range(3):
        torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
        clock({})
    if device == "cuda":
        torch.cuda.synchronize()
    assert len(clock.seconds()) == 2
    assert all(0 < seconds < 10 for seconds in clock.seconds())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sampler", ["Euler a", "DPM++ 2M SDE", "LCM", "DDIM", "Euler"])
@pytest.mark.parametrize("pictures", [1, 2])
def test_the_noise_of_a_sampler_is_diffusers_own(device: str, sampler: str, pictures: int) -> None:
    from diffusers.utils.torch_utils import randn_tensor

    def last(ahead: bool) -> torch.Tensor:
        scheduler = make_scheduler(sampler, {"beta_schedule": "scaled_linear"})
        scheduler.set_timesteps(4, device=device)
        generators = [torch.Generator().manual_seed(seed) for seed in range(pictures)]
        named: dict[str, Any] = {"generator": generators}
        if sampler == "DDIM":
            named["eta"] = 1.0
        sample = torch.ones(pictures, 4, 16, 16, device=device, dtype=torch.float16)
        for timestep in scheduler.timesteps:
            scaled = scheduler.scale_model_input(sample, timestep)
            with noise_sent_ahead(scheduler) if ahead else nullcontext():
                sample = scheduler.step(scaled * 0.5, timestep, sample, **named).prev_sample
        return sample.cpu()

    assert torch.equal(last(ahead=True), last(ahead=False))
    module = sys.modules[type(make_scheduler(sampler, {})).__module__]
    assert module.randn_tensor is randn_tensor


def test_noise_for_a_gpu_is_copied_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    import diffusers.schedulers.scheduling_euler_ancestral_discrete as module

    copies = []

    class PinnedTextKv:
        def to(self, device: torch.device, non_blocking: bool) -> torch.Tensor:
            copies.append((device.type, non_blocking))
            return torch.zeros(1)

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: PinnedTextKv())
    with noise_sent_ahead(make_scheduler("Euler a", {})):
        generator = torch.Generator().manual_seed(0)
        module.randn_tensor((1, 4), generator=generator, device=torch.device("cuda"))
        module.randn_tensor((1, 4), generator=generator, device=torch.device("cpu"))
    assert copies == [("cuda", True)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_pixels_are_rounded_as_diffusers_does(device: str, dtype: torch.dtype) -> None:
    from diffusers.image_processor import VaeImageProcessor

    halves = torch.arange(511) / 510  # all levels, and the halves between them
    pixels = torch.cat([halves, torch.rand(1537, generator=torch.Generator().manual_seed(0))])
    pixels = pixels[: 2 * 3 * 16 * 16].reshape(2, 3, 16, 16).to(device, dtype)
    expected = VaeImageProcessor.numpy_to_pil(VaeImageProcessor.pt_to_numpy(pixels))
    found = _pictures(pixels)
    assert [image.tobytes() for image in found] == [image.tobytes() for image in expected]
    assert [image.size for image in found] == [(16, 16)] * 2


@pytest.mark.parametrize("name", [name for name in models.BUILDERS if name != "sdxl_refiner"])
@pytest.mark.parametrize("task", ["txt2img", "img2img", "inpaint"])
def test_pipelines_are_those_of_diffusers(command_line: CommandLine, name: str, task: str) -> None:
    import diffusers

    auto = {
        "txt2img": diffusers.AutoPipelineForText2Image,
        "img2img": diffusers.AutoPipelineForImage2Image,
        "inpaint": diffusers.AutoPipelineForInpainting,
    }[task]
    ours = image_generator(command_line, name)
    if ours.checkpoint.architecture == "sdxl-refiner":
        pytest.skip("it has one task only")
    found, expected = ours._pipe(task), auto.from_pipe(ours.pipe)
    assert isinstance(found, type(expected))
    assert type(found).__name__ == type(expected).__name__
    assert found._execution_device == expected._execution_device
    assert all(found.components[key] is part for key, part in expected.components.items())
    for key in ("requires_safety_checker", "force_zeros_for_empty_prompt"):
        assert found.config.get(key) == expected.config.get(key)
    assert getattr(found, "watermark", None) is None


def test_models_are_not_looked_through_before_each_picture(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = image_generator(command_line)
    settings = DrawSettings(steps=1, strength=1.0)
    ours.img2img(settings, [gradient(64, 64)], [0])
    looked, modules = [], torch.nn.Module.modules

    def noted(module: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
        looked.append(module)
        return modules(module, *arguments, **named)

    monkeypatch.setattr(torch.nn.Module, "modules", noted)
    ours.img2img(settings, [gradient(64, 64)], [0])
    assert ours.pipe.unet not in looked


def test_pipelines_of_other_architectures_are_not_imported(
    command_line: CommandLine, tmp_path: Path
) -> None:
    folder = save_pictures(tmp_path / "in", a=(64, 64))
    command = command_line.arguments("img2img", folder, "-o", tmp_path / "out", "--eager", *FEW)
    script = f"""
import sys
from onediff_ext.cli.main import main
assert main({command!r}) == 0
print(*[name for name in sys.modules if name.startswith("diffusers.pipelines.")])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    imported = done.stdout.splitlines()[-1].split()
    assert any("stable_diffusion" in name for name in imported)
    assert not [name for name in imported if "auto_pipeline" in name or "controlnet" in name]


def test_a_prompt_is_encoded_once_for_a_job(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import StableDiffusionImg2ImgPipeline

    encode, encoded = StableDiffusionImg2ImgPipeline.encode_prompt, []

    def noted(pipe: Any, prompt: Any, *others: Any, **named: Any) -> Any:
        encoded.append(prompt)
        return encode(pipe, prompt, *others, **named)

    monkeypatch.setattr(StableDiffusionImg2ImgPipeline, "encode_prompt", noted)
    folder = save_pictures(tmp_path / "in", a=(64, 64), b=(72, 64), c=(64, 72), d=(64, 80))
    (folder / "c.txt").write_text("a fox")
    command = ("img2img", folder, "--eager", "-p", "a cat", "--captions", *FEW)
    assert command_line(*command, "-o", tmp_path / "out").status == 0
    assert encoded == [["a cat"], ["a fox"]]
    assert command_line(*command, "-o", tmp_path / "again").status == 0
    assert len(encoded) == 4


def test_a_caption_is_read_once(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_pictures(tmp_path / "in", a=(64, 64), b=(72, 64))
    caption, draw = folder / "b.txt", ImageGenerator.img2img
    caption.write_text("a fox")

    def break_caption(*arguments: Any) -> Any:
        caption.write_bytes(b"\xff")
        return draw(*arguments)

    monkeypatch.setattr(ImageGenerator, "img2img", break_caption)
    options = ("--eager", "-p", "a cat", "--captions", "--batch-size", "1", *FEW)
    ended = command_line("img2img", folder, "-o", tmp_path / "out", *options)
    assert ended.status == 0, ended
    texts = {
        path.name: read_png(path).texts[INFOTEXT_KEYWORD] for path in (tmp_path / "out").iterdir()
    }
    assert [texts[f"{name}.png"].splitlines()[0] for name in "ab"] == ["a cat", "a fox"]


def test_prompts_are_encoded_again_after_a_job(command_line: CommandLine) -> None:
    ours, settings = (
        image_generator(command_line),
        DrawSettings(steps=1, strength=1.0, prompt="a cat"),
    )

    def draw() -> bytes:
        (image,) = ours.img2img(settings, [gradient(64, 64)], [0]).images
        assert image is not None
        return image.tobytes()

    with ours.one_job():
        first = draw()
        assert draw() == first
    with torch.no_grad():
        for weight in ours.pipe.text_encoder.parameters():
            weight.mul_(3)
    assert draw() != first
    with ours.one_job():
        assert draw() != first


def test_a_picture_is_written_while_the_next_one_is_drawn(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onediff_ext.pictures.batch import run_batches

    second_begins, met = threading.Event(), []
    own_draw, own_write = ImageGenerator.img2img, run_batches.write_png

    def draw(image_generator: ImageGenerator, *arguments: Any) -> Any:
        if image_generator.__dict__.setdefault("_drawn", []):
            second_begins.set()
        image_generator.__dict__["_drawn"].append(1)
        return own_draw(image_generator, *arguments)

    def write(*arguments: Any, **named: Any) -> None:
        met.append(second_begins.wait(20))
        own_write(*arguments, **named)

    monkeypatch.setattr(ImageGenerator, "img2img", draw)
    monkeypatch.setattr(run_batches, "write_png", write)
    folder = save_pictures(tmp_path / "in", a=(64, 64), b=(72, 64))
    ended = command_line("img2img", folder, "-o", tmp_path / "out", "--eager", *FEW)
    assert ended.status == 0, ended
    assert met == [True, True]


def test_the_next_picture_is_made_ready_while_one_is_drawn(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers.image_processor import VaeImageProcessor

    third_is_ready, met, threads = threading.Event(), [], []
    own_draw, own_preprocess = ImageGenerator.img2img, VaeImageProcessor.preprocess

    def draw(image_generator: ImageGenerator, settings: Any, images: Any, *others: Any) -> Any:
        assert isinstance(images, torch.Tensor)
        if images.shape[-1] == 72:
            met.append(third_is_ready.wait(20))
        return own_draw(image_generator, settings, images, *others)

    def preprocess(processor: Any, images: Any, *others: Any, **named: Any) -> Any:
        threads.append(threading.current_thread())
        found = own_preprocess(processor, images, *others, **named)
        if found.shape[-1] == 80:
            third_is_ready.set()
        return found

    monkeypatch.setattr(ImageGenerator, "img2img", draw)
    monkeypatch.setattr(VaeImageProcessor, "preprocess", preprocess)
    folder = save_pictures(tmp_path / "in", a=(64, 64), b=(72, 64), c=(80, 64))
    ended = command_line("img2img", folder, "-o", tmp_path / "out", "--eager", *FEW)
    assert ended.status == 0, ended
    assert met == [True]
    assert len(threads) == 3
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("name", ["sd15", "sd15_inpaint"])
def test_what_was_read_ahead_draws_the_same_picture(command_line: CommandLine, name: str) -> None:
    ours, settings = image_generator(command_line, name), DrawSettings(steps=2, strength=0.6)
    images = [gradient(64, 72), gradient(64, 72).rotate(180)]
    plain = ours.img2img(settings, images, [0, 1]).images
    ahead = ours.img2img(settings, ours.read(images), [0, 1]).images
    assert [i.tobytes() for i in plain if i] == [i.tobytes() for i in ahead if i]
    assert plain[0] is not None
    assert plain[1] is not None
