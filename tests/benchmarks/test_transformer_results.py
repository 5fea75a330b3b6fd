"""What docs/transformers.md claims of the transformers' result files."""

from __future__ import annotations

import pytest

from benchmarks.results import read_result
from benchmarks.tables import FLASH_MODELS, RESULTS, TRANSFORMER_SIZES, TRANSFORMERS


@pytest.mark.parametrize("model", TRANSFORMERS)
def test_announced_calls_are_ahead_of_each_peer_at_each_size(model: str) -> None:
    figures = read_result(RESULTS / f"dit-{model}-h200.json")
    assert figures is not None
    ms = {
        (row["contender"], row["width"], row["height"]): row["ms_median"]
        for row in figures["rows"]
        if "ms_median" in row
    }
    for size in TRANSFORMER_SIZES:
        exact, fp8 = (ms[(name, *size)] for name in ("ours-exact", "ours-fp8"))
        others = [each for (name, *at), each in ms.items() if tuple(at) == size and not _ours(name)]
        assert len(others) == 5
        assert fp8 < exact < min(others)


@pytest.mark.parametrize("model", FLASH_MODELS)
def test_flash_attention_makes_each_measured_size_faster(model: str) -> None:
    without, with_it = (
        {
            (row["contender"], row["width"], row["height"]): row["ms_median"]
            for row in read_result(RESULTS / f"{name}-h200.json")["rows"]
            if row["contender"] in ("ours-exact", "ours-fp8") and "ms_median" in row
        }
        for name in (f"dit-{model}", f"dit-{model}-flash")
    )
    if model == "z-image":  # its attention at 512x512 is as fast in cuDNN
        with_it = {place: ms for place, ms in with_it.items() if place[1:] != (512, 512)}
    assert len(with_it) >= 6
    for place, ms in with_it.items():
        assert ms < without[place]


@pytest.mark.parametrize("model", ["flux", "z-image"])
def test_a_new_size_takes_little_beyond_a_forward(model: str) -> None:
    figures = read_result(RESULTS / f"dit-{model}-flash-h200.json")
    assert figures is not None
    assert len(figures["rows"]) == 8
    beyond_s = [row["first_s"] - row["ms_median"] / 1e3 for row in figures["rows"]]
    assert round(max(beyond_s), 2) <= 0.18


def _ours(contender: str) -> bool:
    return contender.startswith(("ours-exact", "ours-fp8", "plain"))
