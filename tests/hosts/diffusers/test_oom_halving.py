"""Batches that do not fit into memory."""

from __future__ import annotations

import pytest
import torch

from onediff_ext.hosts.diffusers.jobs.oom_halving import draw_in_halves


@pytest.mark.parametrize(
    ("room", "parts"),
    [
        (7, [(0, 7)]),
        (3, [(0, 3), (3, 5), (5, 7)]),
        (1, [(n, n + 1) for n in range(7)]),
    ],
)
def test_a_batch_is_halved_until_its_parts_fit(room: int, parts: list[tuple[int, int]]) -> None:
    def draw(part: slice) -> list[int]:
        if part.stop - part.start > room:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return list(range(part.start, part.stop))

    drawn = list(draw_in_halves(draw, slice(0, 7)))
    assert [(part.start, part.stop) for part, _ in drawn] == parts
    assert [number for _, result in drawn for number in result or ()] == list(range(7))


def test_a_single_image_that_does_not_fit_has_no_result() -> None:
    def draw(part: slice) -> slice:
        if part.start <= 1 < part.stop:
            raise MemoryError
        return part

    drawn = list(draw_in_halves(draw, slice(0, 3)))
    assert drawn == [
        (slice(0, 1), slice(0, 1)),
        (slice(1, 2), None),
        (slice(2, 3), slice(2, 3)),
    ]


def test_another_error_is_passed_on() -> None:
    def draw(part: slice) -> None:
        raise RuntimeError("a shape is wrong")

    with pytest.raises(RuntimeError, match="shape"):
        list(draw_in_halves(draw, slice(0, 2)))
