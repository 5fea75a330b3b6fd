"""Which UNet calls of a picture are full ones."""

from __future__ import annotations

import functools
import math

from onediff_ext.core.deepcache_options import DeepCacheOptions


def is_full(
    options: DeepCacheOptions, index: int, total: int | None, filled_at: int | None
) -> bool:
    """Whether an evaluation has to run the whole UNet.

    Args:
        options: What the user chose.
        index: Number of this evaluation of the model, from 0.
        total: Evaluations of the whole picture, or None when that is not known. It may be an
            estimate: some samplers ask for more.
        filled_at: The evaluation whose feature is at hand, or None.
    """
    if filled_at is None:
        return True
    if total is None:
        if (options.start, options.end) != (0, 1) or options.schedule != "uniform":
            return True  # both are shares of a whole that is not known
    elif index < options.start * total or (options.end < 1 and index >= options.end * total):
        return True
    if options.schedule == "uniform" or total is None or index >= total:
        return index - filled_at >= options.interval
    planned = nonuniform_full_calls(total, options.interval, options.centre, options.power)
    return any(filled_at < full <= index for full in planned)


@functools.lru_cache(maxsize=32)
def nonuniform_full_calls(
    total: int, interval: int, centre: float, power: float
) -> tuple[int, ...]:
    """The evaluations that are full, closer together around a centre.

    As many as a uniform schedule has, spread evenly on the axis of x^(1/power), where x is the
    distance from the centre: section 3.3 of the paper.

    Args:
        total: Evaluations of the whole picture.
        interval: How many times fewer are full.
        centre: Where they stand closest, as a share of `total`.
        power: How much closer; 1 is even.

    Returns:
        Distinct numbers from 0, ascending; 0 is one of them.
    """
    count = math.ceil(total / interval)
    middle = centre * total
    low, high = _signed_power(-middle, 1 / power), _signed_power(total - middle, 1 / power)
    calls: list[int] = []
    for k in range(count):
        at = _signed_power(low + (high - low) * k / count, power) + middle
        # Room has to be left on both sides, since each evaluation is full once at most.
        earliest = calls[-1] + 1 if calls else 0
        calls.append(min(max(int(at + 1e-9), earliest), total - (count - k)))
    return tuple(calls)


def _signed_power(value: float, power: float) -> float:
    return math.copysign(abs(value) ** power, value)
