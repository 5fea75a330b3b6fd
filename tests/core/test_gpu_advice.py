"""One line for each size of GPU that is sold."""

from __future__ import annotations

import pytest

from onediff_ext.core.gpu_advice import memory_advice

# What the driver reports is a few percent below or above the name's gigabytes.
SOLD_GB = (2, 4, 6, 8, 10, 11, 12, 16, 24, 32, 80)


@pytest.mark.parametrize("reported", [0.96, 1.0, 1.07])
@pytest.mark.parametrize("gigabytes", SOLD_GB)
def test_each_gpu_gets_the_advice_of_its_name(gigabytes: int, reported: float) -> None:
    advice = memory_advice(int(gigabytes * 10**9 * reported)).split(": ", 1)[1]
    expected = {
        2: "SD1.5 needs --lowvram",
        4: "SD1.5 fits with --medvram",
        6: "SD1.5 fits whole; SDXL needs Forge or Neo",
        8: "SD1.5 fits whole; SDXL fits with --medvram-sdxl",
        10: "SD1.5 fits whole; SDXL fits with --medvram-sdxl",
        12: "SD1.5 and SDXL fit whole",
        16: "SD1.5 and SDXL fit whole",
        24: "SD1.5 and SDXL fit whole, Flux.1",
    }
    if gigabytes == 11:
        assert "SDXL" in advice
    else:
        assert advice.startswith(expected[min(gigabytes, 24)])


def test_the_line_names_the_memory_and_what_cuda_graphs_may_take() -> None:
    advice = memory_advice(8 * 2**30)
    assert advice.startswith("8 GB of GPU memory: SD1.5 fits whole")
    assert advice.endswith(" CUDA graphs take up to 2.0 GB of what is free.")
