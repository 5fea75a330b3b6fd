"""Writes that torch does not count are noticed once for each image."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from onediff_ext.engine.running.text_kv import stamp_of
from onediff_ext.engine.validity import tensor_contents
from onediff_ext.engine.validity.tensor_contents import TensorContents, content_of, version_of


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


def _watched(*tensors: torch.Tensor) -> TensorContents:
    contents = TensorContents()
    contents.watch(tensors)
    contents.settle()
    assert contents.current_generation("first") == 0
    return contents


def test_a_tensor_that_is_gone_changes_nothing() -> None:
    tensors = [torch.randn(8), torch.randn(8)]
    contents = _watched(*tensors)
    del tensors[0]
    assert contents.current_generation("second") == 0
    tensors[0].data.neg_()
    assert contents.current_generation("third") == 1


def test_a_tensor_that_is_gone_hides_no_write_to_another() -> None:
    tensors = [torch.randn(8), torch.randn(8)]
    contents = _watched(*tensors)
    del tensors[0]
    tensors[0].data.neg_()
    assert contents.current_generation("second") == 1


def test_a_tensor_that_is_new_hides_no_write_to_another() -> None:
    """As of a LoRA whose weights are merged in the middle of a picture."""
    known, new = torch.randn(8), torch.randn(8)
    contents = _watched(known)
    known.data.neg_()
    contents.watch([new])
    contents.settle()
    assert contents.current_generation("second") == 1


def test_counted_writes_are_left_to_those_who_compute_from_the_tensor() -> None:
    """They see it by themselves; all others would compute the same again."""
    tensor, other = torch.randn(8), torch.randn(8)
    contents = _watched(tensor, other)
    tensor.neg_()
    assert contents.current_generation("second") == 0
    tensor.neg_()
    contents.watch([tensor])  # computed again
    contents.settle()
    assert contents.current_generation("third") == 0
    tensor.data.neg_()
    assert contents.current_generation("fourth") == 1
    assert contents.current_generation("fifth") == 1


def test_a_counted_write_does_not_hide_an_uncounted_one_after_it() -> None:
    tensor = torch.randn(8)
    contents = _watched(tensor)
    tensor.neg_()
    contents.watch([tensor])  # computed again after the counted write
    contents.settle()
    tensor.data.neg_()
    assert contents.current_generation("second") == 1


def test_numbers_that_do_not_lie_side_by_side_are_compared() -> None:
    whole = torch.randn(6, 8)
    for view in (whole[:, 2:5], whole.t()[1:3], torch.tensor(3.0)):
        contents = _watched(view)
        assert contents.current_generation("second") == 0
        view.data[..., -1:].neg_() if view.ndim else view.data.neg_()
        assert contents.current_generation("third") == 1


def test_the_same_memory_with_another_form_has_changed() -> None:
    tensor = torch.ones(8)
    contents = _watched(tensor)
    tensor.data = tensor.data[:6]
    assert contents.current_generation("second") == 1


def test_a_tensor_made_under_inference_mode_counts_nothing_also_after_a_cast() -> None:
    """``module.to(dtype)`` leaves it without a version counter; `is_inference` is False then."""
    with torch.inference_mode():
        layer = nn.Linear(8, 8).requires_grad_(False)
    made = layer.weight
    assert version_of(made) == -1
    layer.to(torch.bfloat16)
    assert not made.is_inference()
    assert version_of(made) == content_of(made)[-1] == -1
    assert stamp_of("epoch", torch.randn(1, 8), [made]) is None
    contents = _watched(made)
    with torch.no_grad():
        made.data.neg_()
    assert contents.current_generation("second") == 1
    assert version_of(torch.randn(8).neg_()) == 1


def test_a_tensor_that_counts_no_writes_is_asked_once() -> None:
    """torch answers with an exception each time."""
    with torch.inference_mode():
        weight = nn.Parameter(torch.randn(8), requires_grad=False)
    weight.data = torch.randn(8)  # as a move to another device gives it other data
    assert not weight.is_inference()
    assert version_of(weight) == version_of(weight) == -1
    assert tensor_contents._uncounted[id(weight)]() is weight
    key = id(weight)
    del weight
    assert key not in tensor_contents._uncounted


def test_a_counted_tensor_in_the_place_of_another() -> None:
    tensor = torch.zeros(8)
    with torch.inference_mode():
        gone = torch.zeros(8)
    tensor_contents._uncounted[id(tensor)] = weakref.ref(gone)
    before = version_of(tensor)
    tensor.add_(1)
    assert version_of(tensor) == before + 1
    del tensor_contents._uncounted[id(tensor)]


def test_a_counter_that_stands_still_is_none() -> None:
    """``module.to(dtype)`` under inference mode gives a weight data whose writes nobody counts."""
    layer = nn.Linear(4, 4)
    with torch.inference_mode():
        layer.to(torch.float64)
        before = layer.weight._version
        layer.weight.add_(1)
        assert layer.weight._version == before
    assert version_of(layer.weight) == -1
    assert stamp_of(1, torch.zeros(1), [layer.weight]) is None
