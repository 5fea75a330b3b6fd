"""Compile options of wrong types are refused with their names, before anything is made of them."""

from __future__ import annotations

from typing import Any

import pytest

from onediff_ext.core.errors import OptionError
from onediff_ext.core.options import CompileOptions, parse_ignores


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("fp8", "'fp8' are no options"),
        ({"workers": "two"}, "workers must be a number, not 'two'"),
        ({"store_limit_bytes": "8GB"}, "store_limit_bytes must be a number"),
        ({"store_limit_bytes": None}, "store_limit_bytes must be a number, not None"),
        ({"build_timeout_s": []}, "build_timeout_s must be a number"),
        ({"capture_limit": "all"}, "capture_limit must be a number"),
        ({"capture_limit_bytes": "1GB"}, "capture_limit_bytes must be a number"),
        ({"cfg_parallel": True}, "CFG parallel cannot use True"),
        ({"precision": 8}, "Unknown precision 8"),
        ({"store": 3}, "An int is no path for `store`"),
        ({"captures": "no"}, "captures must be True or False, not 'no'"),
        ({"build_timeout_s": float("nan")}, "build_timeout_s must be a number, not nan"),
    ],
)
def test_values_of_a_wrong_type(options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        CompileOptions.parse(options)
    assert caught.value.hint


def test_numbers_that_may_be_left_out() -> None:
    CompileOptions(workers=None, capture_limit_bytes=None)
    assert CompileOptions(workers=3, build_timeout_s=2.5).build_timeout_s == 2.5


@pytest.mark.parametrize("ignores", [None, 3])
def test_ignores_that_are_no_names(ignores: object) -> None:
    with pytest.raises(OptionError, match=f"{ignores} names no components") as caught:
        parse_ignores(ignores)
    assert "vae" in caught.value.hint
