"""Kernels compile for every generation of GPUs and fit into it; without a GPU, with Triton."""

from __future__ import annotations

import pytest

from tools.check_targets import __main__ as check_targets
from tools.check_targets.kernels import compiled_variant, variants
from tools.check_targets.targets import SHARED_BYTES, Target

pytest.importorskip("triton", reason="Triton, which comes with torch for GPUs, is not installed")


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_each_variant_fits(capability: int) -> None:
    found = [compiled_variant(each, capability) for each in variants() if capability >= each.since]
    assert [target for target in found if target.error] == []
    assert all(target.registers > 0 for target in found)
    one_warp = [t for t in found if t.kernel == "rows_kernel" and t.label.startswith("96 ")]
    assert {target.shared_bytes for target in one_warp} == {0}  # no warp waits for another


def test_what_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    widest = next(each for each in variants() if each.kernel == "cross_attention_kernel")
    monkeypatch.setitem(SHARED_BYTES, 90, 1000)
    target = compiled_variant(widest, 90)
    assert isinstance(target, Target)
    assert "1,000 exist" in target.error
    monkeypatch.setattr(check_targets, "variants", lambda: iter([widest]))
    assert check_targets.main(["--capability", "90"]) == 1
