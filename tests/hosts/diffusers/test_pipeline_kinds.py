"""A pipeline's graphs are loaded before its first picture, by what was used last time."""

from __future__ import annotations

import math

import pytest
import torch

from onediff_ext.core.components import ComponentId, Role
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, one_picture
from onediff_ext.hosts.diffusers.pipeline_kinds import PipelineKinds, form_of
from onediff_ext.store import COUNTED_PICTURES, LastKinds, LastUse
from tests.support.draw import relative_error
from tests.support.session_fixtures import (  # noqa: F401
    SmallUNet,
    exports,
    instant_workers,
    open_session,
)

TIMEOUT_S = 60


def compiled(store, **options):
    small = SmallUNet()
    chosen = {"backend": "eager", "store": store, "workers": 1, "channels_last": False, **options}
    compile_pipe(small.pipe, options=chosen)
    return small, compiled_state(small.pipe).session


def draw(small) -> torch.Tensor:
    with one_picture(small.pipe):
        return small()


def test_the_second_process_loads_them_ahead(tmp_path, exports, instant_workers):  # noqa: F811
    small, session = compiled(tmp_path)
    assert not session.read_ahead.is_reading
    expected = draw(small)
    assert session.wait_for_builds(TIMEOUT_S)
    draw(small)
    used = [kind.key.digest for kind in session.kinds]
    session.close()

    small, session = compiled(tmp_path)
    session.read_ahead.wait(TIMEOUT_S)
    assert set(session.read_ahead._graphs) == set(used)
    assert relative_error(draw(small), expected) < 1e-4
    assert {event.reason for event in session.event_log.events} == {"read ahead"}
    session.close()


def test_kinds_are_recorded_in_the_order_of_their_first_use(
    tmp_path,
    exports,  # noqa: F811
    instant_workers,  # noqa: F811
):
    small, session = compiled(tmp_path)
    records, form = LastKinds(session.library.folder), form_of(session, models_of(small))
    draw(small)
    used = tuple(kind.key.digest for kind in session.kinds)
    assert records.of(form).kinds == used  # their graphs may be built after this process
    assert records.of(form).saved_s > 0
    assert session.wait_for_builds(TIMEOUT_S)
    draw(small)
    assert records.of(form).kinds == used
    session.close()


def test_a_process_records_how_many_pictures_it_drew(tmp_path, exports, instant_workers):  # noqa: F811
    for drawn, recorded in ((3, 3), (1, 1), (12, COUNTED_PICTURES)):
        small, session = compiled(tmp_path)
        records, form = LastKinds(session.library.folder), form_of(session, models_of(small))
        for _ in range(drawn):
            draw(small)
        assert records.of(form).pictures == recorded
        session.close()


def test_nothing_is_loaded_for_another_form(tmp_path, exports, instant_workers):  # noqa: F811
    small, session = compiled(tmp_path)
    draw(small)
    assert session.wait_for_builds(TIMEOUT_S)
    draw(small)
    session.close()
    other = SmallUNet(dropout=0.1)
    compile_pipe(other.pipe, options={"backend": "eager", "store": tmp_path})
    session = compiled_state(other.pipe).session
    assert not session.read_ahead.is_reading
    assert not session.read_ahead._graphs
    session.close()


def test_a_shared_session_reads_and_records_nothing(open_session):  # noqa: F811
    small, session = SmallUNet(), open_session()
    compile_pipe(small.pipe, session=session)
    draw(small)
    assert LastKinds(session.library.folder).of(form_of(session, models_of(small))) == LastUse()


def models_of(small: SmallUNet):
    return [(ComponentId(Role.UNET), small.unet)]


def test_a_form_is_of_classes_configurations_dtypes_backend_and_precision(open_session):  # noqa: F811
    session, small = open_session(), SmallUNet()
    form = form_of(session, models_of(small))
    assert form_of(session, models_of(SmallUNet(seed=1))) == form
    assert form_of(session, models_of(SmallUNet(dropout=0.1))) != form
    assert form_of(session, [(ComponentId(Role.CONTROLNET, 0), small.unet)]) != form
    assert form_of(open_session(precision="fp8"), models_of(small)) != form
    small.unet.half()
    assert form_of(session, models_of(small)) != form


@pytest.mark.parametrize(
    ("saved_s", "load_s", "pictures", "patience_s", "expected_s"),
    [
        (0.5, 2.5, 0, 0.5, 2.5),
        (0.5, 2.5, 1, 0.5, 2.5),
        (0.5, 2.5, 8, 4.0, 2.5),
        (0.5, 0.0, 1, 0.5, 3.0),
        (0.0, 2.5, 8, math.inf, 2.5),
    ],
)
def test_on_a_gpu_a_picture_waits_no_longer_than_graphs_save_in_the_process(
    open_session,  # noqa: F811
    monkeypatch,
    saved_s,
    load_s,
    pictures,
    patience_s,
    expected_s,
):
    session, small = open_session(), SmallUNet()
    small.unet.to("meta")  # any device but a CPU
    models = models_of(small)
    use = LastUse(("a" * 64,), saved_s, load_s, pictures)
    LastKinds(session.library.folder).record(form_of(session, models), use)
    started = []
    monkeypatch.setattr(session.read_ahead, "start", lambda *_, **given: started.append(given))
    PipelineKinds(session, models)
    assert started == [{"patience_s": patience_s, "expected_s": expected_s}]


def test_on_a_cpu_a_picture_waits(open_session, monkeypatch):  # noqa: F811
    session, small = open_session(), SmallUNet()
    use = LastUse(("a" * 64,), 0.4, 2.5)
    LastKinds(session.library.folder).record(form_of(session, models_of(small)), use)
    started = []
    monkeypatch.setattr(session.read_ahead, "start", lambda *_, **given: started.append(given))
    PipelineKinds(session, models_of(small))
    assert [given["patience_s"] for given in started] == [math.inf]
