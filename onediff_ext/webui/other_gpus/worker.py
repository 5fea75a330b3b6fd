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
from onediff_ext.pictures.batch.batch_drawer import DrawerLostError
from onediff_ext.webui import extension
from onediff_ext.webui.batch_job import model_of
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


def is_worker() -> bool:
    """Whether this process draws for another WebUI."""
    return VARIABLE in os.environ


def start_if_asked() -> None:
    """Serve the WebUI that has started this process, if one has; call when the host is ready."""
    if is_worker():
        where = json.loads(os.environ[VARIABLE])
        worker = Worker(where["address"], bytes.fromhex(where["key"]))
        threading.Thread(target=worker.serve, name="onediff-serve", daemon=True).start()


class Worker:
    """Draws for the WebUI that has started this process.

    Args:
        address: Where that one listens.
        key: What both know.
    """

    def __init__(self, address: Any, key: bytes) -> None:
        self._address, self._key = address, key
        self._drawing = ThreadPoolExecutor(1, "onediff-draw")
        self._is_interrupted = threading.Event()

    def serve(self) -> None:
        """Draw until the other process says so, or is gone; then end this process."""
        from modules import scripts, shared

        try:
            with Client(self._address, authkey=self._key) as connection:
                # A1111 loads the model in another thread, and two loads at once disturb each
                # other. Reading this attribute waits for it.
                logger.debug("The model is %s", type(shared.sd_model).__name__)
                _send(connection, Ready(script_layout(scripts.scripts_img2img)))
                while not isinstance(message := pickle.loads(connection.recv_bytes()), End):
                    if isinstance(message, Interrupt):
                        self._interrupt()
                    elif isinstance(message, Draw):
                        self._is_interrupted.clear()
                        self._drawing.submit(self._draw, message, connection)
        except (EOFError, OSError):
            logger.info("The WebUI that this process draws for is gone")
        except Exception:
            logger.exception("This process cannot draw")
        finally:
            extension.close_current()
            os._exit(0)  # its server's threads wait for requests, and a batch may be drawn

    def _interrupt(self) -> None:
        from modules import shared

        self._is_interrupted.set()
        shared.state.interrupt()

    def _draw(self, message: Draw, connection: Connection[Any, Any]) -> None:
        try:
            try:
                _send(connection, self._drawn(message))
            except BaseException as exc:  # hosts have such ones of their own
                logger.warning("A batch failed", exc_info=True)
                _send(connection, Failed(first_line(str(exc), type(exc).__name__)))
        except BaseException:  # the other process waits for an answer
            logger.exception("No answer can be sent")
            os._exit(1)

    def _drawn(self, message: Draw) -> Drawn:
        from modules import processing, scripts, shared
        from modules.call_queue import queue_lock

        with queue_lock:
            job = made_again(
                message, processing.StableDiffusionProcessingImg2Img, scripts.scripts_img2img
            )
            with closing(job) as p:
                shared.state.begin(job="onediff_batch")
                if self._is_interrupted.is_set():  # `begin` has forgotten it
                    shared.state.interrupt()
                try:
                    processed = draw_seeded(p)
                    if processed is None or shared.state.interrupted or shared.state.skipped:
                        # As in the host: half-drawn images are not results.
                        raise DrawerLostError("its job was interrupted")
                finally:
                    shared.state.end()
                model = model_of(p)
        first = getattr(processed, "index_of_first_image", 0)
        return Drawn(processed.images[first:], processed.infotexts[first:], model)


def _send(connection: Connection[Any, Any], message: object) -> None:
    # Not `send`: torch would share the memory of tensors with a process that may be gone.
    connection.send_bytes(pickle.dumps(message))
