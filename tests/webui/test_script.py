"""The always-visible script around a job, on a stand-in host."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onediff_ext.backends.inductor.backend import InductorBackend
from onediff_ext.backends.oneflow.backend import OneFlowBackend
from onediff_ext.panel.fields import fields_for
from onediff_ext.webui.settings import HOST_FEATURES
from tests.support.webui_stand_in import StandInJob

FIELDS = fields_for(HOST_FEATURES)


@pytest.fixture
def script(host: SimpleNamespace) -> Any:
    from onediff_ext.webui.always_visible import OneDiffScript

    return OneDiffScript()


def test_off_leaves_the_job_as_it_is(script: Any) -> None:
    p = StandInJob()
    before = {name: id(value) for name, value in vars(p).items()}
    for arguments in ((), (False,), ({"enabled": False},)):
        script.process(p, *arguments)
        script.process_before_every_sampling(p, *arguments)
        script.post_sample(p, None, *arguments)
        script.postprocess(p, None, *arguments)
    assert {name: id(value) for name, value in vars(p).items()} == before


def test_on_writes_infotext_and_the_job_is_as_it_was_afterwards(script: Any) -> None:
    p = StandInJob()
    before = set(vars(p))
    script.process(p, {"vae": "ignore all"})
    assert p.extra_generation_params == {
        "OneDiff": "on", "OneDiff preset": "Custom", "OneDiff VAE": "ignore all",
    }  # fmt: skip
    script.postprocess(p, None)
    assert set(vars(p)) == before


def test_a_picture_of_a_grid_has_no_entry_of_the_one_before(script: Any) -> None:
    """The X/Y/Z plot copies its job flatly for each cell, so all cells share the dictionary."""
    p = StandInJob()
    p.extra_generation_params["Script"] = "X/Y/Z plot"
    script.process(p, {"vae": "ignore all", "backend": "eager"})
    script.postprocess(p, None)
    assert "OneDiff backend" in p.extra_generation_params
    cell = copy.copy(p)
    script.process(cell, {"vae": "ignore all"})
    script.postprocess(cell, None)
    assert cell.extra_generation_params == {
        "Script": "X/Y/Z plot",
        "OneDiff": "on", "OneDiff preset": "Custom", "OneDiff VAE": "ignore all",
    }  # fmt: skip
    cell = copy.copy(cell)
    script.process(cell, False)
    assert cell.extra_generation_params == {"Script": "X/Y/Z plot"}


def test_infotext_can_be_left_out(script: Any, host: SimpleNamespace) -> None:
    host.shared.opts.onediff_infotext = False
    p = StandInJob()
    script.process(p, True)
    assert p.extra_generation_params == {}


def test_what_cannot_be_used_draws_without_and_says_why(script: Any, host: Any) -> None:
    p = StandInJob()
    script.process(p, {"preset": "Turbo"})
    assert "Turbo" in host.extension.status().line()
    assert p.extra_generation_params == {}
    assert not host.shared.state.interrupted


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ({"deepcashe": "medium"}, 'Did you mean "deepcache"?'),
        ({"enabled": "maybe"}, "true or false"),
        ("junk", "true or false"),
        ({"size_box": "huge"}, "size box"),
        ({"preset": "Custom", "deepcache": "warp 9"}, "DeepCache"),
    ],
)
def test_misspelt_input_is_said_below_the_picture(
    script: Any, host: Any, argument: object, said: str
) -> None:
    p = StandInJob()
    script.process(p, argument)
    assert said in host.extension.status().line()
    assert said in p.comments[0]
    assert p.extra_generation_params == {}
    assert not host.shared.state.interrupted
    host.shared.opts.onediff_on_failure = "stop"
    script.process(p, argument)
    assert host.shared.state.interrupted


@pytest.mark.parametrize(
    "argument",
    [
        {"sizes": "banana"},
        {"sizes": ["512x768", "xx"]},
        {"sizes": {"a": 1}},
        {"on_failure": "panic"},
        {"preset": "Balanced", "vae": "sideways"},
        {"preset": "Fast", "deepcache": "warp 9", "backend": "nexfort"},
    ],
)
def test_what_a_picture_does_not_need_leaves_it_its_graphs(
    script: Any, host: Any, argument: Any
) -> None:
    p = StandInJob()
    script.process(p, argument)
    assert p.extra_generation_params["OneDiff"] == "on"
    assert len(list(host.extension.graphs.jobs)) == 1
    status = host.extension.status()
    assert status.reasons == ()
    wrong = len(argument.keys() - {"preset"})
    assert len(status.notes) == len(p.comments) == wrong
    assert " ignored: " in status.line()
    script.process(p, {})
    assert host.extension.status().notes == ()


def test_a_misspelt_warm_up_size_of_the_panel_leaves_the_picture_its_graphs(
    script: Any, host: Any
) -> None:
    p = StandInJob()
    script.process(p, True, "Balanced", ["UNet"], "compile", "banana")
    assert p.extra_generation_params["OneDiff"] == "on"
    assert 'Warm-up sizes ignored: "banana" is not a size' in host.extension.status().line()


@pytest.mark.parametrize(
    ("argument", "entry"),
    [
        ({"backend": "oneflow"}, "OneDiff backend"),
        ({"precision": "fp8"}, "OneDiff precision"),
    ],
)
def test_infotext_and_status_say_what_drew_the_picture(
    script: Any, host: Any, argument: Any, entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OneFlow is not installed, and 8 bits are for GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(OneFlowBackend, "unavailable_reason", lambda *_: "OneFlow is missing")
    monkeypatch.setattr(InductorBackend, "unavailable_reason", lambda *_: None)
    p = StandInJob()
    script.process(p, argument)
    assert p.extra_generation_params["OneDiff"] == "on"
    assert entry not in p.extra_generation_params
    status = host.extension.status()
    assert status.backend == "inductor"
    assert status.substituted
    assert status.substituted in status.line()
    assert not host.shared.state.interrupted
    script.process(p, {**argument, "on_failure": "stop"})
    assert host.shared.state.interrupted
    assert status.substituted in p.comments[-1]


def test_outside_the_size_box_is_eager_and_said_so(script: Any, host: Any) -> None:
    script.process(StandInJob(), {"size_box": "64x64 - 256x256"})
    assert host.extension.status().line() == (
        "eager: 512x512 is outside the size box 64x64 - 256x256"
    )


def test_the_second_pass_of_hires_fix_counts_too(script: Any, host: Any) -> None:
    p = StandInJob()
    p.enable_hr, p.hr_scale = True, 2.0
    script.process(p, {"size_box": "64x64 - 512x512"})
    assert "1024x1024" in host.extension.status().line()


@pytest.mark.parametrize(
    ("setting", "argument", "stops"),
    [
        ("draw without OneDiff", "as in the settings", False),
        ("stop", "as in the settings", True),
        ("stop", "draw without OneDiff", False),
        ("draw without OneDiff", "stop", True),
    ],
)
def test_a_refusal_stops_only_where_the_user_says_so(
    script: Any, host: Any, setting: str, argument: str, stops: bool
) -> None:
    host.shared.opts.onediff_on_failure = setting
    host.adapter.reason = "fp8 weights"
    p = StandInJob()
    script.process(p, {"on_failure": argument})
    assert host.shared.state.interrupted is stops
    assert bool(p.comments) is stops
    status = host.extension.status()
    assert "fp8 weights" in status.line()
    # Over the API such a job has no picture and no comment.
    assert any("OneDiff stopped this" in note for note in status.notes) is stops


@pytest.mark.parametrize(
    ("argument", "interval", "entries"),
    [
        ({"deepcache": "medium"}, 3, {"OneDiff preset": "Custom", "OneDiff DeepCache": "medium"}),
        ({"deepcache": 4}, 4, {"OneDiff preset": "Custom", "OneDiff DeepCache": "4"}),
        ({"preset": "Fast"}, 2, {"OneDiff preset": "Fast"}),
        ({"preset": "Maximum"}, 3, {"OneDiff preset": "Maximum"}),
        ({}, 1, {"OneDiff preset": "Balanced"}),
    ],
)
def test_deepcache_reaches_the_job_and_its_infotext(
    script: Any, host: Any, argument: Any, interval: int, entries: dict[str, str]
) -> None:
    p = StandInJob()
    script.process(p, argument)
    assert [job.deepcache.interval for job in host.extension.graphs.jobs] == [interval]
    assert p.extra_generation_params == {"OneDiff": "on", **entries}
    script.post_sample(p, None, argument)
    script.postprocess(p, None, argument)


@pytest.mark.parametrize(
    ("argument", "text", "entries"),
    [
        (
            {"guidance_steps": "interval:0-0.60"},
            "interval:0-0.6",
            {"OneDiff preset": "Custom", "OneDiff guidance steps": "interval:0-0.6"},
        ),
        ({"preset": "Maximum", "guidance_steps": "adaptive"}, "off", {"OneDiff preset": "Maximum"}),
    ],
)
def test_guidance_steps_reach_the_job_and_its_infotext(
    script: Any, host: Any, argument: Any, text: str, entries: dict[str, str]
) -> None:
    p = StandInJob()
    script.process(p, argument)
    assert [str(job.guidance_steps) for job in host.extension.graphs.jobs] == [text]
    assert p.extra_generation_params == {"OneDiff": "on", **entries}
    script.post_sample(p, None, argument)
    script.postprocess(p, None, argument)


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        ((False, "Maximum"), {}),
        ((True, "Maximum"), {"deepcache": "3"}),
        (({"deepcache": "4"},), {"deepcache": "4"}),
        (({"precision": "fp8"},), {"precision": "fp8"}),
        (({"guidance_steps": "adaptive"},), {"guidance_steps": "adaptive:0.991"}),
        (({"guidance_steps": "interval:0-1"},), {}),
        ((True, "Turbo"), {}),
    ],
)
def test_what_a_job_asks_for_that_changes_pictures(
    script: Any, arguments: tuple[Any, ...], changes: dict[str, str]
) -> None:
    """A run without these choices draws a folder again that was drawn with them."""
    from onediff_ext.webui.always_visible import changes_of_job

    p: Any = StandInJob()
    assert changes_of_job(p) == {}
    p.scripts, p.script_args = SimpleNamespace(alwayson_scripts=[object(), script]), (0, *arguments)
    script.args_from, script.args_to = 1, 1 + len(arguments)
    assert changes_of_job(p) == changes


def test_axes_go_before_the_panel(script: Any, host: Any) -> None:
    from onediff_ext.webui.xyz import AXIS_ATTRIBUTE

    p = StandInJob()
    setattr(p, AXIS_ATTRIBUTE, {"enabled": "True"})
    script.process(p, False)
    assert p.extra_generation_params["OneDiff"] == "on"


def test_the_panel_has_an_argument_for_each_field_and_pastes_back(script: Any) -> None:
    import gradio

    script.show(False)
    with gradio.Blocks():
        controls = script.ui(False)
    assert len(controls) == len(FIELDS)
    labels = [control.label for control in controls]
    assert labels[1:] == [field.label for field in FIELDS[1:]]
    readers = dict(script.infotext_fields)
    with_infotext = [f for f in FIELDS if f.infotext]
    assert len(readers) == len(with_infotext)
    assert script.paste_field_names == [f.infotext for f in with_infotext]
    vae = controls[[f.name for f in FIELDS].index("vae")]
    assert readers[vae]({"OneDiff": "on", "OneDiff VAE": "ignore all"}) == "ignore all"
    assert readers[vae]({}) is None
    without_vae = {"OneDiff": "on", "OneDiff preset": "Custom", "OneDiff components": "UNet"}
    assert readers[vae](without_vae) == "ignore all"
    components = controls[[f.name for f in FIELDS].index("components")]
    assert readers[components]({"OneDiff": "on"}) == ["UNet", "ControlNet"]
    deepcache = controls[[f.name for f in FIELDS].index("deepcache")]
    custom = {"OneDiff": "on", "OneDiff preset": "Custom"}
    assert readers[deepcache]({**custom, "OneDiff DeepCache": "3 depth=1"}) == "3 depth=1"
    assert readers[deepcache]({"OneDiff": "on", "OneDiff preset": "Maximum"}) == "medium"
    assert readers[deepcache](custom) == "off"


def test_old_name_turns_it_on_for_that_job_only(host: Any) -> None:
    from onediff_ext.webui.always_visible import OneDiffScript
    from onediff_ext.webui.legacy_script import OLD_NAME, OldNameScript

    drawn = []

    def process_images(p: Any) -> str:
        OneDiffScript().process(p, False)
        drawn.append(dict(p.extra_generation_params))
        return "drawn"

    host.processing.process_images = process_images
    old, p = OldNameScript(), StandInJob()
    before = set(vars(p))
    assert old.title() == OLD_NAME == "onediff_diffusion_model"
    assert old.run(p, "arguments", "of", "earlier", "versions") == "drawn"
    assert drawn[0]["OneDiff"] == "on"
    host.extension.graphs.end(p)
    assert set(vars(p)) == before


def test_callbacks_register_and_unload_undoes_everything(host: Any) -> None:
    from onediff_ext.webui import callbacks, extension

    callbacks.register()
    for name in ("on_ui_settings", "on_before_ui"):
        host.callbacks[name][0]()
    assert "onediff_store" in host.shared.opts.labels
    host.callbacks["on_script_unloaded"][0]()
    assert extension._current is None


def test_routes_only_where_the_host_has_an_api(host: Any) -> None:
    from fastapi import FastAPI

    from onediff_ext.webui import callbacks

    callbacks.register()
    app = FastAPI()
    host.shared.cmd_opts.api = False
    host.callbacks["on_app_started"][0](None, app)
    assert not [r for r in app.routes if "onediff" in str(getattr(r, "path", ""))]
    host.shared.cmd_opts.api = True
    host.callbacks["on_app_started"][0](None, app)
    assert [r for r in app.routes if "onediff" in str(getattr(r, "path", ""))]
