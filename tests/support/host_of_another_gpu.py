"""A stand-in for the WebUI's process on another GPU, which draws by inverting.

    python -m tests.support.host_of_another_gpu WAY

WAY: "draws", "dies" in its first job, "fails" in each job, "exits" in each with an exception that
is no `Exception`, "answers with a lock", which cannot be sent, "waits" in each until it is
interrupted, "is interrupted" by an extension, "hangs" in each, "another model", "other scripts",
"ends" before it is ready, or "never ready".
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from PIL import ImageOps

from tests.support.webui_stand_in import install_modules


class Job:
    """The host's processing object, with a script that sets the prompt when it is set up."""

    prompt: Any = None
    sd_model_name: Any = None
    override_settings: Any = None

    @property
    def script_args(self) -> Any:
        """The arguments of all scripts."""
        return self._script_args

    @script_args.setter
    def script_args(self, arguments: Any) -> None:
        self._script_args = arguments
        self.prompt = "of a script"

    def init(self) -> None:
        """Encode the images."""

    def close(self) -> None:
        """Holds no resources."""


def script(title: str, first: int, end: int) -> SimpleNamespace:
    """A script of the host, with the arguments from first to end."""
    return SimpleNamespace(title=lambda: title, args_from=first, args_to=end)


SCRIPTS = (("OneDiff", 1, 3), ("Another", 3, 4))


def main(way: str) -> None:
    """Install the stand-in, and draw for the process that has started this one."""
    if way == "ends":
        sys.exit("no checkpoint")
    if way == "never ready":
        time.sleep(600)
    host = install_modules(pytest.MonkeyPatch())
    state = host.shared.state

    def begin(job: str) -> None:
        state.interrupted = False

    state.begin, state.end = begin, (lambda: None)
    call_queue: Any = ModuleType("modules.call_queue")
    call_queue.queue_lock = threading.Lock()
    sys.modules["modules.call_queue"] = call_queue
    layout = SCRIPTS[:1] if way == "other scripts" else SCRIPTS
    host.scripts.scripts_img2img = SimpleNamespace(scripts=[script(*each) for each in layout])

    def process_images(p: Any) -> Any:
        p.init()
        if way == "dies":
            os._exit(3)
        if way == "fails":
            raise RuntimeError("no memory\nmore")
        if way == "exits":
            raise SystemExit("no more")
        if way == "hangs":
            time.sleep(600)
        if way == "is interrupted":
            state.interrupt()
        p.sd_model_name = "another" if way == "another model" else "a"
        while way == "waits" and not state.interrupted:
            time.sleep(0.01)
        checkpoint = p.override_settings["sd_model_checkpoint"]
        texts = [f"{prompt}, {checkpoint}, {p.script_args[1]}" for prompt in p.prompt]
        images = [ImageOps.invert(image) for image in p.init_images]
        if way == "answers with a lock":
            images = [threading.Lock()]
        return SimpleNamespace(images=["a grid", *images], infotexts=["", *texts],
                               index_of_first_image=1)  # fmt: skip

    host.processing.process_images = process_images
    host.processing.StableDiffusionProcessingImg2Img = Job
    from onediff_ext.webui.other_gpus.worker import start_if_asked

    start_if_asked()
    with suppress(KeyboardInterrupt):
        time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1])
