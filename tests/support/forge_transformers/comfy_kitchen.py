"""Stands for comfy_kitchen: RoPE by an operator that compilers cannot look into."""

from __future__ import annotations

import torch


def apply_rope(
    q: torch.Tensor, k: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _rotated(q, table), _rotated(k, table)


def _rotated(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    numbers = x.float().numpy()  # which a traced tensor has not
    pairs = torch.from_numpy(numbers).reshape(*x.shape[:-1], -1, 2, 1)
    return (table.float() @ pairs).reshape(x.shape).to(x.dtype)
