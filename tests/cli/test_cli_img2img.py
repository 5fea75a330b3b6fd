"""`onediff-ext img2img` over folders: what comes out, in which size, order and name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image, ImageStat

from onediff_ext.pictures.infotext_format import parse_infotext
from tests.support.command_line import KINDS
from tests.support.sample_pictures import difference, gradient, infotext_of, save_pictures

if TYPE_CHECKING:
    from tests.support.command_line import CommandLine

pytest_plugins = ("tests.support.command_line",)

Run = Callable[..., dict[str, Any]]

REPORT = {
    "device": str,
    "versions": dict,
    "pictures": list,
    "already_done": list,
    "graphs": dict,
    "recompiles": int,
    "fallbacks": list,
    "skipped": list,
    "warnings": list,
    "peak_bytes": int,
    "ready_seconds": float,
    "start_up": dict,
}
PICTURE = {
    "input": str,
    "output": str,
    "width": int,
    "height": int,
    "seconds": float,
    "seconds_per_step": float,
}


def outputs_of(report: dict[str, Any]) -> list[str]:
    return [picture["output"] for picture in report["pictures"]]


def outputs(report: dict[str, Any]) -> list[Path]:
    return list(map(Path, outputs_of(report)))


def sizes(report: dict[str, Any]) -> dict[str, tuple[int, int]]:
    found = {}
    for picture in report["pictures"]:
        with Image.open(picture["output"]) as image:
            assert image.size == (picture["width"], picture["height"])
            found[Path(picture["input"]).name] = image.size
    return found


@pytest.fixture
def every_kind(tmp_path: Path) -> Path:
    folder = save_pictures(tmp_path / "in", a=(64, 64), b=(136, 200), c=(101, 67), d=(64, 64))
    gradient(80, 64, "CMYK").save(folder / "cmyk.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6
    gradient(96, 64).save(folder / "turned.jpg", exif=exif)
    clear = gradient(72, 72, "RGBA")
    clear.putalpha(Image.linear_gradient("L").resize((72, 72)))
    clear.save(folder / "clear.png")
    Image.new("I;16", (64, 72), 40000).save(folder / "deep.png")
    gradient(100, 30).save(folder / "flat.webp")
    (folder / "broken.jpg").write_bytes(b"no picture" * 50)
    (folder / "empty.png").touch()
    gradient(200, 200).save(folder / "cut.png")
    content = (folder / "cut.png").read_bytes()
    (folder / "cut.png").write_bytes(content[: len(content) // 2])
    (folder / "notes.txt").write_text("not a picture")
    return folder


def test_a_folder_of_every_kind(
    run: Run, every_kind: Path, tmp_path: Path, command_line: CommandLine
) -> None:
    report = run(every_kind, "-o", tmp_path / "out", "-p", "a fox", status=1)
    expected = {
        "a.png": (64, 64),
        "b.png": (136, 200),
        "c.png": (101, 67),
        "clear.png": (72, 72),
        "cmyk.jpg": (80, 64),
        "d.png": (64, 64),
        "deep.png": (64, 72),
        "flat.webp": (100, 30),
        "turned.jpg": (64, 96),
    }
    assert sizes(report) == expected
    assert list(sizes(report)) == list(expected)  # the inputs' order, not the groups'
    reasons = {Path(entry["input"]).name: entry["reason"] for entry in report["skipped"]}
    assert set(reasons) == {"notes.txt", "broken.jpg", "empty.png", "cut.png"}
    assert "Not a picture" in reasons["notes.txt"]
    assert "not a picture of a known format" in reasons["broken.jpg"]
    assert "empty" in reasons["empty.png"]
    assert "cut off" in reasons["cut.png"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        Path(name).stem + ".png" for name in expected
    }

    eager = run(every_kind, "-o", tmp_path / "eager", "-p", "a fox", "--eager", status=1)
    for compiled, plain in zip(outputs(report), outputs(eager), strict=True):
        assert difference(compiled, plain) <= 1, compiled.name
    again = command_line("img2img", every_kind, "-o", tmp_path / "eager", "-p", "a fox", "--eager",
                         "--steps", "2", "--strength", "1")  # fmt: skip
    assert "9 pictures already done." in again.out
    assert again.status == 1  # one picture is still cut off


def test_pictures_at_urls(run: Run, tmp_path: Path, command_line: CommandLine) -> None:
    import fsspec

    folder = save_pictures(tmp_path / "in", a=(64, 64), b=(64, 72))
    bucket = fsspec.filesystem("memory")
    bucket.put(str(folder), "/photos/holiday", recursive=True)
    report = run("memory://photos/holiday", "-o", "memory://made/out", "--eager")
    assert outputs_of(report) == ["memory://made/out/a.png", "memory://made/out/b.png"]
    local = run(folder, "-o", tmp_path / "out", "--eager")
    for name, path in zip(outputs_of(report), outputs(local), strict=True):
        (tmp_path / path.name).write_bytes(bucket.cat(name.removeprefix("memory:/")))
        assert difference(tmp_path / path.name, path) == 0
    again = command_line("img2img", "memory://photos/holiday", "-o", "memory://made/out",
                         "--eager", "--steps", "2", "--strength", "1")  # fmt: skip
    assert "2 pictures already done." in again.out
    refused = command_line("img2img", "memory://photos/none", "-o", tmp_path / "none", "--eager")
    refused.refused("There is no memory://photos/none.")
    command_line("demo", "-o", "memory://made/demo").refused("The demo writes to this machine.")


def test_a_password_in_a_url_is_shown_nowhere(
    run: Run, tmp_path: Path, command_line: CommandLine, caplog: pytest.LogCaptureFixture
) -> None:
    import fsspec

    secret, place = "s3cr3t-pw", "memory://me:s3cr3t-pw@photos"
    folder = save_pictures(tmp_path / "in", a=(64, 64))
    (folder / "broken.png").write_bytes(b"no picture")
    bucket = fsspec.filesystem("memory")
    bucket.put(str(folder), f"/me:{secret}@photos/in", recursive=True)
    report = run(f"{place}/in", "-o", f"{place}/out", "--eager", status=1)
    assert outputs_of(report) == ["memory://me:***@photos/out/a.png"]
    assert secret not in json.dumps(report)
    assert secret.encode() not in bucket.cat(f"/me:{secret}@photos/out/a.png")
    again = command_line("img2img", f"{place}/in", "-o", f"{place}/out", "--eager",
                         "--steps", "2", "--strength", "1")  # fmt: skip
    assert "1 picture already done." in again.out
    shown = [again.out, again.err]
    for words in (
        ["img2img", f"{place}/none", "-o", f"{place}/out"],
        ["img2img", f"nothing://me:{secret}@photos", "-o", "out"],
        ["txt2img", "--model", f"{place}/model.safetensors"],
        ["txt2img", "--report", f"{place}/none/report.json"],
        ["txt2img", "--lora", f"{place}/lora.safetensors"],
        ["txt2img", "--gpus", "1", "--graphs", f"{place}/graphs"],
        ["txt2img", f"{place}/unknown"],
    ):
        refused = command_line(*words, "--eager")
        assert refused.status == 2
        shown += [refused.out, refused.err]
    assert not [text for text in shown if secret in text]
    assert secret not in caplog.text


def test_report(run: Run, tmp_path: Path) -> None:
    folder = save_pictures(tmp_path / "in", a=(64, 64), b=(64, 72))
    report = run(folder, "-o", tmp_path / "out")
    assert {name: type(value) for name, value in report.items()} == REPORT
    for picture in report["pictures"]:
        assert {name: type(value) for name, value in picture.items()} == PICTURE
        assert picture["seconds"] > 0 < picture["seconds_per_step"]
    assert report["graphs"] == {"built": 0, "loaded": KINDS, "reused": 2 * KINDS}
    assert report["recompiles"] == 0
    assert report["fallbacks"] == report["skipped"] == report["warnings"] == []
    assert report["device"].startswith("cpu")
    assert {"python", "torch", "diffusers", "onediff-ext"} <= set(report["versions"])
    assert report["peak_bytes"] > 2**20
    assert 0 < report["ready_seconds"] < 60
    steps = report["start_up"]
    assert list(steps) == ["torch", "imports", "model", "graphs", "first picture"]
    assert list(steps.values()) == sorted(steps.values())


def test_a_size_that_is_no_multiple_of_8(run: Run, tmp_path: Path) -> None:
    # 361x243 has 46x31 latents, then 23x16 and 12x8: odd at two levels.
    expected = {"a.png": (361, 243), "b.png": (1001, 67), "c.png": (67, 101)}
    folder = save_pictures(tmp_path / "in", **{name[0]: size for name, size in expected.items()})
    few = ("--steps", "1", "--strength", "1")
    report = run(folder, "-o", tmp_path / "out", *few)
    assert sizes(report) == expected
    assert report["fallbacks"] == []
    assert report["graphs"] == {"built": 0, "loaded": KINDS, "reused": 3 * KINDS}
    eager = run(folder, "-o", tmp_path / "eager", *few, "--eager")
    for one, two in zip(outputs(report), outputs(eager), strict=True):
        assert difference(one, two) <= 1


def test_two_folders_with_equal_names(run: Run, tmp_path: Path) -> None:
    one = save_pictures(tmp_path / "one", a=(64, 64), b=(72, 64))
    two = save_pictures(tmp_path / "two", a=(80, 64), b=(64, 64))
    report = run(one, two, "-o", tmp_path / "out", "--eager")
    assert [path.name for path in outputs(report)] == ["a.png", "b.png", "a-2.png", "b-2.png"]
    assert [picture["width"] for picture in report["pictures"]] == [64, 72, 80, 64]
    assert [picture["input"] for picture in report["pictures"]] == [
        str(folder / name) for folder in (one, two) for name in ("a.png", "b.png")
    ]


def test_grouping_does_not_change_a_picture(run: Run, tmp_path: Path) -> None:
    folder = save_pictures(tmp_path / "in", **dict.fromkeys("abcde", (64, 64)), x=(72, 64))
    whole = run(folder, "-o", tmp_path / "4", "--seed", "7")
    for size in (1, 3):
        other = run(folder, "-o", tmp_path / str(size), "--seed", "7", "--batch-size", size)
        for one, two in zip(outputs(whole), outputs(other), strict=True):
            assert difference(one, two) <= 1
    alone = run(folder / "d.png", "-o", tmp_path / "alone", "--seed", "7")
    assert difference(*outputs(alone), tmp_path / "4" / "d.png") <= 1
    other_seed = run(folder / "d.png", "-o", tmp_path / "seed", "--seed", "8")
    assert difference(*outputs(other_seed), tmp_path / "4" / "d.png") > 8


def test_vary_seed_adds_the_number_of_the_picture(run: Run, tmp_path: Path) -> None:
    folder = save_pictures(tmp_path / "in", a=(64, 64), b=(64, 64), c=(64, 64))
    varied = run(folder, "-o", tmp_path / "out", "--seed", "7", "--vary-seed", "--eager")
    seeds = [parse_infotext(infotext_of(path)).fields["Seed"] for path in outputs(varied)]
    assert seeds == ["7", "8", "9"]
    alone = run(folder / "c.png", "-o", tmp_path / "alone", "--seed", "9", "--eager")
    assert difference(*outputs(alone), tmp_path / "out" / "c.png") <= 1


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("own", (150, 90)),
        ("scale:0.5", (75, 45)),
        ("longest:96", (96, 58)),
        ("longest:200:shrink", (150, 90)),
        ("fixed:72x64", (72, 64)),
        ("fixed:70x100:pad", (70, 100)),
    ],
)
def test_size_rules(run: Run, tmp_path: Path, rule: str, expected: tuple[int, int]) -> None:
    folder = save_pictures(tmp_path / "in", a=(150, 90))
    few = ("--steps", "1", "--strength", "1", "--eager")
    report = run(folder, "-o", tmp_path / "out", "--size", rule, *few)
    assert sizes(report) == {"a.png": expected}


def test_too_large_a_result_is_left_out(run: Run, tmp_path: Path) -> None:
    folder = save_pictures(tmp_path / "in", a=(64, 64), b=(128, 128))
    limit = ("--max-megapixels", "0.01", "--eager")
    report = run(folder, "-o", tmp_path / "out", *limit, status=1)
    assert list(sizes(report)) == ["a.png"]
    assert "over the limit" in report["skipped"][0]["reason"]


def test_name_templates(run: Run, tmp_path: Path) -> None:
    folder = save_pictures(tmp_path / "in", a=(64, 64), b=(72, 64))
    template = "{width}x{height}/{index:03d}-{stem}-{seed}"
    report = run(folder, "-o", tmp_path / "out", "--name", template, "--eager")
    names = [path.relative_to(tmp_path / "out").as_posix() for path in outputs(report)]
    assert names == ["64x64/000-a-0.png", "72x64/001-b-0.png"]


def test_subfolders_only_on_request(run: Run, command_line: CommandLine, tmp_path: Path) -> None:
    save_pictures(tmp_path / "in" / "deeper", a=(64, 64))
    here = command_line("img2img", tmp_path / "in", "-o", tmp_path / "out", "--eager")
    assert here.status == 0
    assert "There is no picture in" in here.err
    assert "--recursive" in here.err
    report = run(tmp_path / "in", "-o", tmp_path / "out", "--eager", "--recursive")
    assert list(sizes(report)) == ["a.png"]


def test_results_are_not_taken_for_inputs(run: Run, tmp_path: Path) -> None:
    folder = save_pictures(tmp_path / "in", a=(64, 64))
    first = run(folder, "-o", folder, "--eager")  # into the same folder
    assert outputs(first) == [folder / "a-2.png"]
    second = run(folder, "-o", folder, "--eager")
    assert second["pictures"] == []
    assert second["already_done"] == [str(folder / "a-2.png")]
    assert "earlier run" in second["skipped"][0]["reason"]


def test_transparency(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    hole = gradient(64, 64, "RGBA")
    hole.putalpha(Image.new("L", (64, 64), 0))
    hole.save(folder / "hole.png")
    gradient(64, 64).save(folder / "opaque.png")
    few = ("--steps", "2", "--strength", "0.5", "--eager")
    plain = run(folder, "-o", tmp_path / "plain", *few)
    kept = run(folder, "-o", tmp_path / "kept", "--keep-alpha", *few)
    modes = [[Image.open(path).mode for path in outputs(report)] for report in (plain, kept)]
    assert modes == [["RGB", "RGB"], ["RGBA", "RGB"]]
    with Image.open(tmp_path / "kept" / "hole.png") as image:
        assert ImageStat.Stat(image.getchannel("A")).extrema == [(0, 0)]


def test_parts_left_alone(run: Run, tmp_path: Path) -> None:
    folder = save_pictures(tmp_path / "in", a=(64, 72))
    eager = run(folder, "-o", tmp_path / "eager", "--eager")
    assert eager["graphs"] == {"built": 0, "loaded": 0, "reused": 0}
    for number, (options, loaded) in enumerate(
        (
            (["--ignore-vae"], 9),
            (["--ignore", "vae"], 9),
            (["--ignore", "vae_encoder"], 14),
            (["--ignore", "unet"], 8),
        )
    ):
        out = tmp_path / str(number)
        report = run(folder, "-o", out, *options)
        assert report["graphs"] == {"built": 0, "loaded": loaded, "reused": loaded}, options
        assert difference(*outputs(report), *outputs(eager)) <= 1


def test_no_build_draws_eager_and_says_so(
    run: Run, command_line: CommandLine, tmp_path: Path
) -> None:
    folder = save_pictures(tmp_path / "in", a=(64, 72))
    options = ("--no-build", "--store", tmp_path / "store")
    report = run(folder, "-o", tmp_path / "out", *options)
    assert report["graphs"] == {"built": 0, "loaded": 0, "reused": 0}
    assert {entry["reason"] for entry in report["fallbacks"]} == {
        "no graph is stored, and none may be built"
    }
    assert all(entry["count"] > 0 for entry in report["fallbacks"])
    eager = run(folder, "-o", tmp_path / "eager", "--eager")
    # Not the same bytes on each CPU: without --eager, convolutions run in NHWC.
    assert difference(*outputs(report), *outputs(eager)) <= 1
    shown = command_line("img2img", folder, "-o", tmp_path / "shown", "--steps", "1",
                         "--strength", "1", *options)  # fmt: skip
    assert len([line for line in shown.out.splitlines() if line.startswith("eager (")]) == 1


def test_loras(run: Run, command_line: CommandLine, tmp_path: Path) -> None:
    folder = save_pictures(tmp_path / "in", a=(64, 64))
    kohya, plain = command_line.lora("kohya"), command_line.lora("diffusers")

    def draw(name: str, *options: object) -> Path:
        report = run(folder, "-o", tmp_path / name, "-p", "a fox", *options)
        assert report["graphs"]["built"] == 0  # a LoRA needs no graphs of its own
        assert report["fallbacks"] == []
        return outputs(report)[0]

    without = draw("without", "--eager")
    full = draw("full", "--lora", kohya)
    assert difference(full, without) > 8
    assert difference(draw("diffusers", "--lora", plain), full) <= 1
    half = draw("half", "--lora", f"{kohya}:0.5")
    assert min(difference(half, full), difference(half, without)) > 4
    assert difference(draw("eager", "--lora", f"{kohya}:0.5", "--eager"), half) <= 1
    assert difference(draw("none", "--lora", f"{kohya}:0", "--eager"), without) <= 1
    both = ("--lora", f"{kohya}:0.5", "--lora", f"{plain}:0.5")
    assert difference(draw("both", *both, "--eager"), full) <= 1
    assert f'Lora: "{kohya.stem}:0.5:' in infotext_of(half)


SCHEDULERS = {
    "Euler": ("Euler", "Automatic"),
    "Euler a": ("Euler a", "Automatic"),
    "DPM++ 2M Karras": ("DPM++ 2M", "Karras"),
    "DDIM": ("DDIM", "Automatic"),
    "UniPC": ("UniPC", "Automatic"),
    "LCM": ("LCM", "Automatic"),
}


def test_schedulers(run: Run, tmp_path: Path) -> None:
    folder = save_pictures(tmp_path / "in", a=(64, 64))
    drawn: list[Path] = []
    for name, names in SCHEDULERS.items():
        report = run(
            folder, "-o", tmp_path / name, "--scheduler", name, "--steps", "6",
            "--strength", "0.6", "--eager",
        )  # fmt: skip
        fields = parse_infotext(infotext_of(*outputs(report))).fields
        assert (fields["Sampler"], fields["Schedule type"]) == names
        drawn += outputs(report)
    for number, one in enumerate(drawn):
        assert all(difference(one, other) > 1 for other in drawn[:number]), one
    compiled = run(
        folder, "-o", tmp_path / "compiled", "--scheduler", "dpm++ 2m karras", "--steps", "6",
        "--strength", "0.6",
    )  # fmt: skip
    assert difference(*outputs(compiled), tmp_path / "DPM++ 2M Karras" / "a.png") <= 1


def test_infotext(run: Run, command_line: CommandLine, tmp_path: Path) -> None:
    folder = save_pictures(tmp_path / "in", a=(101, 67))
    report = run(
        folder, "-o", tmp_path / "out", "--eager", "-p", "a red fox, oil: old", "-n", "blurry",
        "--steps", "4", "--strength", "0.5", "--guidance", "5.5", "--seed", "42",
    )  # fmt: skip
    text = infotext_of(*outputs(report))
    infotext = parse_infotext(text)
    assert (infotext.prompt, infotext.negative_prompt) == ("a red fox, oil: old", "blurry")
    fields = dict(infotext.fields)
    assert fields.pop("Version").startswith("onediff-ext ")
    assert fields == {
        "Steps": "4",
        "Sampler": "Euler a",
        "Schedule type": "Automatic",
        "CFG scale": "5.5",
        "Seed": "42",
        "Size": "101x67",
        "Model": command_line.checkpoint().stem,
        "Denoising strength": "0.5",
    }
    assert text.splitlines()[1] == "Negative prompt: blurry"


def test_a_prompt_that_is_too_long_is_said(run: Run, tmp_path: Path) -> None:
    folder = save_pictures(tmp_path / "in", a=(64, 64))
    report = run(folder, "-o", tmp_path / "out", "--eager", "-n", "fox " * 90)
    assert report["warnings"] == [
        "The negative prompt has 90 tokens; what comes after 75 is ignored."
    ]


@pytest.mark.parametrize("name", ["sd2", "sdxl", "sdxl_refiner", "sd15_inpaint", "lcm"])
def test_architectures(run: Run, command_line: CommandLine, tmp_path: Path, name: str) -> None:
    folder = save_pictures(tmp_path / "in", a=(64, 64), b=(72, 104))
    from tests.support.quick_builds import quick_builds

    options = ["-m", command_line.checkpoint(name), "-p", "a fox", "--steps", "4"]
    options += ["--scheduler", "LCM" if name == "lcm" else "DPM++ 2M Karras"]
    with quick_builds():
        first = run(folder, "-o", tmp_path / "first", *options)
    second = run(folder, "-o", tmp_path / "second", *options)
    eager = run(folder, "-o", tmp_path / "eager", *options, "--eager")
    assert first["fallbacks"] == second["fallbacks"] == []
    counts = first["graphs"]
    kinds = counts["built"] + counts["loaded"]
    assert second["graphs"] == {"built": 0, "loaded": kinds, "reused": 2 * kinds}
    for one, two, plain in zip(*map(outputs, (first, second, eager)), strict=True):
        assert difference(one, two) == 0
        assert difference(one, plain) <= 1


def test_another_checkpoint_of_the_architecture(
    run: Run, command_line: CommandLine, tmp_path: Path
) -> None:
    folder = save_pictures(tmp_path / "in", a=(64, 64))
    first = run(folder, "-o", tmp_path / "first")
    model = ("-m", command_line.checkpoint("sd15", 1))
    second = run(folder, "-o", tmp_path / "second", *model)
    assert second["graphs"]["built"] == 0
    assert difference(*outputs(first), *outputs(second)) > 8
    eager = run(folder, "-o", tmp_path / "eager", *model, "--eager")
    assert difference(*outputs(second), *outputs(eager)) <= 1


def test_a_changed_setting_draws_again(run: Run, command_line: CommandLine, tmp_path: Path) -> None:
    folder = save_pictures(tmp_path / "in", a=(64, 64), b=(72, 64))
    out = ("-o", tmp_path / "out", "--eager")
    assert len(run(folder, *out)["pictures"]) == 2
    unchanged = run(folder, *out, "--batch-size", "1")
    assert unchanged["pictures"] == []
    assert unchanged["already_done"] == [str(tmp_path / "out" / f"{n}.png") for n in "ab"]
    for change in (
        ["-p", "a fox"],
        ["--seed", "1"],
        ["--guidance", "5"],
        ["--scheduler", "Euler"],
        ["--size", "scale:1.5"],
        ["--lora", command_line.lora("kohya")],
        ["-m", command_line.checkpoint("sd15", 1)],
        ["--steps", "4"],
    ):
        assert len(run(folder, *out, *change)["pictures"]) == 2, change
    gradient(64, 64, "L").save(folder / "a.png")
    changed = run(folder, *out, "--steps", "4")
    assert [Path(picture["input"]).name for picture in changed["pictures"]] == ["a.png"]


def test_numbers_that_run_over_are_no_black_picture(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from diffusers import AutoencoderKL

    decode = AutoencoderKL.decode

    def overflow(vae: AutoencoderKL, latents: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        (image,) = decode(vae, latents, *args, **kwargs)
        image[0, 0, 0, 0] = torch.nan
        return (image,)

    folder = save_pictures(tmp_path / "in", a=(64, 64), b=(64, 64))
    monkeypatch.setattr(AutoencoderKL, "decode", overflow)
    report = run(folder, "-o", tmp_path / "out", "--eager", status=1)
    assert list(sizes(report)) == ["b.png"]
    assert "NaN" in report["skipped"][0]["reason"]
    assert "another VAE" in report["skipped"][0]["reason"]


def test_a_vae_that_runs_over_in_fp16(run: Run, tmp_path: Path) -> None:
    from onediff_ext.hosts.diffusers.checkpoints.ldm_saving import save_ldm
    from tests.support import models
    from tests.support.vae_stand_ins import overflowing_vae

    pipe = models.sd15()
    pipe.vae = overflowing_vae("decoder")
    model = save_ldm(pipe, tmp_path / "overflowing.safetensors")
    folder = save_pictures(tmp_path / "in", a=(64, 64), b=(72, 64))
    few = ("--steps", "1", "--strength", "1", "--eager", "-m", model)
    report = run(folder, "-o", tmp_path / "out", *few, "--dtype", "fp16")
    assert report["warnings"] == ["VAE decoded in fp32: it overflows in fp16"]
    exact = run(folder, "-o", tmp_path / "exact", *few)
    assert exact["warnings"] == []
    for one, two in zip(outputs(report), outputs(exact), strict=True):
        assert difference(one, two) < 40  # the UNet's fp16


def test_vae_tiling(run: Run, tmp_path: Path) -> None:
    folder = save_pictures(tmp_path / "in", a=(531, 101))
    few = ("--steps", "1", "--strength", "1")
    report = run(folder, "-o", tmp_path / "tiled", *few, "--vae-tiling", "on")
    assert sizes(report) == {"a.png": (531, 101)}
    # Tiles are sizes like any others: the graphs that there are serve them.
    assert (report["graphs"]["built"], report["fallbacks"], report["warnings"]) == (0, [], [])
    whole = run(folder, "-o", tmp_path / "whole", *few)
    assert difference(*outputs(report), *outputs(whole)) > 1
    eager = run(folder, "-o", tmp_path / "eager", *few, "--vae-tiling", "on", "--eager")
    assert difference(*outputs(report), *outputs(eager)) <= 1


@pytest.mark.parametrize("error", ["OutOfMemoryError", "DefaultCPUAllocator"])
def test_batches_that_do_not_fit_into_memory_are_halved(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    import torch

    from onediff_ext.hosts.diffusers.drawing.image_generator import ImageGenerator

    img2img = ImageGenerator.img2img

    def limited(image_generator: ImageGenerator, settings: Any, images: Any, *others: Any) -> Any:
        if images.shape[0] * images.shape[-1] > 128:
            if error == "OutOfMemoryError":
                raise torch.OutOfMemoryError("no memory")
            raise RuntimeError(f"{error}: can't allocate memory: you tried to allocate 1 bytes")
        return img2img(image_generator, settings, images, *others)

    folder = save_pictures(tmp_path / "in", **dict.fromkeys("abcde", (64, 64)), large=(136, 64))
    expected = run(folder, "-o", tmp_path / "expected", "--eager")
    monkeypatch.setattr(ImageGenerator, "img2img", limited)
    report = run(folder, "-o", tmp_path / "out", "--eager", status=1)
    assert list(sizes(report)) == [f"{name}.png" for name in "abcde"]
    assert "does not fit into memory" in report["skipped"][0]["reason"]
    for one, two in zip(outputs(report), outputs(expected), strict=False):
        assert difference(one, two) <= 1


def test_report_into_the_new_output_folder(run: Run, tmp_path: Path) -> None:
    folder = save_pictures(tmp_path / "in", a=(64, 64))
    report = tmp_path / "new" / "report.json"
    run(folder, "-o", tmp_path / "new", "--eager", "--report", report)
    # The fixture's own --report comes later on the command line, and counts.
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"a.png"}
    assert json.loads((tmp_path / "report.json").read_text())["pictures"]
