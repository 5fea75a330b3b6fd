"""Blocks that another extension takes away count as eager, and the extension has a name."""

from __future__ import annotations

import types

import pytest

from onediff_ext.core.headline import Headline, headline
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state
from onediff_ext.session.foreign_blocks import TAKEN_OVER

TIMEOUT_S = 240


def code_of(extension, source, name):
    """A function as a file of an extension defines it."""
    found = {"__name__": f"{extension}.py"}
    path = f"/webui/extensions/{extension}/scripts/{extension}.py"
    exec(compile(source, path, "exec"), found)
    return found[name]


@pytest.fixture
def ready(open_session, small, instant_workers):
    """A session with a fully compiled small UNet."""
    session = open_session()
    compile_pipe(small.pipe, session=session)
    for _ in range(2):
        with session.picture():
            small()
        assert session.wait_for_builds(TIMEOUT_S)
    return session


def attentive(small):
    runners = compiled_state(small.pipe).components[0].runners
    return [r.block for r in runners if type(r.block).__name__ == "BasicTransformerBlock"]


def draw(session, small):
    with session.picture():
        small()
    return session.status()


def test_blocks_of_a_derived_class_count_although_no_runner_is_theirs(
    open_session, small, instant_workers
):
    """Token merging swaps the class of each transformer block before a job begins."""
    own = next(type(m) for m in small.unet.modules() if type(m).__name__ == "BasicTransformerBlock")
    merging = type("ToMeBlock", (own,), {"__module__": "tomesd.patch"})
    swapped = [module for module in small.unet.modules() if type(module) is own]
    for module in swapped:
        module.__class__ = merging
    session = open_session()
    compile_pipe(small.pipe, session=session)
    for _ in range(3):
        status = draw(session, small)
        assert session.wait_for_builds(TIMEOUT_S)
    status = session.status()
    assert status.running == "compiled in part"
    reason = "a BasicTransformerBlock is a ToMeBlock of tomesd.patch"
    assert dict(status.eager_blocks)[reason] == len(swapped) > 0
    assert reason in status.reasons
    assert headline(status, wanted=True) is Headline.PART


def test_a_block_that_never_reaches_its_runner_is_eager(ready, small):
    """Regional prompters put a forward of their own over the block in the middle of a job."""
    source = "def bind(block):\n    own = type(block).forward\n"
    source += "    return lambda *a, **k: own(block, *a, **k)\n"
    bind = code_of("regional-prompter", source, "bind")
    assert draw(ready, small).running == "compiled"
    blocks = attentive(small)
    for block in blocks:
        block.forward = bind(block)
    status = draw(ready, small)
    assert status.running == "compiled in part"
    assert dict(status.eager_blocks) == {TAKEN_OVER: len(blocks)}
    assert dict(status.changed_by) == {TAKEN_OVER: "regional-prompter"}


def test_a_wrapper_that_calls_the_runner_leaves_the_graph_in_use(ready, small):
    blocks = attentive(small)
    for block in blocks:
        runner = block.forward
        block.forward = lambda *a, runner=runner, **k: runner(*a, **k)
    assert draw(ready, small).running == "compiled"


@pytest.mark.parametrize("by", ["hook", "forward"])
def test_the_extension_behind_a_hook_or_a_forward_is_named(ready, small, by):
    blocks = attentive(small)
    if by == "hook":
        hook = code_of("sd-webui-negpip", "def hook(*a):\n    return None\n", "hook")
        for block in blocks:
            block.attn1.register_forward_hook(hook)
    else:
        source = "def forward(self, *a, **k):\n    return type(self).forward(self, *a, **k)\n"
        forward = code_of("sd-webui-negpip", source, "forward")
        for block in blocks:
            block.attn1.forward = types.MethodType(forward, block.attn1)
    status = draw(ready, small)
    assert status.running == "compiled in part"
    ((reason, name),) = status.changed_by
    assert name == "sd-webui-negpip"
    assert reason in status.reasons[0]
    changed = status.as_json()["changed_by"]
    assert changed == [{"reason": reason, "extension": name}]
    assert "/webui/" not in str(changed)  # no path leaves the machine


HYPERTILE = """
class Params:
    enabled = True


def wrap(layer, params):
    params.forward = layer.forward

    def wrapper(*args, **kwargs):
        if not params.enabled:
            return params.forward(*args, **kwargs)
        return params.forward(*args, **kwargs)

    return wrapper
"""


def test_a_wrapper_that_passes_calls_through_names_no_extension(ready, small, tmp_path):
    """HyperTile had been on once: what a regional prompter did was said to be its doing."""
    file = tmp_path / "extensions-builtin" / "hypertile" / "hypertile.py"
    file.parent.mkdir(parents=True)
    file.write_text(HYPERTILE)
    found = {"__name__": "hypertile"}
    exec(compile(HYPERTILE, str(file), "exec", dont_inherit=True), found)
    blocks, params = attentive(small), []
    for block in blocks:
        params.append(found["Params"]())
        block.attn1.forward = found["wrap"](block.attn1, params[-1])
    assert behind(draw(ready, small)) == ["hypertile"]
    for one in params:
        one.enabled = False
    source = "def forward(self, *a, **k):\n    return type(self).forward(self, *a, **k)\n"
    forward = code_of("regional-prompter", source, "forward")
    for block in blocks:
        block.attn2.forward = types.MethodType(forward, block.attn2)
    assert behind(draw(ready, small)) == ["regional-prompter"]
    for block in blocks:
        del block.attn2.forward
    assert draw(ready, small).running == "compiled"


def behind(status):
    """The extensions behind the eager blocks of the last picture."""
    return [dict(status.changed_by)[reason] for reason, _ in status.eager_blocks]
