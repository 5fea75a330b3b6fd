"""The WebUI's page as a browser uses it: Gradio's own API, with a button's inputs."""

from __future__ import annotations

import io
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from tests.support.webui_client import WebUI, WebUIError

# What the tabs of img2img are to their function.
IMG2IMG_BATCH = 5


class Page:
    """One visitor of the page.

    Args:
        webui: Where it is.
        session: Tells visitors apart.
    """

    def __init__(self, webui: WebUI, session: str = "live-suite") -> None:
        self._webui, self._session = webui, session
        config = webui.get("/config")
        self._components = {c["id"]: c for c in config["components"]}
        self._dependencies = config["dependencies"]

    def generate(
        self,
        tab: str,
        values: Mapping[str, Any],
        *leading: Any,
        hidden: Mapping[str, str] | None = None,
    ) -> list[np.ndarray]:
        """Press "Generate".

        Args:
            tab: ``"txt2img"`` or ``"img2img"``.
            values: By the components' `elem_id`; all others are as the page shows them at first.
            leading: What the page's script puts in front, such as the tab of img2img.
            hidden: Nameless fields that the page sets when a tab is opened: first value → value.

        Returns:
            The pictures of the gallery, [H, W, 3].
        """
        index, dependency = self._submit(f"{tab}_generate")
        left = dict(values)
        inputs = [self._components[i]["props"] for i in dependency["inputs"]]
        sent = []
        for props in inputs:
            shown = _shown(props)
            if not _named(props) and isinstance(shown, str):
                shown = (hidden or {}).get(shown, shown)
            sent.append(left.pop(props["elem_id"], shown) if _named(props) else shown)
        if left:
            raise WebUIError(f"the page has no {', '.join(left)}")
        sent[: 1 + len(leading)] = [f"task(live-{self._session})", *leading]
        body = {"fn_index": index, "data": sent, "session_hash": self._session}
        answer = self._webui.post("/run/predict", body)
        gallery = answer["data"][0]
        if isinstance(gallery, dict):  # Neo changes the component, not its value alone
            gallery = gallery.get("value")
        return [self._fetch(item) for item in gallery or ()]

    def paste(self, tab: str, infotext: str) -> dict[str, Any]:
        """Press the arrow below "Generate" that reads an infotext out of the prompt.

        Args:
            tab: ``"txt2img"`` or ``"img2img"``.
            infotext: What stands in the prompt then.

        Returns:
            The values that the page sets, by the components' `elem_id`.
        """
        index, dependency = self._submit("paste", f"{tab}_prompt")
        body = {"fn_index": index, "data": [infotext], "session_hash": self._session}
        answers = self._webui.post("/run/predict", body)["data"]
        values = {}
        for number, answer in zip(dependency["outputs"], answers, strict=True):
            props = self._components[number]["props"]
            is_update = isinstance(answer, dict) and "__type__" in answer
            if is_update and "value" not in answer:
                continue  # stays as it is
            if _named(props):
                values[props["elem_id"]] = answer["value"] if is_update else answer
        return values

    def _submit(self, elem_id: str, input_id: str = "") -> tuple[int, dict[str, Any]]:
        """Press a button; of several actions, as in Forge, take the one with the most inputs.

        Args:
            elem_id: The button's.
            input_id: `elem_id` of an input, where several buttons have the same.
        """
        found = []
        for index, dependency in enumerate(self._dependencies):
            for target in dependency["targets"]:
                number = target[0] if isinstance(target, list) else target
                props = self._components.get(number, {}).get("props", {})
                inputs = [self._components[i]["props"].get("elem_id") for i in dependency["inputs"]]
                if props.get("elem_id") == elem_id and input_id in ("", *inputs):
                    found.append((len(dependency["inputs"]), index, dependency))
        if not found:
            raise WebUIError(f"the page has no {elem_id}")
        _, index, dependency = max(found, key=lambda one: one[:2])
        return index, dependency

    def _fetch(self, item: Any) -> np.ndarray:
        if isinstance(item, list):  # with a caption
            item = item[0]
        item = item.get("image", item)
        path = item.get("path") or item["name"]
        url = f"{self._webui.url}/file={urllib.parse.quote(path.split('?')[0])}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return np.asarray(Image.open(io.BytesIO(answer.read())).convert("RGB"))


def _shown(props: Mapping[str, Any]) -> Any:
    """A component's first value, as a browser sends it."""
    value = props.get("value")
    return [] if value is None and props.get("multiselect") else value


def _named(props: Mapping[str, Any]) -> bool:
    return isinstance(props.get("elem_id"), str)
