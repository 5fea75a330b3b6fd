"""The sequence for compute-sanitizer: on a CPU with narrow models, and for real on a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.differential.memcheck import PLANT, PLANTS_SEQUENCE, SEQUENCE, WORLD, errors_in, main
from tests.differential.sequences import Driver, Step


def steps_of(text: str) -> list[Step]:
    return [Step.parse(each) for each in text.split()]


def test_the_sequence_draws_right_pictures_and_leaves_nothing_out() -> None:
    driver = Driver(model="sd15")
    assert driver.run(WORLD, steps_of(SEQUENCE)) is None
    assert driver.counts.steps == len(SEQUENCE.split())
    assert driver.counts.replays > 50


def test_the_known_fault_reads_freed_memory() -> None:
    found = Driver(model="sd15", plant=PLANT).run(WORLD, steps_of(PLANTS_SEQUENCE))
    assert found is not None


def test_the_sanitizers_summary_is_read() -> None:
    assert errors_in("========= ERROR SUMMARY: 12 errors\n") == 12
    assert errors_in("Segmentation fault") is None


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_memcheck_finds_nothing_but_the_known_fault(tmp_path: Path) -> None:
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not installed (it comes with CUDA's toolkit)")
    assert main(["--store", str(tmp_path)]) == 0
