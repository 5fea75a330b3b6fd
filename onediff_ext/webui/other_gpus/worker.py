"""A WebUI that draws for another one: the side of the process on another GPU."""

from __future__ import annotations

import json
import logging
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from multiprocessing.connection import Client, Connection
from typing import Any

from onediff_ext.core.words import first_line
from onediff_ext.webui import extension
from onediff_ext.webui.host_access import set_options
from onediff_ext.webui.other_gpus.host_job import made_again, script_layout
from onediff_ext.webui.other_gpus.messages import (
    VARIABLE,
    Draw,
    Drawn,
    End,
    Failed,
    Interrupt,
    Ready,
)
from onediff_ext.webui.seeded_drawing import draw_seeded

logger = logging.getLogger(__name__)


def start_if_asked() -> None:
    """Serve the WebUI that has started this process, if one has; call when the host is ready."""
    given = os.environ.pop(VARIABLE, None)  # processes that this one starts are none
    if given is not None:
        where = json.loads(given)
        threading.Thread(
            target=_serve, args=(where["address"], bytes.fromhex(where["key"])), daemon=True
        ).start()


def _serve(address: Any, key: bytes) -> None:
    """Draw until the other process says so, or is gone; then end this process."""
    from modules import scripts, shared

    try:
        with Client(address, authkey=key) as connection:
            # A1111 loads the model in another thread, and two loads at once disturb each other.
            # Reading this attribute waits for it.
            logger.debug("The model is %s", type(shared.sd_model).__name__)
            _send(connection, Ready(script_layout(scripts.scripts_img2img)))
            with ThreadPoolExecutor(1, "onediff-draw") as drawing:
                while not isinstance(message := pickle.loads(connection.recv_bytes()), End):
                    if isinstance(message, Interrupt):
                        shared.state.interrupt()
                    elif isinstance(message, Draw):
                        drawing.submit(_draw, message, connection)
    except (EOFError, OSError):
        logger.info("The WebUI that this process draws for is gone")
    except Exception:
        logger.exception("This process cannot draw")
    finally:
        extension.close_current()
        os._exit(0)  # its server's threads wait for requests


def _draw(message: Draw, connection: Connection[Any, Any]) -> None:
    try:
        answer: object = _drawn(message)
    except Exception as exc:
        logger.warning("A batch failed", exc_info=True)
        answer = Failed(first_line(str(exc), type(exc).__name__))
    _send(connection, answer)


def _send(connection: Connection[Any, Any], message: object) -> None:
    # Not `send`: torch would share the memory of tensors with a process that may be gone.
    connection.send_bytes(pickle.dumps(message))


def _drawn(message: Draw) -> Drawn:
    from modules import processing, scripts, shared
    from modules.call_queue import queue_lock

    with queue_lock:
        set_options(message.options)
        job = made_again(
            message, processing.StableDiffusionProcessingImg2Img, scripts.scripts_img2img
        )
        with closing(job) as p:
            shared.state.begin(job="onediff_batch")
            try:
                processed = draw_seeded(p)
            finally:
                shared.state.end()
    first = getattr(processed, "index_of_first_image", 0)
    return Drawn(processed.images[first:], processed.infotexts[first:])
