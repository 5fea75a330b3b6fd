"""A LoRA of peft as a changed weight of its layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from onediff_ext.hosts.diffusers.lora.peft_layers import PeftLoraRule


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)]
)
def test_a_merged_weight_computes_what_both_layers_do(
    dtype: torch.dtype, error: float, autocast: bool
) -> None:
    """Under autocast as well: the weight may be read after autocast has ended."""
    from peft.tuners.lora import LoraConfig
    from peft.tuners.lora.layer import Linear

    torch.manual_seed(3)
    base = nn.Linear(24, 40, bias=False).to(dtype).requires_grad_(False)
    layer = Linear(
        base, "x", config=LoraConfig(r=4, init_lora_weights=False), r=4, lora_alpha=6
    ).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        merged = PeftLoraRule().merged_weight(
            layer, base.weight, lambda: torch.empty_like(base.weight)
        )
    assert merged.dtype is dtype
    x = torch.randn(5, 24).to(dtype)
    expected = layer.double()(x.double())
    assert (x.double() @ merged.double().T - expected).norm() < error * expected.norm()
    assert (base.double()(x.double()) - expected).norm() > 0.1 * expected.norm()
