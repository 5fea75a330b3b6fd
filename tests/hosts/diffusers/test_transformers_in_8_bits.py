"""Blocks of transformers whose linear layers multiply in 8 bits are close to the exact ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onediff_ext.engine.blocks.block_tree import BlockTree
from onediff_ext.engine.blocks.family import BlockCall, BlockFamily
from onediff_ext.engine.export.exporter import export_block, load_program, save_program
from onediff_ext.engine.quantization import PRECISIONS, QuantizedWeights, outlines, plan
from onediff_ext.engine.running import kind_lookup
from onediff_ext.engine.torch_versions import RELEASE
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile
from onediff_ext.hosts.diffusers.token_blocks import TOKEN_FAMILIES
from onediff_ext.hosts.diffusers.transformer_probe import transformer_inputs
from onediff_ext.session.session import Session
from tests.support import transformer_models as models
from tests.support.draw import relative_error

CPU = torch.device("cpu")
# Of one block's output. Measured below: 1.1e-2 to 2.5e-2 in fp8, 2.7e-3 to 6.2e-3 in int8.
ERROR = {"fp8": 4e-2, "int8": 1.2e-2}


def first_calls(
    model: nn.Module, side_px: int
) -> dict[str, tuple[BlockFamily, nn.Module, BlockCall]]:
    """The first call of each class of block, in one forward of the model."""
    families = {family.block_class(): family for family in TOKEN_FAMILIES}
    found: dict[str, tuple[BlockFamily, nn.Module, BlockCall]] = {}

    def note(block: nn.Module, args: Any, kwargs: Any) -> None:
        name = type(block).__name__
        if name not in found:
            family = families[type(block)]
            call = family.bind(block, args, kwargs)
            assert isinstance(call, BlockCall), call
            found[name] = (family, block, call)

    hooks = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in model.modules()
        if type(module) in families
    ]
    inputs = transformer_inputs(
        model, torch.Generator().manual_seed(3), pictures=2, height_px=side_px, width_px=side_px
    )
    assert inputs is not None
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("make", "exact"),
    [
        (models.sd3_transformer, ("norm1.linear", "norm1_context.linear")),
        (models.flux_transformer, ("norm.linear", "norm1.linear", "norm1_context.linear")),
    ],
    ids=["sd3", "flux"],
)
@torch.no_grad()
def test_blocks_are_close_to_exact_ones_at_any_size(
    make: Callable[[], nn.Module], exact: tuple[str, ...], precision: str
) -> None:
    if precision == "fp8" and RELEASE < (2, 11):
        pytest.skip(f"torch {torch.__version__} multiplies fp8 by rows on GPUs only")
    model = make()
    small, large = first_calls(model, 64), first_calls(model, 96)
    assert small
    for name, (family, block, call) in small.items():
        tree = BlockTree.of(block, family)
        weights = tree.weights()
        assert weights is not None
        assert family.eight_bits is not None
        quantization = plan(tree.names, weights, precision, family.eight_bits)
        assert quantization is not None
        copied = {tree.names[i] for group in quantization.groups for i in group}
        assert not any(layer.removesuffix(".weight").endswith(exact) for layer in copied)
        assert max(map(len, quantization.groups)) >= 3  # query, key and value are one product
        program = export_block(
            tree.copy(), family, tree.names, outlines(weights, quantization), call, CPU, None,
            quantization=quantization,
        )  # fmt: skip
        graph = load_program(save_program(program)).graph_module
        copies = QuantizedWeights(quantization)
        for _, _, of_size in (small[name], large[name]):
            expected = family.tensors_of(family.run(block, of_size.tensors, dict(of_size.statics)))
            found = graph(*copies.apply(weights, 0), *of_size.tensors)
            for ours, theirs in zip(found, expected, strict=True):
                error = ((ours - theirs).norm() / theirs.norm()).item()
                assert 1e-4 < error < ERROR[precision], (name, error)  # exact: no product in 8 bits


def test_a_short_prompt_in_int8_runs_through_exact_graphs(
    make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """int8's products need more than 16 rows on a GPU; nothing runs eager for that."""
    monkeypatch.setattr(kind_lookup, "unavailable_reason", lambda *_: None)
    pipe, twin = models.flux(), models.flux()
    compile_pipe(pipe, session=make_session(precision="int8"), ignores=("vae",))
    (component,) = compiled_state(pipe).components
    for tokens, precision in ((40, "int8"), (5, None), (40, "int8")):
        draws = [
            each(
                **models.flux_embeddings(tokens), width=128, height=64, num_inference_steps=1,
                output_type="latent", generator=torch.Generator().manual_seed(1),
            ).images
            for each in (pipe, pipe, twin)
        ]  # fmt: skip
        kinds = {runner.used for runner in component.runners}
        assert {kind.quantization and kind.quantization.precision for kind in kinds} == {precision}
        assert [runner.eager_reason for runner in component.runners] == [None] * 4
        error = relative_error(draws[1], draws[2])
        assert (1e-4 < error < ERROR["int8"]) if precision else error < 1e-4
    undo_compile(pipe)
