"""A WebUI that starts again loads the graphs of its last picture before the next one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onediff_ext.hosts.base import HostCheckpoint
from onediff_ext.panel.choices import Choices
from onediff_ext.session.session import Session
from onediff_ext.store.folder import StoreFolder
from onediff_ext.store.last_use import WebUIUse, WebUIUses
from onediff_ext.webui.extension import Extension
from tests.support.forge_stand_in import ADAPTERS, ForgeStandIn, running
from tests.support.webui_stand_in import StandInJob, StandInOptions

CHECKPOINT = HostCheckpoint("fox", "0123456789", "sd1", "ab" * 32, "/models/fox.safetensors")
CHOICES = Choices.parse({"enabled": True, "preset": "Custom", "backend": "eager"})


@pytest.fixture
def folder(tmp_path: Path) -> StoreFolder:
    return StoreFolder(tmp_path)


@pytest.fixture
def host() -> Iterator[ForgeStandIn]:
    with running("forge") as stand_in:
        yield stand_in


@pytest.fixture
def options(tmp_path: Path) -> StandInOptions:
    return StandInOptions(onediff_store=str(tmp_path), onediff_build="only by Build now")


def started(options: StandInOptions, path: str = CHECKPOINT.path) -> Extension:
    """The extension of a WebUI that has just started, and whose user has chosen a checkpoint."""
    adapter: Any = ADAPTERS["forge"]()
    adapter.checkpoint = lambda: CHECKPOINT
    adapter.device = lambda: torch.device("cpu")
    adapter.chosen_path = lambda: path
    return Extension(adapter, options)


def use_on(device: str) -> WebUIUse:
    made = CHECKPOINT
    return WebUIUse(
        asdict(CHOICES), made.content_hash, made.name, made.path, made.architecture, device
    )


def expecting(options: StandInOptions, folder: StoreFolder) -> tuple[Extension, Session]:
    """An extension that has just started, and the session that loads graphs for its first job."""
    WebUIUses(folder).note("forge", use_on("cpu"))
    extension = started(options)
    extension.read_ahead().join()
    session = extension.graphs.expected
    assert session is not None
    return extension, session


def loaded(options: StandInOptions) -> tuple[Extension, Session]:
    """An extension that has just started and has loaded its last graphs, and their session."""
    extension = started(options)
    extension.read_ahead().join()
    session = extension.graphs.expected
    assert session is not None
    session.read_ahead.wait()
    return extension, session


def draw(extension: Extension, host: ForgeStandIn, choices: Choices = CHOICES) -> torch.Tensor:
    p = StandInJob()
    extension.begin(p, choices)
    extension.graphs.before_sampling(p)
    drawn = [host.draw() for _ in range(2)][-1]
    extension.end(p)
    extension.wait_for_writes()
    return drawn


def test_graphs_are_there_before_the_first_picture(
    host: ForgeStandIn, options: StandInOptions
) -> None:
    options.onediff_build = "after the first step"  # type: ignore[attr-defined]
    first = started(options)
    expected = draw(first, host)
    first.close()
    second, session = loaded(options)
    assert session.read_ahead._graphs
    torch.testing.assert_close(draw(second, host), expected)
    assert second.graphs.session is session
    assert not session.read_ahead._graphs  # the picture has them
    second.close()


def test_nothing_is_loaded_for_another_checkpoint_or_after_a_job(
    host: ForgeStandIn, options: StandInOptions
) -> None:
    first = started(options)
    draw(first, host)
    first.close()
    other = started(options, "/models/wolf.safetensors")
    other.read_ahead().join()
    assert other.graphs.session is None
    later = started(options)
    draw(later, host, Choices.parse({"enabled": True, "preset": "Custom", "captures": False}))
    session = later.graphs.session
    later.read_ahead().join()
    assert later.graphs.session is session
    for extension in (other, later):
        extension.close()


def test_a_picture_without_graphs_is_not_the_last_use(
    host: ForgeStandIn, options: StandInOptions, folder: StoreFolder
) -> None:
    extension = started(options)
    draw(extension, host, Choices.parse({"enabled": False}))
    assert WebUIUses(folder).of("forge") is None
    draw(extension, host)
    used = WebUIUses(folder).of("forge")
    assert used is not None
    assert Choices.parse(used.choices) == CHOICES
    assert (used.path, used.content_hash) == (CHECKPOINT.path, CHECKPOINT.content_hash)
    draw(extension, host, Choices.parse({"enabled": False}))
    assert WebUIUses(folder).of("forge") == used
    extension.close()


def test_a_device_that_is_gone_loads_nothing(
    host: ForgeStandIn, options: StandInOptions, folder: StoreFolder
) -> None:
    WebUIUses(folder).note("forge", use_on("cuda:7"))
    extension = started(options)
    extension.read_ahead().join()
    assert extension.graphs.session is None
    extension.close()


def test_whatever_fails_is_left_to_the_first_picture(
    host: ForgeStandIn, options: StandInOptions, folder: StoreFolder
) -> None:
    WebUIUses(folder).note("forge", use_on("cpu"))
    extension = started(options)
    extension.host.chosen_path = lambda: SimpleNamespace().missing  # type: ignore[method-assign]
    extension.read_ahead().join()
    assert extension.graphs.session is None
    extension.close()


def test_who_draws_without_graphs_after_a_start_has_none_loaded(
    host: ForgeStandIn, options: StandInOptions, folder: StoreFolder
) -> None:
    extension, session = expecting(options, folder)
    draw(extension, host, Choices.parse({"enabled": False}))
    assert extension.graphs.session is extension.graphs.expected is None
    assert session.read_ahead._stop.is_set()
    assert WebUIUses(folder).of("forge") is None
    extension.close()


def test_other_options_close_what_was_expected(
    host: ForgeStandIn, options: StandInOptions, folder: StoreFolder
) -> None:
    extension, session = expecting(options, folder)
    other = Choices.parse({**asdict(CHOICES), "captures": False})
    draw(extension, host, other)
    assert extension.graphs.session is not session
    assert session.read_ahead._stop.is_set()
    used = WebUIUses(folder).of("forge")
    assert used is not None
    assert Choices.parse(used.choices) == other
    extension.close()


def test_a_closed_extension_loads_nothing(
    host: ForgeStandIn, options: StandInOptions, folder: StoreFolder
) -> None:
    WebUIUses(folder).note("forge", use_on("cpu"))
    extension = started(options)
    extension.close()
    extension.read_ahead().join()
    assert extension.graphs.session is None


def test_a_job_within_a_job_is_not_the_last_use(
    host: ForgeStandIn, options: StandInOptions, folder: StoreFolder
) -> None:
    extension, outer, inner = started(options), StandInJob(), StandInJob()
    extension.begin(outer, CHOICES)
    extension.graphs.before_sampling(outer)
    extension.begin(inner, Choices.parse({"enabled": False}))
    extension.end(inner)
    host.draw()
    extension.end(outer)
    extension.wait_for_writes()
    assert WebUIUses(folder).of("forge") is not None
    extension.close()


def test_what_graphs_save_is_known_at_the_next_start(
    host: ForgeStandIn, options: StandInOptions, folder: StoreFolder
) -> None:
    options.onediff_build = "after the first step"  # type: ignore[attr-defined]
    first = started(options)
    for _ in range(3):
        draw(first, host)
    first.close()
    used = WebUIUses(folder).of("forge")
    assert used is not None
    assert used.saved_s > 0
    assert used.load_s == 0  # nothing was loaded
    second, _ = loaded(options)
    draw(second, host)
    second.close()
    again = WebUIUses(folder).of("forge")
    assert again is not None
    assert again.load_s > 0
    assert again.saved_s > 0


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_the_first_job_says_how_long_it_would_wait(
    device: str, options: StandInOptions, folder: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    WebUIUses(folder).note("forge", replace(use_on(device), saved_s=0.02, load_s=2.5))
    extension, asked = started(options), []
    monkeypatch.setattr(extension.graphs, "before_load", lambda *arguments: asked.append(arguments))
    job = StandInJob()
    job.width, job.height, job.batch_size, job.n_iter, job.steps = 1000, 500, 2, 3, 20
    extension.before_load(job)
    assert asked == []  # nothing is loaded yet
    extension.read_ahead().join()
    extension.before_load(job)
    assert asked == ([] if device == "cpu" else [(pytest.approx(0.02 * 3 * 20), 2.5)])
    extension.end(job)
    asked.clear()
    extension.before_load(job)
    assert asked == []
    extension.close()


def test_a_first_picture_that_does_not_wait_pauses_loading_until_its_end(
    host: ForgeStandIn, options: StandInOptions
) -> None:
    first = started(options)
    expected = draw(first, host)
    first.close()
    extension, session = loaded(options)
    calls: list[str] = []
    read_ahead: Any = session.read_ahead
    read_ahead.begin_picture = lambda *_: calls.append("begin")
    read_ahead.end_picture = lambda: calls.append("end")
    extension.graphs.before_load(0.1, 3.0)
    assert calls == ["begin"]
    torch.testing.assert_close(draw(extension, host), expected)
    assert calls == ["begin", "end"]
    extension.close()
