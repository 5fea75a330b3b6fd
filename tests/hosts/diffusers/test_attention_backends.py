"""Other functions in diffusers' table of attention backends, with CUDA graphs' doubles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    attention_backend,
)

from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile
from onediff_ext.session.session import Session
from tests.support.draw import relative_error
from tests.support.frozen_recorder import FrozenRecorder
from tests.support.transformer_draws import draw
from tests.support.transformer_models import MODELS

SIZE = (64, 96, 40, 1)
Draw = Callable[..., torch.Tensor]


class Instead:
    """Stands for a Python module, and has some other attributes.

    Args:
        module: The module.
        attributes: In place of its own.
    """

    def __init__(self, module: Any, **attributes: Any) -> None:
        self._module = module
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Blurred:
    """An attention function of another extension, whose strength is set from outside.

    Args:
        own: The function that it stands for.
    """

    def __init__(self, own: Callable[..., torch.Tensor]) -> None:
        self._own, self.strength = own, 1.0

    def function(self, *args: Any, **options: Any) -> torch.Tensor:
        output = self._own(*args, **options)
        return output + self.strength * output.flip((1, 2))


@pytest.fixture(params=["native", "_native_math"])
def backend(request: pytest.FixtureRequest) -> AttentionBackendName:
    return AttentionBackendName(request.param)


@pytest.fixture
def blurred(backend: AttentionBackendName) -> Blurred:
    return Blurred(_AttentionBackendRegistry._backends[backend])


@pytest.fixture
def pipes(make_session: Callable[..., Session]) -> Iterator[Callable[[str], tuple[Any, Draw]]]:
    """Make a component, and what draws with a pipeline and its twin, and compares."""
    made = []

    def make(name: str) -> tuple[Any, Draw]:
        pipe, twin, session = MODELS[name].make(), MODELS[name].make(), make_session()
        session.cuda_graphs = CudaGraphCache(FrozenRecorder(), limit=8)
        compile_pipe(pipe, session=session, ignores=("vae",))
        made.append(pipe)

        def agree(**options: Any) -> torch.Tensor:
            options = {"num_inference_steps": 4, **options}
            found, expected = (draw(each, name, SIZE, **options) for each in (pipe, twin))
            assert relative_error(found, expected) < 1e-4
            return found

        return compiled_state(pipe).components[0], agree

    yield make
    for pipe in made:
        undo_compile(pipe)


@pytest.mark.parametrize("name", ["flux", "z_image"])
def test_a_function_of_others_is_not_recorded(
    name: str,
    backend: AttentionBackendName,
    blurred: Blurred,
    pipes: Callable[[str], tuple[Any, Draw]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may keep state that changes after all comparisons."""
    component, agree = pipes(name)
    for _ in range(3):
        agree()
    assert component.captured.replayed
    with monkeypatch.context() as patch, attention_backend(backend):
        patch.setitem(_AttentionBackendRegistry._backends, backend, blurred.function)
        for _ in range(3):
            first = agree()
        blurred.strength = 3.0
        assert relative_error(agree(), first) > 1e-3
        assert "as another extension has it" in component.captured.reason
    for _ in range(3):
        agree()
    assert component.captured.replayed


def test_a_refined_prompt_follows_the_function(
    backend: AttentionBackendName,
    blurred: Blurred,
    pipes: Callable[[str], tuple[Any, Draw]],
) -> None:
    """Another one within a picture refines the prompt at each step."""
    _, agree = pipes("z_image")
    agree()
    plain = agree()
    own, registry = _AttentionBackendRegistry._backends[backend], _AttentionBackendRegistry

    def change(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        is_foreign = step == 1
        registry._backends[backend] = blurred.function if is_foreign else own
        registry.set_active_backend(backend if is_foreign else AttentionBackendName("native"))
        return kwargs

    assert relative_error(agree(callback_on_step_end=change), plain) > 1e-3


@pytest.mark.parametrize("name", ["flux", "z_image"])
def test_another_kernel_in_the_module_of_the_functions(
    name: str,
    pipes: Callable[[str], tuple[Any, Draw]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No class and no function that a block names leads there, only the table does."""
    component, agree = pipes(name)
    for _ in range(3):
        plain = agree()
    kernel = Blurred(torch.nn.functional.scaled_dot_product_attention)
    functional = Instead(torch.nn.functional, scaled_dot_product_attention=kernel.function)
    with monkeypatch.context() as patch:
        instead = Instead(torch, nn=Instead(torch.nn, functional=functional))
        patch.setattr(attention_dispatch, "torch", instead)
        for kernel.strength in (1.0, 1.0, 1.0, 3.0):
            assert relative_error(agree(), plain) > 1e-3
        assert not component.captured.replayed
    for _ in range(3):
        assert relative_error(agree(), plain) < 1e-4
    assert component.captured.replayed
