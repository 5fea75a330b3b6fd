"""Sizing rules, canvases, and the way there and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from onediff_ext.core.errors import OptionError, ShapeError
from onediff_ext.pictures.fitting import from_canvas, to_canvas, to_target
from onediff_ext.pictures.sizing import (
    FixedSize,
    LongestSide,
    OwnSize,
    ScaledSize,
    SizeRule,
    fit_size,
    parse_size_rule,
)

SIDES = st.integers(1, 9000)
RULES: st.SearchStrategy[SizeRule] = st.one_of(
    st.just(OwnSize()),
    st.sampled_from([0.01, 0.33, 0.5, 1.0, 1.7, 16.0]).map(ScaledSize),
    st.builds(LongestSide, st.integers(1, 4096), st.booleans()),
    st.builds(
        FixedSize,
        st.integers(1, 2000),
        st.integers(1, 2000),
        st.sampled_from(["crop", "pad", "stretch"]),
    ),
)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("own", OwnSize()),
        (" Own ", OwnSize()),
        ("scale:0.5", ScaledSize(0.5)),
        ("longest:768", LongestSide(768)),
        ("longest: 768 :shrink", LongestSide(768, only_shrink=True)),
        ("fixed:512x512", FixedSize(512, 512, "crop")),
        ("fixed:1001×667:pad", FixedSize(1001, 667, "pad")),
        ("fixed:512x512:stretch", FixedSize(512, 512, "stretch")),
    ],
)
def test_rules_are_read(text: str, rule: SizeRule) -> None:
    assert parse_size_rule(text) == rule


@given(RULES)
def test_rules_are_written_as_they_are_read(rule: SizeRule) -> None:
    assert parse_size_rule(str(rule)) == rule


@pytest.mark.parametrize(
    "text",
    [
        *["", "big", "own:1", "scale", "scale:0", "scale:nan", "scale:x", "longest:0"],
        *["longest:8:grow", "fixed:512", "fixed:512x512:fill", "fixed:0x8", "fixed:99999x8"],
        "fixed:8x8:pad:pad",
    ],
)
def test_what_is_no_rule_shows_the_rules(text: str) -> None:
    with pytest.raises(OptionError, match='"longest:768"'):
        parse_size_rule(text)


@given(RULES, SIDES, SIDES)
def test_the_canvas_is_the_smallest_that_holds_the_target(
    rule: SizeRule, width_px: int, height_px: int
) -> None:
    if isinstance(rule, ScaledSize) and max(width_px, height_px) * rule.factor > 16384:
        return
    fit = fit_size(rule, width_px, height_px, max_megapixels=1e6)
    for canvas, target in (
        (fit.canvas_width_px, fit.target_width_px),
        (fit.canvas_height_px, fit.target_height_px),
    ):
        assert target >= 1
        assert canvas % 8 == 0
        assert 0 <= canvas - target < 8 or canvas == 64


@pytest.mark.parametrize(
    ("rule", "source", "target", "canvas"),
    [
        ("own", (1001, 667), (1001, 667), (1008, 672)),
        ("own", (720, 960), (720, 960), (720, 960)),
        ("own", (1, 1), (1, 1), (64, 64)),
        ("scale:0.5", (1001, 667), (501, 334), (504, 336)),
        ("longest:768", (1001, 667), (768, 512), (768, 512)),
        ("longest:768", (100, 50), (768, 384), (768, 384)),
        ("longest:768:shrink", (100, 50), (100, 50), (104, 64)),
        ("longest:64", (5000, 1), (64, 1), (64, 64)),
        ("fixed:500x300", (33, 1234), (500, 300), (504, 304)),
    ],
)
def test_sizes(
    rule: str, source: tuple[int, int], target: tuple[int, int], canvas: tuple[int, int]
) -> None:
    fit = fit_size(parse_size_rule(rule), *source)
    assert (fit.target_width_px, fit.target_height_px) == target
    assert (fit.canvas_width_px, fit.canvas_height_px) == canvas


@given(st.integers(100, 9000), st.integers(100, 9000))
def test_the_hint_for_a_large_picture_is_within_the_limit(width_px: int, height_px: int) -> None:
    try:
        fit_size(OwnSize(), width_px, height_px, max_megapixels=2)
    except ShapeError as error:
        hinted = error.hint.split("example ")[1].split(",")[0]
        fit_size(parse_size_rule(hinted), width_px, height_px, max_megapixels=2)


def test_absurd_sizes_are_refused() -> None:
    with pytest.raises(ShapeError, match="longest:"):
        fit_size(OwnSize(), 6000, 4000)
    with pytest.raises(ShapeError):
        fit_size(OwnSize(), 16385, 1, max_megapixels=1e6)
    with pytest.raises(ShapeError):
        fit_size(OwnSize(), 0, 5)


@given(RULES, st.integers(1, 90), st.integers(1, 90))
def test_a_picture_comes_back_from_its_canvas(
    rule: SizeRule, width_px: int, height_px: int
) -> None:
    if isinstance(rule, FixedSize):
        rule = FixedSize(rule.width_px % 90 + 1, rule.height_px % 90 + 1, rule.placement)
    if isinstance(rule, LongestSide):
        rule = LongestSide(rule.side_px % 90 + 1, rule.only_shrink)
    if isinstance(rule, ScaledSize) and rule.factor > 2:
        rule = ScaledSize(2.0)
    image = Image.effect_noise((width_px, height_px), 90).convert("RGB")
    fit = fit_size(rule, width_px, height_px)
    canvas = to_canvas(image, fit)
    assert canvas.size == (fit.canvas_width_px, fit.canvas_height_px)
    back = from_canvas(canvas, fit)
    assert back.size == (fit.target_width_px, fit.target_height_px)
    assert back.tobytes() == to_target(image, fit).tobytes()
    if back.size == image.size and fit.placement == "stretch":
        assert back.tobytes() == image.tobytes()


def test_edges_are_repeated_to_the_right_and_below() -> None:
    image = Image.new("RGB", (61, 70), "red")
    image.putpixel((60, 10), (0, 255, 0))
    image.putpixel((5, 69), (0, 0, 255))
    image.putpixel((60, 69), (255, 255, 255))
    canvas = to_canvas(image, fit_size(OwnSize(), 61, 70))
    assert canvas.size == (64, 72)
    assert canvas.getpixel((63, 10)) == (0, 255, 0)
    assert canvas.getpixel((5, 71)) == (0, 0, 255)
    assert canvas.getpixel((63, 71)) == (255, 255, 255)
    assert canvas.getpixel((30, 71)) == (255, 0, 0)


def test_crop_keeps_the_middle_and_pad_keeps_all() -> None:
    image = Image.new("RGB", (300, 100), "blue")
    image.paste((255, 0, 0), (100, 0, 200, 100))
    crop = to_target(image, fit_size(parse_size_rule("fixed:100x100"), 300, 100))
    assert crop.getcolors() == [(10_000, (255, 0, 0))]
    image.paste((0, 255, 0), (0, 99, 300, 100))
    pad = to_target(image, fit_size(parse_size_rule("fixed:300x300:pad"), 300, 100))
    assert pad.crop((0, 100, 300, 200)).tobytes() == image.tobytes()
    assert pad.getpixel((10, 0)) == (0, 0, 255)
    assert pad.getpixel((150, 299)) == (0, 255, 0)
    stretch = to_target(image, fit_size(parse_size_rule("fixed:100x100:stretch"), 300, 100))
    assert stretch.getpixel((10, 50)) == (0, 0, 255)
    assert stretch.getpixel((50, 50)) == (255, 0, 0)


def test_a_picture_of_another_size_than_planned_is_refused() -> None:
    fit = fit_size(OwnSize(), 100, 50)
    with pytest.raises(ShapeError, match="changed since"):
        to_canvas(Image.new("RGB", (50, 100)), fit)
    with pytest.raises(ShapeError):
        from_canvas(Image.new("RGB", (100, 50)), fit)
