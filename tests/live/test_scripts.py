"""Scripts that draw many pictures in one go."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.webui_client import Drawn, WebUI, assert_same


def test_xyz_plot(webui: WebUI) -> None:
    arguments = webui.script_arguments(
        "x/y/z plot",
        "txt2img",
        X_type="Steps",
        X_values="2,3",
        Y_type="CFG Scale",
        Y_values="1,7",
    )
    job = {"script_name": "x/y/z plot", "script_args": arguments}
    theirs = webui.draw(False, **job)
    assert_same(webui.draw(True, **job), theirs)
    assert webui.status()["running"] == "compiled"


def test_xyz_plot_over_checkpoints(webui: WebUI, checkpoints: list[str]) -> None:
    names = [title.split(" [")[0] for title in checkpoints[:2]]
    arguments = webui.script_arguments(
        "x/y/z plot",
        "txt2img",
        X_type="Checkpoint name",
        X_values=", ".join(names),
        Use_text_inputs_instead_of_dropdowns=True,
    )
    job = {"script_name": "x/y/z plot", "script_args": arguments}
    assert_same(webui.draw(True, **job), webui.draw(False, **job))


def test_loopback(webui: WebUI, photo: np.ndarray) -> None:
    arguments = webui.script_arguments("loopback", "img2img", Loops=2)
    job: dict[str, Any] = {
        "script_name": "loopback",
        "script_args": arguments,
        "init_images": [photo],
        "denoising_strength": 0.5,
        "steps": 4,
    }
    webui.draw(False, "img2img", **job)  # the VAE's noise depends on the job before
    theirs = webui.draw(False, "img2img", **job)
    assert_same(webui.draw(True, "img2img", **job), theirs)
    assert webui.status()["running"] == "compiled"


def test_sd_upscale(webui: WebUI, photo: np.ndarray) -> None:
    if all(upscaler["name"] != "Lanczos" for upscaler in webui.get("/sdapi/v1/upscalers")):
        pytest.skip("as Neo, this WebUI upscales by models only")
    arguments = webui.script_arguments(
        "sd upscale", "img2img", Tile_overlap=16, Upscaler="Lanczos", Scale_Factor=1.5
    )
    job: dict[str, Any] = {
        "script_name": "sd upscale",
        "script_args": arguments,
        "init_images": [photo],
        "denoising_strength": 0.4,
        "steps": 4,
    }
    # The host's own first picture after another job differs from those after it (A1111 1.10.1).
    webui.draw(False, "img2img", **job)
    theirs = webui.draw(False, "img2img", **job)
    assert theirs.pictures[0].shape[0] == 192
    assert_same(webui.draw(True, "img2img", **job), theirs)


def test_batch_across_resolutions(webui: WebUI, photo: np.ndarray, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    sizes = {"a.png": (128, 128), "b.png": (137, 201), "c.png": (192, 64), "d.png": (128, 128)}
    for name, size in sizes.items():
        Image.fromarray(photo).resize(size).save(folder / name)

    def run(accelerated: bool, target: Path) -> Drawn:
        script = "onediff: img2img batch across resolutions"
        arguments = webui.script_arguments(
            script, "img2img", Input_folder=str(folder), Output_folder=str(target)
        )
        return webui.draw(
            accelerated,
            "img2img",
            script_name=script,
            script_args=arguments,
            init_images=[photo],
            denoising_strength=0.6,
            steps=4,
        )

    def read(target: Path) -> Drawn:
        paths = sorted(target.glob("*.png"))
        assert {path.name: Image.open(path).size for path in paths} == sizes
        return Drawn([np.asarray(Image.open(path).convert("RGB")) for path in paths], [], 0.0)

    run(False, tmp_path / "before")  # the VAE's noise depends on the job before
    run(False, tmp_path / "theirs")
    for number in range(2):
        said = run(True, tmp_path / f"ours-{number}").infotexts
        print(*said, sep="\n")  # names each picture that was not drawn, and why
        assert_same(read(tmp_path / f"ours-{number}"), read(tmp_path / "theirs"))
    assert webui.status()["running"] == "compiled"
    again = run(True, tmp_path / "ours-0")
    assert again.pictures == []
    assert "4 were done already" in again.infotexts[0]


def _processes() -> int:
    """How many WebUIs draw for another one, on this machine, without children that they fork."""
    found: dict[str, str] = {}  # parent of each
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"--nowebui" in (path / "cmdline").read_bytes():
                # "pid (name) state parent …"; the name may have spaces.
                found[path.name] = (path / "stat").read_text().rpartition(")")[2].split()[1]
    return sum(parent not in found for parent in found.values())


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")
def test_batch_on_several_processes(webui: WebUI, photo: np.ndarray, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(10):
        size = ((128, 128), (136, 200))[number % 2]
        Image.fromarray(np.roll(photo, number, 1)).resize(size).save(folder / f"p{number}.png")
    script, most = "onediff: img2img batch across resolutions", 0

    def run(gpus: int, target: Path) -> Drawn:
        named = {"input": str(folder), "output": str(target), "batch": 1, "gpus": str(gpus)}
        webui.draw(
            True,
            "img2img",
            script_name=script,
            script_args=[named],
            init_images=[photo],
            denoising_strength=0.9,
            steps=30,
        )
        paths = sorted(target.glob("*.png"))
        assert len(paths) == 10
        return Drawn([np.asarray(Image.open(path).convert("RGB")) for path in paths], [], 0.0)

    run(1, tmp_path / "warm")
    one = run(1, tmp_path / "one")
    ended = threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.5):
            most = max(most, _processes())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        two = run(2, tmp_path / "two")
    finally:
        ended.set()
        watching.join()
    assert most == 1
    assert _processes() == 0
    assert_same(two, one)


@pytest.mark.parametrize("path", ["txt2img", "img2img"])
def test_script_name_none(webui: WebUI, path: str, photo: np.ndarray) -> None:
    """An empty script name is what many clients send."""
    job: dict[str, Any] = {"script_name": "", "steps": 2}
    if path == "img2img":
        job |= {"init_images": [photo], "denoising_strength": 0.7, "steps": 3}
    assert_same(webui.draw(True, path, **job), webui.draw(False, path, **job))
