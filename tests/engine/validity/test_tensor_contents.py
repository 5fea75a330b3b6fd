"""Writes that torch does not count are noticed once for each image."""

from __future__ import annotations

import torch

from onediff_ext.engine.validity.tensor_contents import TensorContents


def test_contents_are_compared_once_for_each_image() -> None:
    contents = TensorContents()
    tensors = [torch.randn(8, 4), torch.randn(2, 3, 3, 3).to(memory_format=torch.channels_last)]
    contents.watch(tensors)
    contents.settle()
    assert contents.current_generation(1) == contents.current_generation(2) == 0
    tensors[1].data.neg_()
    assert contents.current_generation(2) == 0  # within a picture only what torch counts is seen
    assert contents.current_generation(3) == 1
    assert contents.current_generation(4) == 1
    tensors[0].data = tensors[0].data.clone()
    assert contents.current_generation(5) == 2
    del tensors[0]
    contents.current_generation(6)
    assert len(contents._watched) == 1
