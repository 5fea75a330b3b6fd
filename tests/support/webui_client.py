"""A WebUI that runs somewhere, driven by its API; nothing here knows the extension's insides."""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

PROMPT = "a red apple on a table"
NEGATIVE = "blurry"

# Small and short, since the suite is meant for a CPU.
DEFAULTS: Mapping[str, Any] = {
    "prompt": PROMPT,
    "negative_prompt": NEGATIVE,
    "seed": 7,
    "steps": 3,
    "width": 128,
    "height": 128,
    "cfg_scale": 7,
    "sampler_name": "Euler a",
}


# What makes the graphs of jobs that do not say so; "eager" builds them within seconds.
BACKEND = os.environ.get("ONEDIFF_WEBUI_BACKEND", "")
_BACKEND = {"backend": BACKEND} if BACKEND else {}

_API_STARTS_WITHIN_S = 30
_BY_NAME = {
    "denoising strength curve",
    "append interrogated prompt at each iteration",
    "size of results",
    "gpus",
    "insert prompts at the",
    "prompt",
    "select prompt",
    "joining char.",
    "select joining char",
}


class WebUIError(AssertionError):
    """The WebUI answered a request with an error."""


@dataclass(frozen=True)
class Drawn:
    """The result of one job.

    Args:
        pictures: uint8 arrays [H, W, 3].
        infotexts: The generation parameters of each picture.
        seconds: From request to answer.
    """

    pictures: list[np.ndarray]
    infotexts: list[str]
    seconds: float


class WebUI:
    """One running WebUI.

    Args:
        url: As in ``"http://127.0.0.1:7860"``.
        root: Its folder, where its ``models`` and ``extensions`` lie.
    """

    def __init__(self, url: str, root: Path) -> None:
        self.url, self.root = url.rstrip("/"), root

    def get(self, path: str) -> Any:
        return self._ask(path, None)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._ask(path, body or {})

    def has(self, path: str) -> bool:
        """Whether a route exists."""
        try:
            self.get(path)
        except WebUIError:
            return False
        return True

    def wait_for_start(self, timeout_s: float = 300) -> None:
        """Wait until it answers again, without asking it anything too early.

        A1111 1.10.1 does not survive a request between its page's start and its API's.
        """
        parts = urllib.parse.urlsplit(self.url)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                socket.create_connection((parts.hostname, parts.port or 80), timeout=5).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise WebUIError("the WebUI has not come back") from None
                time.sleep(1)
        time.sleep(_API_STARTS_WITHIN_S)
        # Extensions' routes come last: on Forge the API answers before scripts can run.
        while not self.has("/onediff/v1/version"):
            if time.monotonic() > deadline:
                raise WebUIError("the WebUI's scripts have not come back")
            time.sleep(1)

    def draw(
        self,
        accelerated: bool | Mapping[str, Any],
        path: str = "txt2img",
        scripts: Mapping[str, Any] | None = None,
        **job: Any,
    ) -> Drawn:
        """Run one job.

        Args:
            accelerated: The panel's checkbox, or the whole dict for the always-on script.
            path: ``"txt2img"`` or ``"img2img"``.
            scripts: Arguments of other always-on scripts.
            job: Fields of the API, on top of `DEFAULTS`; pictures may be arrays.
        """
        chosen = accelerated if isinstance(accelerated, Mapping) else {"enabled": accelerated}
        always_on = {"OneDiff": {"args": [{**_BACKEND, **chosen}]}, **(scripts or {})}
        body = {**DEFAULTS, **job, "alwayson_scripts": always_on}
        if body.get("enable_hr") and self.host() in ("forge", "neo"):
            body["hr_additional_modules"] = ["Use same choices"]  # its API fails without
            if self.host() == "neo":
                body["hr_upscaler"] = "None"  # it has no latent one
        if "init_images" in body:
            body["init_images"] = [encode(picture) for picture in body["init_images"]]
        if "mask" in body:
            body["mask"] = encode(body["mask"])
        return self.draw_plainly(path, body)

    def draw_plainly(self, path: str, body: Mapping[str, Any]) -> Drawn:
        """Run one job that says no more than this."""
        started = time.monotonic()
        answer = self.post(f"/sdapi/v1/{path}", body)
        info = json.loads(answer["info"])
        return Drawn(
            [decode(picture) for picture in answer["images"]],
            info["infotexts"],
            time.monotonic() - started,
        )

    def status(self) -> dict[str, Any]:
        """The extension's status."""
        status: dict[str, Any] = self.get("/onediff/v1/status")
        return status

    def settle(self, timeout_s: float = 1500) -> dict[str, Any]:
        """Wait until nothing is being built; returns the status then."""
        deadline = time.monotonic() + timeout_s
        while (status := self.status())["building"]:
            if time.monotonic() > deadline:
                raise WebUIError(f"still {status['line']}")
            time.sleep(0.5)
        return status

    def host(self) -> str:
        """``"a1111"``, ``"forge"``, ``"reforge"`` or ``"neo"``."""
        name: str = self.get("/onediff/v1/version")["host"]
        return name

    def set_options(self, **options: Any) -> None:
        """Set settings; those that this WebUI lacks are left out, since Neo refuses them."""
        known = self.get("/sdapi/v1/options")
        self.post("/sdapi/v1/options", {k: v for k, v in options.items() if k in known})

    def option(self, name: str) -> Any:
        return self.get("/sdapi/v1/options").get(name)

    def script_arguments(self, name: str, tab: str, **by_label: Any) -> list[Any]:
        """A selectable script's positional arguments: its defaults, with some replaced.

        Keys of `by_label` are labels with ``_`` for a blank; a value for a list of choices
        is the choice itself, and is sent as its index.
        """
        for script in self.get("/sdapi/v1/script-info"):
            if script["name"] == name and script["is_img2img"] is (tab == "img2img"):
                break
        else:
            raise WebUIError(f"there is no script {name!r} in {tab}")
        wanted = {label.replace("_", " ").lower(): value for label, value in by_label.items()}
        values = []
        for argument in script["args"]:
            label = (argument.get("label") or "").lower()
            value = wanted.pop(label, argument.get("value"))
            choices = [c[0] if isinstance(c, list) else c for c in argument.get("choices") or ()]
            # Lists that give the choice itself, and not its index, are the exception.
            by_index = value in choices and label not in _BY_NAME
            values.append(choices.index(value) if by_index else value)
        if wanted:
            raise WebUIError(f"{name} has no argument {', '.join(wanted)}")
        return values

    def _ask(self, path: str, body: Mapping[str, Any] | None) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=1800) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as exc:
            raise WebUIError(f"{path}: {exc.code} {exc.read().decode()[:1000]}") from exc


def encode(picture: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def decode(text: str) -> np.ndarray:
    picture = Image.open(io.BytesIO(base64.b64decode(text.split(",", 1)[-1])))
    return np.asarray(picture.convert("RGB"))


def assert_same(ours: Drawn, theirs: Drawn) -> None:
    """Within 1 of 255 at 99.9% of pixels, for every picture, none of which is empty."""
    assert len(ours.pictures) == len(theirs.pictures) > 0
    for mine, reference in zip(ours.pictures, theirs.pictures, strict=True):
        assert mine.shape == reference.shape
        assert reference.std() > 5, "the host itself drew nothing"
        share = share_within_one(mine, reference)
        worst = np.abs(mine.astype(int) - reference.astype(int)).max()
        assert share >= 0.999, f"{share:.4f} of the pixels are within 1, the worst is {worst} off"


def assert_different(one: Drawn, other: Drawn) -> None:
    """Visibly another picture, so that equality elsewhere means something."""
    assert share_within_one(one.pictures[0], other.pictures[0]) < 0.9


def share_within_one(one: np.ndarray, other: np.ndarray) -> float:
    return float((np.abs(one.astype(int) - other.astype(int)).max(-1) <= 1).mean())
