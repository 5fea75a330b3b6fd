"""What the text encoders have made of the prompts of one job."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from onediff_ext.engine.patches import Patches

_LIMIT = 8  # some megabytes for each batch of prompts


class EncodedPrompts:
    """Has each distinct prompt encoded once, while the text encoders stay what they are.

    SDXL's have 44 layers, which run for the prompt and again for the negative prompt: the same
    computation before each picture of a job.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, Any] = OrderedDict()

    @contextmanager
    def kept(self, pipe: Any) -> Iterator[None]:
        """Within this ``with`` block the pipeline encodes only what is not known yet."""
        own = pipe.encode_prompt

        def encode_prompt(*args: Any, **kwargs: Any) -> Any:
            # Prompts, numbers and a device: whoever draws here gives no tensors.
            key = repr((args, sorted(kwargs.items())))
            if key not in self._known:
                self._known[key] = own(*args, **kwargs)
            self._known.move_to_end(key)
            if len(self._known) > _LIMIT:
                self._known.popitem(last=False)
            return self._known[key]

        with Patches() as patches:
            patches.set(pipe, "encode_prompt", encode_prompt)
            yield
