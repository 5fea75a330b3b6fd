"""The main job inside a WebUI, with a stand-in for the host's drawing."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image, ImageOps

from onediff_ext.core.errors import OptionError, PictureError
from onediff_ext.pictures.batch import run_batches
from onediff_ext.pictures.batch.batch_job import BatchJob
from onediff_ext.pictures.naming import NameTemplate
from onediff_ext.pictures.png_chunks import INFOTEXT_KEYWORD, read_png
from onediff_ext.pictures.size_rules import parse_size_rule
from onediff_ext.pictures.writing import write_png
from onediff_ext.webui.batch_job import BatchResult, run_batch_job
from tests.support.webui_stand_in import StandInJob, StandInState


class InvertingHost:
    """Draws by inverting; notes each job; runs `meanwhile` before each batch."""

    def __init__(self, meanwhile: Any = None) -> None:
        self.jobs: list[Any] = []
        self.state = StandInState()
        self._meanwhile = meanwhile or (lambda host: None)

    def process(self, p: Any) -> Any:
        self.jobs.append(copy.copy(p))
        self._meanwhile(self)
        images = [ImageOps.invert(image) for image in p.init_images]
        texts = [f"{prompt}\nSeed: {seed}" for prompt, seed in zip(p.prompt, p.seed, strict=True)]
        return SimpleNamespace(images=images, infotexts=texts, index_of_first_image=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five pictures of two canvas sizes, a broken one, and a caption."""
    made = tmp_path / "in"
    made.mkdir()
    for name, size in (
        ("a", (150, 101)), ("b", (96, 136)), ("c", (152, 104)), ("d", (150, 101)), ("e", (96, 136)),
    ):  # fmt: skip
        Image.new("RGB", size, (10, 20, 30)).save(made / f"{name}.png")
    (made / "broken.png").write_bytes(b"no picture")
    (made / "b.txt").write_text("a dog")
    return made


def run(folder: Path, host: InvertingHost, p: StandInJob | None = None, **more: Any) -> BatchResult:
    values = {
        "inputs": [folder],
        "output_dir": folder.parent / "out",
        "size_rule": parse_size_rule("own"),
        "batch_size": 2,
    }
    p = p or StandInJob()
    return run_batch_job(
        p,
        BatchJob(seed=int(p.seed), **{**values, **more}),
        process=host.process,
        state=host.state,
        identity={"checkpoint": "abc"},
    )


def sizes(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: Image.open(path).size for path in folder.glob("*.png")}


def test_results_have_exactly_their_inputs_sizes_and_are_drawn_in_groups(folder: Path) -> None:
    host = InvertingHost()
    result = run(folder, host)
    assert sizes(folder.parent / "out") == {
        "a.png": (150, 101), "b.png": (96, 136), "c.png": (152, 104), "d.png": (150, 101),
        "e.png": (96, 136),
    }  # fmt: skip
    assert [(j.width, j.height, j.batch_size) for j in host.jobs] == [
        (152, 104, 2), (152, 104, 1), (96, 136, 2),
    ]  # fmt: skip
    assert all(len(j.init_images) == len(j.seed) == len(j.prompt) for j in host.jobs)
    assert len(result.written) == 5
    assert [entry.path.name for entry in result.report.failures] == ["broken.png"]
    assert "5 pictures drawn, 1 left out" in result.summary()
    assert host.state.job_count == 3


def test_infotext_is_the_hosts_and_pixels_are_the_drawn_ones(folder: Path) -> None:
    run(folder, InvertingHost())
    path = folder.parent / "out" / "a.png"
    assert read_png(path).texts[INFOTEXT_KEYWORD] == "a cat\nSeed: 7"
    assert Image.open(path).getpixel((149, 100)) == (245, 235, 225)


def test_the_same_job_goes_on_where_it_was_interrupted(folder: Path) -> None:
    def interrupt_second(host: InvertingHost) -> None:
        host.state.interrupted = len(host.jobs) == 2

    first = InvertingHost(interrupt_second)
    stopped = run(folder, first)
    assert stopped.was_stopped
    assert len(stopped.written) == 2
    second = InvertingHost()
    result = run(folder, second)
    assert len(result.already_done) == 2
    assert len(result.written) == 3
    third = InvertingHost()
    assert len(run(folder, third).already_done) == 5
    assert third.jobs == []


def test_skip_leaves_out_one_batch_and_goes_on(folder: Path) -> None:
    def skip_first(host: InvertingHost) -> None:
        host.state.skipped = len(host.jobs) == 1

    result = run(folder, InvertingHost(skip_first))
    assert len(result.written) == 3
    assert "3 pictures drawn, 2 skipped" in result.summary()
    assert not result.was_stopped


def test_another_setting_makes_the_pictures_again(folder: Path) -> None:
    run(folder, InvertingHost())
    again = InvertingHost()
    result = run(folder, again, StandInJob(steps=9))
    assert len(result.written) == 5
    assert result.already_done == []


@pytest.mark.parametrize(
    "changed",
    [{"subseed": 4}, {"eta": 0.5}, {"eta": 1}, {"s_churn": 1.0}, {"s_noise": 0}, {"tiling": True}],
    ids=str,
)
def test_a_rare_setting_makes_them_again_too(folder: Path, changed: dict[str, Any]) -> None:
    p = StandInJob(subseed=3, subseed_strength=0.5)
    vars(p).update(eta=None, tiling=False)
    run(folder, InvertingHost(), p)
    assert run(folder, InvertingHost(), copy.copy(p)).written == []
    vars(p).update(changed)
    assert len(run(folder, InvertingHost(), p).written) == 5


def test_captions_and_seeds_belong_to_the_picture_not_the_batch(folder: Path) -> None:
    drawn = {}
    for batch_size in (1, 2, 5):
        host = InvertingHost()
        out = folder.parent / f"out-{batch_size}"
        run(folder, host, batch_size=batch_size, captions=True, vary_seed=True, output_dir=out)
        drawn[batch_size] = {
            path.name: read_png(path).texts[INFOTEXT_KEYWORD] for path in out.glob("*.png")
        }
    assert drawn[1] == drawn[2] == drawn[5]
    assert drawn[1]["b.png"] == "a dog\nSeed: 8"


def test_a_caption_is_read_once(folder: Path) -> None:
    def break_captions(_: InvertingHost) -> None:
        (folder / "b.txt").write_bytes(b"\xff")

    result = run(folder, InvertingHost(break_captions), captions=True)
    assert len(result.written) == 5
    infotext = read_png(folder.parent / "out" / "b.png").texts[INFOTEXT_KEYWORD]
    assert infotext == "a dog\nSeed: 7"


def test_names_alpha_and_size_rule(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    Image.new("RGBA", (64, 96), (9, 9, 9, 100)).save(folder / "glass.png")
    out = folder.parent / "out"
    run(
        folder,
        InvertingHost(),
        name_template=NameTemplate("{stem}-{width}x{height}"),
        keep_alpha=True,
        size_rule=parse_size_rule("scale:2"),
    )
    with Image.open(out / "glass-128x192.png") as image:
        assert image.size == (128, 192)
        assert image.getpixel((5, 5))[3] == 100


def test_the_hosts_own_object_is_not_changed(folder: Path) -> None:
    p = StandInJob()
    before = copy.deepcopy(vars(p))
    run(folder, InvertingHost(), p)
    assert vars(p) == before


def test_a_result_of_another_size_is_not_written(folder: Path) -> None:
    class Upscaling(InvertingHost):
        def process(self, p: Any) -> Any:
            done = super().process(p)
            done.images = [image.resize((32, 32)) for image in done.images]
            return done

    result = run(folder, Upscaling())
    assert result.written == []
    assert len(result.report.failures) == 6


def test_the_next_batch_is_drawn_while_results_are_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    third_is_drawn, waited = threading.Event(), []

    def write(path: Path, *args: Any, **more: Any) -> None:
        waited.append(third_is_drawn.wait(60))
        write_png(path, *args, **more)

    def note(host: InvertingHost) -> None:
        if len(host.jobs) == 3:
            third_is_drawn.set()

    monkeypatch.setattr(run_batches, "write_png", write)
    result = run(folder, InvertingHost(note))
    assert waited == [True] * 5
    assert [path.name for path in result.written] == ["a.png", "c.png", "d.png", "b.png", "e.png"]
    assert all(path.exists() for path in result.written)
    assert len(result.shown) == len(result.infotexts) == 5


def test_a_result_that_cannot_be_written_ends_the_job(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, *args: Any, **more: Any) -> None:
        if path.name == "d.png":
            raise PictureError("The disk is full.")
        write_png(path, *args, **more)

    monkeypatch.setattr(run_batches, "write_png", write)
    with pytest.raises(PictureError, match="full"):
        run(folder, InvertingHost())
    monkeypatch.undo()
    rest = run(folder, InvertingHost())
    assert [path.name for path in rest.already_done] == ["a.png", "c.png"]
    assert sorted(path.name for path in rest.written) == ["b.png", "d.png", "e.png"]


def test_an_empty_folder_and_a_wrong_batch_size_are_said(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(OptionError, match="no picture"):
        run(empty, InvertingHost())
    with pytest.raises(OptionError):
        run(empty, InvertingHost(), batch_size=0)
