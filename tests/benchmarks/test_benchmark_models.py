"""The models of benchmarks: random weights that behave as trained ones do where a host looks."""

from __future__ import annotations

import torch

from benchmarks.models import make_pipeline


def test_the_mean_of_text_embeddings_is_not_zero() -> None:
    """WebUIs scale prompts with weights by a ratio of means: zero by zero is NaN in fp16."""
    pipe = make_pipeline("small", torch.device("cpu"), torch.float32)
    tokens = torch.randint(0, 1000, (1, 77), generator=torch.Generator().manual_seed(0))
    embeddings = pipe.text_encoder(tokens)[0]
    assert embeddings.half().mean().abs() > 0.01
