"""What Python code reads besides its arguments: globals, default values, closures, types, modes.

As in `test_soundness.py`, each test compares a compiled pipe with an eager twin.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers.models import attention_processor, embeddings
from diffusers.models.activations import GEGLU
from diffusers.models.unets import unet_2d_blocks
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

from onediff_ext.engine.cuda_graphs.forward_call import read_call
from onediff_ext.engine.validity.foreign_code import global_hook_reason
from onediff_ext.engine.validity.python_code import PythonCode
from onediff_ext.engine.validity.replaced_helpers import replaced_helper_reason
from onediff_ext.hosts.diffusers.compile import compiled_state
from onediff_ext.session.session import Session
from tests.support.models import unet_inputs
from tests.support.settled_twins import Twins

Patch = pytest.MonkeyPatch


@pytest.fixture
def session(make_session: Callable[..., Session]) -> Session:
    return make_session(spot_checks=False)


class Torch:
    """Stands in for a Python module, as some extensions put it into others."""

    def __init__(self, inner: Any, **replaced: Any) -> None:
        self._inner = inner
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def replace_functional(patch: Patch, factors: list[float]) -> None:
    """The ``F`` of one module, as attention kernels of others are put in."""
    own = functional.scaled_dot_product_attention

    def scaled(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return own(factors[0] * query, *args, **kwargs)

    names = {name: getattr(functional, name) for name in dir(functional)}
    names["scaled_dot_product_attention"] = scaled
    patch.setattr(attention_processor, "F", types.SimpleNamespace(**names))


def replace_torch(patch: Patch, factors: list[float]) -> None:
    def cat(*args: Any, **kwargs: Any) -> torch.Tensor:
        return factors[0] * torch.cat(*args, **kwargs)

    patch.setattr(unet_2d_blocks, "torch", Torch(torch, cat=cat))


def replace_a_helper(patch: Patch, factors: list[float]) -> None:
    own = embeddings.get_timestep_embedding
    patch.setattr(embeddings, "get_timestep_embedding", lambda *a, **k: factors[0] * own(*a, **k))


@pytest.mark.parametrize("replace", [replace_functional, replace_torch, replace_a_helper])
def test_a_replaced_global_may_keep_state(
    session: Session, monkeypatch: Patch, replace: Callable[[Patch, list[float]], None]
) -> None:
    factors, twins = [0.5], Twins(session)
    with monkeypatch.context() as patch:
        replace(patch, factors)
        assert max(twins.error(seed) for seed in range(10, 15)) < 1e-4
        factors[0] = 1.5
        assert max(twins.error(seed) for seed in range(15, 18)) < 1e-4
        assert "is replaced by" in twins.captured.reason
    assert max(twins.error(seed) for seed in range(20, 26)) < 1e-4
    assert twins.captured.reason == ""


@pytest.mark.parametrize("replace", [replace_functional, replace_torch, replace_a_helper])
def test_a_global_that_was_replaced_before(
    session: Session, monkeypatch: Patch, replace: Callable[[Patch, list[float]], None]
) -> None:
    with monkeypatch.context() as patch:
        replace(patch, [0.5])
        twins = Twins.__new__(Twins)
        with pytest.raises(AssertionError):  # it never gets to a recording
            twins.__init__(session)  # type: ignore[misc]
        assert "is replaced by" in twins.captured.reason
    assert max(twins.error(seed) for seed in range(20, 26)) < 1e-4
    assert twins.captured.reason == ""


def exchange_a_function(patch: Patch) -> None:
    patch.setattr(functional, "silu", functional.mish)


def give_a_function_an_argument(patch: Patch) -> None:
    own = functional.scaled_dot_product_attention
    scaled = functools.partial(own, scale=0.01)
    patch.setattr(functional, "scaled_dot_product_attention", scaled)


def exchange_a_method(patch: Patch) -> None:
    patch.setattr(nn.SiLU, "forward", nn.Mish.forward)


def exchange_the_code(patch: Patch) -> None:
    patch.setattr(functional.silu, "__code__", functional.relu6.__code__)


def hide_a_method(patch: Patch) -> None:
    patch.setattr(nn.SiLU, "__call__", nn.Mish.forward, raising=False)


def exchange_for_a_descriptor(patch: Patch) -> None:
    patch.setattr(nn.SiLU, "forward", functools.partialmethod(nn.Mish.forward))


def exchange_an_operator_of_tensors(patch: Patch) -> None:
    assert "__add__" not in vars(torch.Tensor)  # its base has it
    patch.setattr(torch.Tensor, "__add__", torch.Tensor.__sub__)


def exchange_a_compiled_function(patch: Patch) -> None:
    patch.setattr(torch._C._nn, "silu", torch._C._nn.hardswish)


def _copy_of(module: types.ModuleType, **changes: Any) -> types.ModuleType:
    copied = types.ModuleType(module.__name__)
    vars(copied).update({**vars(module), **changes})
    return copied


def exchange_a_module_of_torchs_layers(patch: Patch) -> None:
    patch.setattr(nn.modules.activation, "F", _copy_of(functional, silu=functional.mish))


def exchange_a_module_of_torchs_functions(patch: Patch) -> None:
    patch.setattr(functional, "torch", _copy_of(torch, group_norm=lambda x, *_: x * 2.0))


EXCHANGES = [
    exchange_a_module_of_torchs_functions,
    exchange_a_module_of_torchs_layers,
    exchange_a_compiled_function,
    exchange_an_operator_of_tensors,
    exchange_for_a_descriptor,
    exchange_a_function,
    give_a_function_an_argument,
    exchange_a_method,
    exchange_the_code,
    hide_a_method,
]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_known_code_in_the_place_of_other_known_code(
    session: Session, monkeypatch: Patch, exchange: Callable[[Patch], None]
) -> None:
    """No other extension's code, and nothing that the key of a kind tells."""
    twins = Twins(session)
    with monkeypatch.context() as patch:
        exchange(patch)
        assert max(twins.error(seed) for seed in range(10, 15)) < 1e-4
        assert "is not what it was" in twins.captured.reason
    assert max(twins.error(seed) for seed in range(20, 26)) < 1e-4
    assert twins.captured.reason == ""


class Doubling:
    """A descriptor that is neither callable nor a property."""

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        return lambda x: functional.silu(x) * 2.0


def test_a_descriptor_of_another_extension(session: Session, monkeypatch: Patch) -> None:
    twins = Twins(session)
    monkeypatch.setattr(nn.SiLU, "forward", Doubling())
    assert max(twins.error(seed) for seed in range(10, 15)) < 1e-4


def test_a_compiled_function_of_another_extension(session: Session, monkeypatch: Patch) -> None:
    twins = Twins(session)
    monkeypatch.setattr(torch._C._nn, "silu", lambda x: torch.relu(x))
    assert max(twins.error(seed) for seed in range(10, 15)) < 1e-4


def test_a_stand_in_for_a_module_of_torchs_layers(session: Session, monkeypatch: Patch) -> None:
    twins = Twins(session)
    stand_in = types.SimpleNamespace(**{**vars(functional), "silu": functional.mish})
    monkeypatch.setattr(nn.modules.activation, "F", stand_in)
    assert max(twins.error(seed) for seed in range(10, 15)) < 1e-4


def test_how_modules_find_their_attributes(session: Session, monkeypatch: Patch) -> None:
    def found(module: nn.Module, name: str) -> Any:
        return 2.5 if name == "output_scale_factor" else object.__getattribute__(module, name)

    twins = Twins(session)
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__getattribute__", found, raising=False)
        assert max(twins.error(seed) for seed in range(10, 15)) < 1e-4
    assert max(twins.error(seed) for seed in range(20, 26)) < 1e-4
    assert twins.captured.reason == ""


def test_no_graph_is_built_of_exchanged_code(session: Session, monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        exchange_a_function(patch)
        twins = Twins(session, reason="torch.nn.functional.silu is not what it was")
    assert max(twins.error(seed) for seed in range(20, 26)) < 1e-4
    assert twins.captured.reason == ""


def test_default_values_changed_in_place(session: Session, monkeypatch: Patch) -> None:
    twins, function = Twins(session), embeddings.get_timestep_embedding
    *others, _ = function.__defaults__
    monkeypatch.setattr(function, "__defaults__", (*others, 5000))
    assert max(twins.error(seed) for seed in range(10, 15)) < 1e-4


def test_code_changed_in_place(session: Session, monkeypatch: Patch) -> None:
    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        hidden_states, gate = self.proj(hidden_states).chunk(2, dim=-1)
        return hidden_states * gate

    twins = Twins(session)
    monkeypatch.setattr(GEGLU.forward, "__code__", forward.__code__)
    assert max(twins.error(seed) for seed in range(10, 15)) < 1e-4


def _module(source: str) -> Iterator[types.ModuleType]:
    module = types.ModuleType("made.for_a_test")
    exec(source, vars(module))
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


SOURCE = """
from torch import nn

FACTOR = 2.0

def named(x, *, times=1.0):
    return FACTOR * times * x

def closed(factor):
    def scaled(x):
        return factor * x
    return scaled

scaled = closed(3.0)

class Layer(nn.Module):
    def forward(self, x):
        return named(x) + scaled(x)
"""


@pytest.fixture
def made() -> Iterator[types.ModuleType]:
    yield from _module(SOURCE)


def a_constant(module: Any) -> None:
    module.FACTOR = 5.0


def a_keyword_default(module: Any) -> None:
    module.named.__kwdefaults__["times"] = 5.0


def a_closures_cell(module: Any) -> None:
    module.scaled.__closure__[0].cell_contents = 5.0


@pytest.mark.parametrize("change", [a_constant, a_keyword_default, a_closures_cell])
def test_what_a_function_reads_is_another_generation(
    made: Any, change: Callable[[Any], None]
) -> None:
    code = PythonCode()
    code.watch([made.Layer])
    before = code.current_generation(epoch=1)
    assert code.current_generation(epoch=2) == before
    change(made)
    assert code.current_generation(epoch=3) != before


def test_what_a_module_imports_itself_is_not_replaced() -> None:
    for module in (attention_processor, embeddings, unet_2d_blocks):
        assert replaced_helper_reason(vars(module), list(vars(module))) is None


class Louder(torch.Tensor):
    """Has Python code of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_function__(func, types, args, kwargs or {})
        return output * 1.01 if func is functional.linear else output


def a_blocks(unet: Any) -> Any:
    return unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_q


def of_no_block(unet: Any) -> Any:
    return unet.time_embedding.linear_2


@pytest.mark.parametrize("layer", [a_blocks, of_no_block])
def test_weights_of_a_class_with_code_of_its_own(
    session: Session, layer: Callable[[Any], Any]
) -> None:
    def change(unet: Any) -> None:
        weight = layer(unet).weight.detach().as_subclass(Louder)
        layer(unet).weight = nn.Parameter(weight, requires_grad=False)

    Twins(session).assert_right_after(change)


@pytest.mark.parametrize("layer", [a_blocks, of_no_block])
def test_weights_that_wrap_others(session: Session, layer: Callable[[Any], Any]) -> None:
    def wrap(unet: Any) -> None:
        weight = layer(unet).weight.detach()
        layer(unet).weight = nn.Parameter(TwoTensor(weight.clone(), weight.clone()))
        unet.requires_grad_(False)

    def change(unet: Any) -> None:
        layer(unet).weight.a = layer(unet).weight.a * 1.5

    twins = Twins(session)
    twins.assert_right_after(wrap)
    twins.assert_right_after(change)


def test_traces_of_torch_jit_keep_no_calls_numbers(session: Session) -> None:
    """A graph of a compiler has no operators to write down: its output would be a constant."""
    twins, traced = Twins(session), []
    for unet in twins.unets:
        given = unet_inputs(unet, height_latent=12, width_latent=12, seed=1)

        def run(sample: torch.Tensor, unet: Any = unet, given: Any = given) -> torch.Tensor:
            return unet(**{**given, "sample": sample}).sample

        with torch.no_grad():
            trace = torch.jit.trace(run, (given["sample"],), check_trace=False)
            traced.append(trace(2 * given["sample"]))
    reasons = {runner.eager_reason for runner in compiled_state(twins.pipe).components[0].runners}
    assert reasons == {"torch.jit traces the model"}
    assert torch.allclose(*traced, atol=1e-5)
    assert twins.error(5) < 1e-5
    assert twins.captured.reason == ""


def test_transforms_of_torch_func_run_eager_and_leave_nothing_behind(
    make_session: Callable[..., Session],
) -> None:
    # vmap has no channels_last yet, in eager either.
    twins, results = Twins(make_session(spot_checks=False, channels_last=False)), []
    for unet in twins.unets:
        given = unet_inputs(unet, height_latent=16, width_latent=16, seed=1)

        def run(sample: torch.Tensor, unet: Any = unet, given: Any = given) -> torch.Tensor:
            return unet(**{**given, "sample": sample}).sample

        with torch.no_grad():
            two = torch.stack([given["sample"], 2 * given["sample"]])
            results.append(torch.func.vmap(run)(two))
    assert torch.equal(*results)
    assert twins.error(5) < 1e-5
    assert twins.captured.reason == ""


def test_a_call_after_one_of_torch_func_does_not_ask_for_its_tensors(
    make_session: Callable[..., Session],
) -> None:
    """The timestep of the call before is compared, and that of a transform has no memory."""
    twins = Twins(make_session(spot_checks=False, channels_last=False))
    given = unet_inputs(twins.unets[0], height_latent=8, width_latent=8, seed=1)
    context = {"encoder_hidden_states": given["encoder_hidden_states"]}
    results = []
    for unet in twins.unets:

        def run(sample: torch.Tensor, unet: Any = unet) -> torch.Tensor:
            return unet(sample, torch.tensor(500), **context).sample

        sample = given["sample"]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            torch.func.jvp(run, (sample,), (torch.ones_like(sample),))
        with torch.no_grad():
            results.append([unet(sample, torch.tensor(400), **context).sample for _ in range(2)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_default_dtype_is_part_of_a_call() -> None:
    """A forward may make tensors of it, as FreeU does."""
    x, found = torch.ones(1, 4, 8, 8), []
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            with torch.no_grad():
                call = read_call((x,), {})
            assert not isinstance(call, str)
            found.append(call.key)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found[0] == found[2] != found[1]


def test_tangents_would_be_lost_in_a_graph() -> None:
    x = torch.ones(1, 4, 8, 8)
    assert global_hook_reason() is None
    with torch.no_grad(), forward_ad.dual_level():
        assert "forward-mode AD" in str(global_hook_reason())
        assert "forward-mode AD" in str(read_call((x,), {}))
    with torch.no_grad():
        assert not isinstance(read_call((x,), {}), str)
