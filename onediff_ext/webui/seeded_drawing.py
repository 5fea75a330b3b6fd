"""The host's drawing with a state of random numbers that the job alone decides.

Some hosts (A1111 1.10) draw the noise of the VAE's encoder from torch's own state, which the job
before has left behind. A folder's pictures would depend on the order of its batches then. A1111's
thread that loads the first checkpoint takes random numbers after that: it makes two layers.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from modules import processing

_SEEDS = 2**63
_LOADING = "(load_model)"  # Python names a thread by its function
_LOADING_S = 60.0


def draw_seeded(p: Any) -> Any:
    """Draw a job by the host's ``process_images``.

    Args:
        p: The host's img2img processing object, with a list of seeds.

    Returns:
        What the host returns.
    """
    encode = p.init

    def encode_seeded(*args: Any, **kwargs: Any) -> Any:
        # Here, since loading a model takes random numbers too.
        _wait_for_loading()
        torch.manual_seed(int(p.seed[0]) % _SEEDS)
        return encode(*args, **kwargs)

    p.init = encode_seeded
    try:
        return processing.process_images(p)
    finally:
        del p.init  # the class's is back


def _wait_for_loading() -> None:
    for thread in threading.enumerate():
        if thread.name.endswith(_LOADING) and thread is not threading.current_thread():
            thread.join(_LOADING_S)
