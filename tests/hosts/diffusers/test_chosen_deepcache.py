"""The DeepCache that `compile_pipe` is asked for ends with the compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from diffusers import StableDiffusionPipeline

from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled, undo_compile
from onediff_ext.hosts.diffusers.deepcache import (
    deepcache_state,
    disable_deepcache,
    enable_deepcache,
)
from onediff_ext.session.session import Session
from tests.support import models

NewSession = Callable[..., Session]


@pytest.fixture
def pipe() -> Any:
    return models.sd15()


def interval(pipe: Any) -> int | None:
    """What a pipeline's UNet has; None without DeepCache."""
    state = deepcache_state(pipe)
    return None if state is None else state.options.interval


def attributes(pipe: Any) -> dict[str, set[str]]:
    """The names of the attributes of a pipeline and of its UNet's modules."""
    named = {name: set(vars(module)) for name, module in pipe.unet.named_modules()}
    return {**named, "the pipeline": set(vars(pipe))}


def sibling(pipe: Any) -> Any:
    """Another pipeline with the same models."""
    other: Any = StableDiffusionPipeline.from_pipe(pipe)
    return models.quiet(other)


def test_nothing_is_left(pipe: Any, make_session: NewSession) -> None:
    before = attributes(pipe)
    with compiled(pipe, session=make_session(), deepcache=3):
        assert interval(pipe) == 3
    assert interval(pipe) is None
    assert attributes(pipe) == before


def test_the_users_own_comes_back(pipe: Any, make_session: NewSession) -> None:
    session = make_session()
    enable_deepcache(pipe, 5)
    before = attributes(pipe)
    for _ in range(2):  # compiled over what is compiled
        compile_pipe(pipe, session=session, deepcache=3)
        assert interval(pipe) == 3
    undo_compile(pipe)
    assert interval(pipe) == 5
    assert attributes(pipe) == before
    disable_deepcache(pipe)


def test_without_the_argument_it_stays_as_it_is(pipe: Any, make_session: NewSession) -> None:
    session = make_session()
    compile_pipe(pipe, session=session, deepcache=3)
    compile_pipe(pipe, session=session)
    assert interval(pipe) is None
    enable_deepcache(pipe, 5)
    compile_pipe(pipe, session=session)
    undo_compile(pipe)
    assert interval(pipe) == 5


@pytest.mark.parametrize("ended", [False, True])
def test_what_the_user_chooses_later_stays(
    pipe: Any, make_session: NewSession, ended: bool
) -> None:
    compile_pipe(pipe, session=make_session(), deepcache=3)
    if ended:
        disable_deepcache(pipe)
    else:
        enable_deepcache(pipe, 3)
    undo_compile(pipe)
    assert interval(pipe) == (None if ended else 3)


@pytest.mark.parametrize("first", [0, 1])
def test_pipelines_that_share_a_unet(pipe: Any, make_session: NewSession, first: int) -> None:
    session, both = make_session(), [pipe, sibling(pipe)]
    before = list(map(attributes, both))
    for each, number in zip(both, (3, 5), strict=True):
        compile_pipe(each, session=session, deepcache=number)
    assert interval(pipe) == 5
    undo_compile(both[first])
    assert interval(pipe) == (5, 3)[first]
    undo_compile(both[1 - first])
    assert interval(pipe) is None
    assert list(map(attributes, both)) == before


def test_it_ends_on_a_unet_that_replaced_another(pipe: Any, make_session: NewSession) -> None:
    compile_pipe(pipe, session=make_session(), deepcache=3)
    old, pipe.unet = pipe.unet, models.unet(seed=5)
    undo_compile(pipe)
    assert interval(pipe) is None
    assert "maybe_free_model_hooks" not in vars(pipe)
    assert not any("forward" in vars(m) for model in (old, pipe.unet) for m in model.modules())
