"""Rounding, and lists of sizes."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onediff_ext.core.errors import ShapeError
from onediff_ext.core.shapes import (
    MAX_SIZES,
    MAX_SIZES_CHARS,
    BatchShape,
    parse_sizes,
    round_up,
)

SIDES = st.integers(8, 512).map(lambda cells: cells * 8)
SHAPES = st.builds(BatchShape, SIDES, SIDES, st.integers(1, 64))


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 64))
def test_round_up_is_the_smallest_cover(height_px: int, width_px: int, step_px: int) -> None:
    cells_of_sides = round_up(height_px, width_px, step_px)
    for side, cells in zip((height_px, width_px), cells_of_sides, strict=True):
        assert (cells - 1) * step_px < side <= cells * step_px


@pytest.mark.parametrize("size", [(0, 8, 8), (8, 0, 8), (-1, 8, 8), (8, 8, 0)])
def test_round_up_refuses_empty_images(size: tuple[int, int, int]) -> None:
    with pytest.raises(ShapeError):
        round_up(*size)


@pytest.mark.parametrize(
    "text",
    [
        "512x768, 1024x1024@2",
        "512x768;1024x1024@2",
        "512x768 1024x1024@2",
        "\n512x768\r\n1024x1024@2\n",
        "512 x 768, 1024X1024 @ 2",
        "512×768,,1024*1024@2,512x768",
    ],
)
def test_sizes_are_read_as_typed(text: str) -> None:
    assert parse_sizes(text) == [BatchShape(512, 768), BatchShape(1024, 1024, 2)]


def test_an_empty_list_has_no_sizes() -> None:
    assert parse_sizes(" ,\n") == []


@given(st.lists(SHAPES, unique=True, max_size=6))
def test_sizes_are_written_as_they_are_read(shapes: list[BatchShape]) -> None:
    assert parse_sizes(", ".join(map(str, shapes))) == shapes


@pytest.mark.parametrize(
    ("text", "next_step"),
    [
        ("720x1001", "720x1000"),
        ("32x512@3", "64x512@3"),
        ("8192x8192", "4096x4096"),
        ("0x0", "64x64"),
        ("100x100", "104x104"),
    ],
)
def test_a_size_that_cannot_be_generated_names_the_nearest(text: str, next_step: str) -> None:
    with pytest.raises(ShapeError, match=f"nearest size is {next_step}\\."):
        parse_sizes(text)


@pytest.mark.parametrize("text", ["512", "512x", "x512", "axb", "512x512x3", "-8x64", "٥١٢x512"])
def test_what_is_no_size_shows_an_example(text: str) -> None:
    with pytest.raises(ShapeError, match="for example"):
        parse_sizes(text)


@pytest.mark.parametrize("text", ["512x512@0", "512x512@65"])
def test_a_batch_out_of_bounds_is_refused(text: str) -> None:
    with pytest.raises(ShapeError, match="1 to 64"):
        parse_sizes(text)


@pytest.mark.parametrize(
    "text", ["8x8" + " " * 60_000 + "!", "64x64, " * 1_000_000, "x" * MAX_SIZES_CHARS, "9" * 50_000]
)
def test_a_hostile_list_is_refused_at_once(text: str) -> None:
    start = time.process_time()
    with pytest.raises(ShapeError) as caught:
        parse_sizes(text)
    assert time.process_time() - start < 0.5
    assert len(str(caught.value)) < 300


def test_as_many_sizes_as_allowed_are_read() -> None:
    shapes = [BatchShape(64 + 8 * (number % 500), 64, 1 + number // 500) for number in range(999)]
    assert parse_sizes(", ".join(map(str, shapes[:MAX_SIZES]))) == shapes[:MAX_SIZES]
    with pytest.raises(ShapeError, match=f"{MAX_SIZES} are allowed"):
        parse_sizes(", ".join(map(str, shapes[: MAX_SIZES + 1])))


def test_the_import_is_light() -> None:
    code = (
        "import sys, onediff_ext.core.shapes\n"
        "assert 'PIL' not in sys.modules\n"
        "import onediff_ext.pictures.batch.grouping, onediff_ext.pictures.writing\n"
        "import onediff_ext.pictures.infotext_format, onediff_ext.pictures.batch.resume\n"
        "assert not {'torch', 'diffusers', 'gradio', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
