"""Tables and plots of README and docs: made from result files, and up to date."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plot, start_up, tables
from benchmarks.flash_table import flash_kernels, flash_models
from benchmarks.guidance_table import guidance_rows
from benchmarks.results import write_result
from benchmarks.webui_gpus_table import webui_gpus

FINGERPRINT = {"gpu": "NVIDIA H200", "versions": {"torch": "2.11.0"}}


def row(contender: str, width: int, height: int, ms: float, **more: object) -> dict:
    return {
        "contender": contender, "dtype": "float16", "width": width, "height": height,
        "ms_median": ms, "first_s": 1.5, **more,
    }  # fmt: skip


def unet(*rows: dict, **more: object) -> dict:
    return {"model": "sdxl", "fingerprint": FINGERPRINT, "rows": list(rows), **more}


def test_all_pages_are_up_to_date() -> None:
    assert tables.main(check=True) == 0, "run python -m benchmarks.tables"


def test_the_plots_are_up_to_date() -> None:
    assert plot.main(check=True) == 0, "run python -m benchmarks.plot"


def test_a_missing_file_leaves_its_section_empty(tmp_path: Path) -> None:
    text = "a\n<!-- figures: pipeline sdxl -->\nold\n<!-- end -->\nb\n<!-- figures: other -->\nc\n"
    expected = "a\n<!-- figures: pipeline sdxl -->\n<!-- end -->\nb\n<!-- figures: other -->\nc\n"
    assert tables.with_tables(text, tmp_path) == expected
    assert tables.with_tables(expected, tmp_path) == expected


def test_a_section_is_replaced_and_stays_the_same(tmp_path: Path) -> None:
    write_result(
        tmp_path / "unet-sdxl-h200.json",
        unet(row("eager", 512, 512, 44.0), row("ours-exact", 512, 512, 11.0)),
    )
    text = "<!-- figures: unet sdxl -->\nold\n<!-- end -->\nafter"
    once = tables.with_tables(text, tmp_path)
    assert "| 512x512 | 44.0 | 11.0 | 4.0 |" in once
    assert once.endswith("<!-- end -->\nafter")
    assert "old" not in once
    assert tables.with_tables(once, tmp_path) == once


def test_what_was_not_measured_at_a_size_is_a_dash() -> None:
    table = tables.forward_table(
        unet(
            row("eager", 512, 512, 44.0),
            row("torch.compile", 1024, 1024, 30.0),
            row("ours-exact", 512, 512, 11.0),
        )
    )
    header, _, *lines = table.splitlines()
    assert header == "| size | eager | compile | OneDiff | times faster |"
    assert "| 512x512 | 44.0 | - | 11.0 | 4.0 |" in lines
    assert "| 1024x1024 | - | 30.0 | - | - |" in lines


def test_rows_of_another_dtype_stay_out() -> None:
    rows = (row("eager", 512, 512, 44.0), row("eager", 512, 512, 99.0) | {"dtype": "bfloat16"})
    assert "99.0" not in tables.forward_table(unet(*rows))
    assert "99.0" in tables.forward_table(unet(*rows), "bfloat16")
    with pytest.raises(tables.NotMeasured):
        tables.forward_table(unet(*rows), "float32")


def test_the_vaes_parts_are_tables_of_their_own() -> None:
    rows = [
        row(name, 512, 512, ms, part=part) | {"dtype": "bfloat16"}
        for part, name, ms in (
            ("decode", "eager", 40.0), ("decode", "ours-exact", 10.0),
            ("encode", "eager", 20.0), ("encode", "ours-exact", 8.0),
        )
    ]  # fmt: skip
    assert tables.vae_table(unet(*rows)).splitlines()[2:] == ["| 512x512 | 40.0 | 10.0 | 4.0 |"]
    encode = tables.vae_table(unet(*rows), "encode").splitlines()[2:]
    assert encode == ["| 512x512 | 20.0 | 8.0 | 2.5 |"]
    with pytest.raises(tables.NotMeasured):
        tables.vae_table(unet(*rows[:2]), "encode")


def test_first_steps_tell_what_is_missing_and_leave_old_rows_out() -> None:
    found = tables.first_steps(
        unet(
            row("compile_repeated_blocks", 512, 512, 1.0),
            row("ours-exact", 512, 512, 1.0, measured="now"),
            row("ours-exact", 720, 720, 1.0, measured="now", first_s=0.25),
            {
                "contender": "torch.compile",
                "dtype": "float16",
                "width": 512,
                "height": 512,
                "failed": "stopped",
                "measured": "now",
            },
            contenders={
                "ours-exact": {"ready_s": 18.0},
                "stable-fast": {"not_installed": "No module named 'sfast'"},
            },
        )
    )
    assert "| OneDiff | 18.0 | 0.25 | 2 |" in found
    assert "repeated" not in found
    assert "compile at 512x512: stopped" in found
    assert "stable-fast is not installed there (No module named 'sfast')" in found


def test_the_pipelines_ratio_is_withheld_when_pictures_differ() -> None:
    def contender(ratio: float | None) -> dict:
        return {
            "start_up_s": 8.0, "pictures_per_minute": 60.0, "ratio": ratio,
            "ratio_without_start_up": ratio,
        }  # fmt: skip

    found = tables.pipeline_table({
        "model": "sdxl", "pictures": 48, "unet_steps": 20, "batch_size": 1,
        "rows": [row("eager", 512, 512, 1.0)],
        "contenders": {
            "eager": contender(None), "ours-empty-store": contender(1.5),
            "ours-filled-store fp8": contender(None),
        },
    })  # fmt: skip
    assert "48 pictures of 1 sizes, 20 UNet steps each, one at a time" in found
    assert "| diffusers, eager | 8.0 | 60.0 | 1.0 | 1.0 |" in found
    assert "| OneDiff, empty store | 8.0 | 60.0 | 1.5 | 1.5 |" in found
    assert "| OneDiff, filled store, fp8 | 8.0 | 60.0 | - | - |" in found


def process(seconds: float, start_s: float) -> dict:
    """The figures of a process: four pictures of each size, one second apart."""
    rows = [
        {
            "width": w, "height": h, "seconds": seconds, "since_start_s": start_s + n,
            "running": "graphs", "kinds_ready": 2, "kinds_needed": 2,
        }
        for n, (w, h) in enumerate(size for size in start_up.SIZES for _ in range(4))
    ]  # fmt: skip
    return {
        "rows": rows, "dtype": "float16", "built": 2, "loaded": 0, "fingerprint": FINGERPRINT,
    }  # fmt: skip


def test_a_webuis_pictures_stand_beside_its_own_of_the_same_job() -> None:
    def picture(contender: str, seconds: float, **job: Any) -> dict:
        found = {"contender": contender, "seconds": seconds, "checkpoint": "a", "task": "txt2img",
                 "width": 768, "height": 512, **job}  # fmt: skip
        return found if contender == "eager" else {**found, "psnr_db": 53.4}

    first = {
        "host": "a1111",
        "model": "sd1",
        "rows": [
            picture("eager", 0.66),
            picture("eager", 0.7, checkpoint="b"),
            picture("ours-exact", 0.33),
            picture("ours-exact", 0.2, task="img2img"),  # not drawn by the host alone
            picture("ours-fp8", 0.1),
            picture("ours-exact", 0.35, checkpoint="b"),
            picture("ours-exact", 9.0),  # after the checkpoint was changed and changed back
        ],
    }
    second = {"host": "forge", "model": "sdxl", "rows": [picture("eager", 1.5),
                                                         picture("ours-exact", 1.0)]}  # fmt: skip
    table = tables.webui_table([first, second])
    assert table.splitlines()[2:] == [
        "| A1111, SD1.5 | txt2img, 768x512 | 0.66 | 0.33 | 2.0 | 53 |",
        "| Forge, SDXL | txt2img, 768x512 | 1.50 | 1.00 | 1.5 | 53 |",
    ]


def test_a_folder_on_several_gpus_stands_beside_one_gpus() -> None:
    more = {"equal": 7, "largest_difference": 2, "times_faster": 1.561}
    rows = [{"gpus": 1, "seconds": 122.66}, {"gpus": 2, "seconds": 78.59, **more}]
    _, lines = webui_gpus({"pictures": 8, "rows": rows})
    assert lines == [[1, "122.7", "1.00", "-", "-"], [2, "78.6", "1.56", "7 of 8", 2]]


def test_start_up_has_rows_and_a_table() -> None:
    found = {"eager": process(1.0, 9.0), "cold": process(1.1, 10.0), "warm": process(0.5, 12.0)}
    firsts = {role: [one["rows"][0]] for role, one in found.items()}
    firsts["cold"] += [{"seconds": s, "since_start_s": 10.0} for s in (3.0, 1.2)]
    warm_up = {"seconds": 10.5, "sizes": [{}] * 12, "built": 0}
    figures = start_up.summary(found, firsts, "sdxl", 20)
    assert "warm-up" not in tables.start_up_table(figures)  # a run that ended before it
    figures |= start_up.warm_up_figures(warm_up)
    assert len(figures["rows"]) == 60
    assert figures["new_size_costs_s"] == figures["new_size_costs_eager_s"] == 0
    assert len(figures["first_pictures"]["ours-empty-store"]) == 3
    names = list(dict.fromkeys(row["contender"] for row in figures["rows"]))
    assert names == ["eager", "ours-empty-store", "ours-filled-store"]
    assert figures["contenders"]["eager"] == {"dtype": "float16", "built": 2, "loaded": 0}
    table = tables.start_up_table(figures)
    assert "| restart: start to first picture, s | 12.0 |" in table
    assert "| empty store: first picture, times eager's | 1.20 |" in table
    assert "| a size's first picture over its later ones, s | 0.00 |" in table
    assert "| the same, eager, s | 0.00 |" in table
    assert "| filled store: warm-up of 12 sizes, s | 10.5 |" in table


def test_start_up_has_lines_of_plain_calls() -> None:
    found = {role: process(s, 9.0) for role, s in (("eager", 1), ("cold", 2), ("warm", 1))}
    found["plain"] = process(3.0, 9.0)
    firsts = {role: [one["rows"][0]] for role, one in found.items()}
    figures = start_up.summary(found, firsts, "sdxl", 20)
    assert figures["plain"] == {
        "first_picture_s": 3.0, "longest_ratio": 3.0, "all_kinds_ready_s": 3.0,
    }  # fmt: skip
    assert [row["contender"] for row in figures["rows"]][-20:] == ["plain"] * 20
    table = tables.start_up_table(figures)
    assert "| the same by plain calls: slowest later one | 3.00 |" in table
    assert "| the same: all kinds in use after, s | 3.0 |" in table


@pytest.mark.parametrize("page", list(plot.PAGES))
def test_a_plot_is_svg_with_a_line_for_each_contender(page: str) -> None:
    rows = [
        row(name, side, side, 10.0 + number)
        for number, name in enumerate(plot.STYLES)
        for side in (512, 1024)
    ]
    subject = plot.Subject("A <model>", "one picture", "<step>", "float16")
    svg = plot.draw(unet(*rows, row("unknown", 512, 512, 1.0)), subject, page)
    root = ElementTree.fromstring(svg)
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "A <model>, one <step>" in texts
    assert all(style.title in texts for style in plot.STYLES.values())
    lines = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == 2 * len(plot.STYLES)  # in the plot and in the legend
    for node in root.iter("{http://www.w3.org/2000/svg}circle"):
        assert 0 < float(node.get("cx", 0)) < plot.WIDTH
        assert 0 < float(node.get("cy", 0)) < plot.HEIGHT


def test_sizes_of_as_many_pixels_are_one_point() -> None:
    rows = [row("eager", 960, 720, 10.0), row("eager", 720, 960, 12.0), row("eager", 64, 64, 1.0)]
    assert plot.series_of(rows, "float16") == {"eager": [(4096.0, 1.0), (691200.0, 11.0)]}


def test_a_plot_has_plain_calls_in_place_of_announced_ones() -> None:
    rows = [row("ours-exact", 64, 64, 1.0), row("plain", 64, 64, 2.0)]
    assert plot.series_of(rows, "float16") == {"ours-exact": [(4096.0, 2.0)]}


def test_failed_rows_are_not_drawn() -> None:
    failed = {"contender": "eager", "dtype": "float16", "width": 8, "height": 8, "failed": "x"}
    assert plot.series_of([failed], "float16") == {}


def test_pictures_a_second() -> None:
    rows = [
        {"contender": contender, "batch": batch, "pictures_per_s": batch / 3}
        for contender in ("plain", "plain-fp8")
        for batch in (1, 4)
    ]
    assert tables.throughput_table({"rows": rows}).splitlines() == [
        "| pictures in one call | exact | fp8 |",
        "| --- | --- | --- |",
        "| 1 | 0.33 | 0.33 |",
        "| 4 | 1.33 | 1.33 |",
    ]


def test_flash_attentions_tables_have_what_was_measured() -> None:
    rows = [
        row("ours-exact", 1024, 1024, 124.54), row("ours-fp8", 1024, 1024, 84.95),
        row("ours-exact", 512, 512, 37.97), row("eager", 1024, 1024, 175.0),
        {"contender": "ours-fp8", "width": 512, "height": 512, "stopped": "at the time limit"},
    ]  # fmt: skip
    assert flash_models([{"model": "flux", "rows": rows}]) == (
        ["", "512x512", "1024x1024"],
        [["Flux.1-dev, exact", "38.0", "124.5"], ["Flux.1-dev, fp8", "-", "85.0"]],
    )
    kernels = [
        {"kernel": "self_attention", "dtype": "bfloat16", "shape": [2, 4429, 38, 64],
         "contender": contender, "us_median": us}
        for contender, us in (("flash-attn-4", 774.0), ("inductor", 970.0), ("eager", 965.0))
    ]  # fmt: skip
    _, lines = flash_kernels({"rows": [*kernels, {**kernels[0], "kernel": "geglu"}]})
    assert lines == [[2, 4429, 38, 64, "bfloat16", "965", "774", "0.80"]]


def test_guidance_steps_have_times_and_distances() -> None:
    rows = [
        {"guidance_steps": "off", "deepcache": "off", "steps_with_guidance": 20, "cpu_s": 8.0},
        {
            "guidance_steps": "interval:0-0.5", "deepcache": "light", "steps_with_guidance": 10,
            "cpu_s": 4.0, "psnr_db_median": 31.26, "psnr_db_min": 22.0,
        },
    ]  # fmt: skip
    figures = {"steps": 20, "concepts": 12, "rows": [{**row, "recognised": 11} for row in rows]}
    header, lines = guidance_rows(figures)
    assert all(len(line) == len(header) for line in lines)
    assert lines[0] == ["off", "off", "20 of 20", "8.0", "1.0", "", "", "11 of 12"]
    assert lines[1][2:] == ["10 of 20", "4.0", "2.0", "31.3", "22.0", "11 of 12"]
