"""However a job ends, the host is as it was, and the next picture is right."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tests.live.jobs import breaking
from tests.support.webui_client import Drawn, WebUI, WebUIError, assert_same


@pytest.mark.usefixtures("unchanged")
def test_a_whole_job(webui: WebUI) -> None:
    webui.draw(True)
    assert webui.status()["running"] == "compiled"


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("forward", [1, 2])
def test_exception_in_the_middle(webui: WebUI, forward: int) -> None:
    reference = webui.draw(False)
    with pytest.raises(WebUIError, match="raised by the probe"):
        webui.draw(True, scripts=breaking(forward))
    assert_same(webui.draw(True), reference)


@pytest.mark.usefixtures("unchanged")
def test_exception_in_a_nested_way(webui: WebUI, photo: Any) -> None:
    """In img2img, after the VAE has encoded."""
    with pytest.raises(WebUIError, match="raised by the probe"):
        webui.draw(True, "img2img", init_images=[photo], steps=4, scripts=breaking(1))


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("what", ["interrupt", "skip"])
def test_interrupt_and_skip(webui: WebUI, what: str) -> None:
    reference = webui.draw(False)
    drawn: list[Drawn] = []
    job = threading.Thread(target=lambda: drawn.append(webui.draw(True, steps=100)))
    job.start()
    wait_for_step(webui, 3)
    webui.post(f"/sdapi/v1/{what}")
    job.join(600)
    assert drawn, "the job has not come back"
    assert_same(webui.draw(True), reference)


@pytest.mark.usefixtures("unchanged")
def test_interrupt_between_pictures(webui: WebUI) -> None:
    drawn: list[Drawn] = []
    job = threading.Thread(target=lambda: drawn.append(webui.draw(True, steps=8, n_iter=20)))
    job.start()
    wait_for_step(webui, 2)
    webui.post("/sdapi/v1/interrupt")
    job.join(600)
    assert drawn
    assert len(drawn[0].pictures) < 20


def test_two_clients(webui: WebUI) -> None:
    """Jobs of two clients, one with graphs and one without, in any order: no cross-talk."""
    seeds = range(4)
    references = {seed: webui.draw(False, seed=seed, steps=2) for seed in seeds}
    answers: dict[tuple[int, bool], Drawn] = {}

    def client(accelerated: bool) -> None:
        for seed in seeds:
            answers[seed, accelerated] = webui.draw(accelerated, seed=seed, steps=2)

    threads = [threading.Thread(target=client, args=(on,)) for on in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(1200)
    assert len(answers) == 2 * len(seeds)
    for (seed, _), drawn in answers.items():
        assert_same(drawn, references[seed])


def test_reload_ui(webui: WebUI) -> None:
    if not webui.has("/onediff-probe/attributes"):
        pytest.skip("tests/live/probe is not among the WebUI's extensions")
    reference = webui.draw(False)
    before = webui.get("/onediff-probe/attributes")["modules"]
    webui.draw(True)
    webui.post("/onediff-probe/reload")
    time.sleep(8)  # it goes down only after the answer
    webui.wait_for_start()
    assert webui.get("/onediff-probe/attributes")["modules"] == before
    assert_same(webui.draw(True), reference)
    assert webui.status()["running"] == "compiled"
    assert_same(webui.draw(False), reference)
    assert webui.get("/onediff-probe/attributes")["modules"] == before


def wait_for_step(webui: WebUI, step: int) -> None:
    deadline = time.monotonic() + 300
    while True:
        state = webui.get("/sdapi/v1/progress?skip_current_image=true")["state"]
        if state["sampling_step"] >= step:
            return
        assert time.monotonic() < deadline, "the job has not begun"
        time.sleep(0.05)
