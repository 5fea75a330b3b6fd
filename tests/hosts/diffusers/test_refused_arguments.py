"""Arguments of public functions that are refused: what the error says, and that nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onediff_ext import (
    compile_module,
    compile_pipe,
    load_checkpoint,
    load_pipe,
    save_pipe,
    undo_compile,
)
from onediff_ext.core.errors import CheckpointError, OneDiffError, OptionError, StoreError
from onediff_ext.hosts.diffusers.checkpoints.load import LoadedCheckpoint
from onediff_ext.hosts.diffusers.compile import compiled_state
from onediff_ext.hosts.diffusers.deepcache import (
    deepcache_state,
    disable_deepcache,
    enable_deepcache,
)
from onediff_ext.hosts.diffusers.lora.lora_file import load_lora
from onediff_ext.hosts.diffusers.step_cache import enable_step_cache
from onediff_ext.session.session import Session
from tests.support import models
from tests.support import transformer_models as transformers

REFUSED = {
    "deepcache": {"deepcache": "medum"},
    "depth": {"deepcache": "3 depth=50"},
    "step cache": {"options": {"step_cache": "first-block"}},
    "option": {"options": {"precison": "fp8"}},
    "ignores": {"ignores": ("uent",)},
    "backend": {"backend": "tvm"},
    "nothing left": {"ignores": ("unet", "vae")},
    "session": {"session": "background"},
}


def attributes(pipe: Any) -> dict[str, dict[str, int]]:
    """The attributes of a pipeline and of all its modules, by identity."""
    parts = {"": pipe, **{name: part for name, part in pipe.components.items() if part is not None}}
    modules = {
        f"{name}.{inner}": module
        for name, part in parts.items()
        if isinstance(part, torch.nn.Module)
        for inner, module in part.named_modules()
    }
    return {
        name: {key: id(value) for key, value in vars(each).items()}
        for name, each in {**parts, **modules}.items()
        if hasattr(each, "__dict__")
    }


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_argument_leaves_the_pipeline_as_it_is(
    name: str, compiled: bool, make_session: Callable[..., Session]
) -> None:
    pipe = models.sd15()
    if compiled:
        compile_pipe(pipe, session=make_session(), deepcache=2)
    before, call, state = attributes(pipe), type(pipe).__call__, compiled_state(pipe)
    with pytest.raises(OptionError) as caught:
        compile_pipe(pipe, **REFUSED[name])
    assert caught.value.hint
    assert attributes(pipe) == before
    assert type(pipe).__call__ is call
    assert compiled_state(pipe) is state
    assert (deepcache_state(pipe) is not None) == compiled


def test_deepcache_that_a_transformer_has_not() -> None:
    pipe = transformers.sd3()
    before = attributes(pipe)
    with pytest.raises(OptionError, match="no UNet that DeepCache knows"):
        compile_pipe(pipe, deepcache=3)
    assert attributes(pipe) == before


def test_a_refused_option_leaves_a_module_compiled() -> None:
    unet = models.sd15().unet
    compile_module(unet, backend="eager")
    state = vars(unet)["_onediff"]
    with pytest.raises(OptionError, match="for pipelines"):
        compile_module(unet, options={"step_cache": "first-block"})
    assert vars(unet)["_onediff"] is state
    compile_module(unet, backend="eager")  # again: in an open session
    assert vars(unet)["_onediff"] is not state
    undo_compile(unet)


def test_graphs_that_cannot_be_loaded_leave_the_pipeline_eager(tmp_path: Path) -> None:
    (tmp_path / "graphs.zip").write_bytes(b"no archive")
    pipe = models.sd15()
    with pytest.raises(StoreError):
        load_pipe(pipe, tmp_path)
    assert compiled_state(pipe) is None


THING = object()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compile_pipe(THING), "An object is no pipeline"),
        (lambda: compile_pipe(None), "None is no pipeline"),
        (lambda: compile_pipe("model.safetensors"), "A str is no pipeline"),
        (lambda: compile_pipe(Session), "The class Session is no pipeline"),
        (lambda: compile_module(THING), "An object is no module"),
        (lambda: undo_compile(THING), "An object is neither a pipeline nor a module"),
        (lambda: save_pipe(THING), "not compiled"),
        (lambda: enable_deepcache(THING), "no UNet that DeepCache knows"),
        (lambda: enable_step_cache(THING, "first-block"), "no transformer"),
        (lambda: enable_step_cache(transformers.flux(), "mag-cache", "8"), "'8' is no number of"),
        (lambda: load_lora(THING, "lora.safetensors"), "An object takes no LoRA"),
        (lambda: load_lora(models.sd15(), None), "None is no path for `path`"),
        (lambda: load_lora(models.sd15(), "a.safetensors", "0.8"), "'0.8' is no LoRA weight"),
        (lambda: load_checkpoint(None), "None is no path for `path`"),
        (lambda: load_checkpoint(3), "An int is no path"),
        (lambda: load_checkpoint("a", vae_path=3), "no path for `vae_path`"),
        (lambda: load_checkpoint("a", dtype="fp16"), "'fp16' is no dtype"),
        (lambda: load_checkpoint("a", device="gpu"), "no device 'gpu'"),
    ],
)  # fmt: skip
def test_something_of_a_wrong_type(call: Callable[[], object], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        call()
    assert caught.value.hint


@pytest.mark.parametrize("folder", [None, 3, b"saved"])
def test_folders_that_are_no_paths(folder: Any, make_session: Callable[..., Session]) -> None:
    pipe = compile_pipe(models.sd15(), session=make_session())
    for call in (save_pipe, load_pipe):
        with pytest.raises(OptionError, match="is no path for `dir`"):
            call(pipe, folder)


def test_hints_name_what_to_pass() -> None:
    pipe = models.sd15()
    with pytest.raises(OptionError, match="compile_module"):
        compile_pipe(pipe.unet)
    loaded = LoadedCheckpoint(
        Path("a"), "sd1", pipe, "epsilon", zero_snr=False, is_inpaint=False, is_lcm=False
    )
    with pytest.raises(OptionError, match="Pass its attribute `pipeline`"):
        compile_pipe(loaded)


def test_nothing_to_disable() -> None:
    assert disable_deepcache(THING) is THING


def test_a_checkpoint_that_is_missing_is_no_wrong_type() -> None:
    with pytest.raises(CheckpointError, match="There is no checkpoint") as caught:
        load_checkpoint("missing.safetensors")
    assert isinstance(caught.value, OneDiffError)
