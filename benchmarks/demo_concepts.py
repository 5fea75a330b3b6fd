"""The demo model's concepts, drawn with settings that change pictures; see the commands that do."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.fingerprint import fingerprint
from tests.support.demo_pictures import (
    CONCEPTS,
    draw,
    load_pipeline,
    load_references,
    nearest_concept,
    prompt_of,
)


class DemoConcepts:
    """Draws all concepts in one batch, on one thread of a CPU.

    Args:
        what: Names the result.
        description: Of the command, whose arguments this reads.

    Attributes:
        pipe: The pipeline, not compiled.
        prompts: One for each concept.
        steps: Of each picture.
    """

    def __init__(self, what: str, description: str) -> None:
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--json", type=Path)
        parser.add_argument("--steps", type=int, default=20)
        arguments = parser.parse_args()
        self._what, self._path = what, arguments.json
        self.steps: int = arguments.steps
        torch.set_num_threads(1)
        self.pipe = load_pipeline()
        self._references = load_references()
        self.prompts = [prompt_of(name) for name in CONCEPTS]

    def draw(self) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the pictures [B, 3, H, W], and a row's CPU seconds and recognised concepts."""
        start = time.process_time()
        pictures = draw(self.pipe, self.prompts, steps=self.steps)
        seconds = time.process_time() - start
        found = [nearest_concept(picture, self._references) for picture in pictures]
        recognised = sum(a == b for a, b in zip(found, CONCEPTS, strict=True))
        return pictures, {"cpu_s": seconds, "recognised": recognised}

    def write(self, rows: list[dict[str, Any]], **more: Any) -> None:
        """Print the figures, and write them where the command was told to.

        Args:
            rows: One for each setting.
            more: Further entries of the result.
        """
        figures = {
            "what": self._what,
            "steps": self.steps,
            "concepts": len(self.prompts),
            "fingerprint": fingerprint(torch.device("cpu")),
            **more,
            "rows": rows,
        }
        text = json.dumps(figures, indent=1)
        if self._path is not None:
            self._path.write_text(text + "\n", encoding="utf-8")
        print(text)
