"""Stands for comfy_kitchen: RoPE by an operator that compilers cannot look into."""

from __future__ import annotations

import torch


def apply_rope(
    q: torch.Tensor, k: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _rotated(q, table), _rotated(k, table)


def apply_rope_split_half(
    q: torch.Tensor, k: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of one channel of each half."""
    return _rotated_halves(q, table), _rotated_halves(k, table)


def _rotated_halves(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    pairs = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return _rotated(pairs, table).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _rotated(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    numbers = x.float().numpy()  # which a traced tensor has not
    pairs = torch.from_numpy(numbers).reshape(*x.shape[:-1], -1, 2, 1)
    return (table.float() @ pairs).reshape(x.shape).to(x.dtype)
