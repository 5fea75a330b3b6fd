"""When the predictions for prompt and negative prompt are so alike that guidance may end.

Castillo et al. 2023, arXiv:2312.12487.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree


class AlikePredictions:
    """Compares both predictions of each picture of a batch, step by step.

    Each picture of a batch has an end of its own, so it does not depend on the others.

    Args:
        similarity: The cosine similarity at which a picture's guidance ends.
    """

    def __init__(self, similarity: float) -> None:
        self._similarity = similarity
        self._ended: list[bool] = []
        self._found: torch.Tensor | None = None  # [B] bool, of the latest call

    @property
    def have_all_ended(self) -> bool:
        """Whether the guidance of all pictures has ended, as of `begin_step`."""
        return bool(self._ended) and all(self._ended)

    def begin_step(self) -> None:
        """Read what the step before has found. Waits for a GPU to finish that step."""
        if self._found is None:
            return
        found, self._found = self._found.tolist(), None
        if len(found) != len(self._ended):  # the first step, or other pictures
            self._ended = [False] * len(found)
        self._ended = [a or b for a, b in zip(self._ended, found, strict=True)]

    def compared(self, output: Any, is_prompt_first: bool = False) -> Any:
        """Compare both predictions of a call.

        Args:
            output: Of the denoiser; its first tensor is the prediction [2B, C, h, w].
            is_prompt_first: Whether its first half is the prompt's; else it is the second one.

        Returns:
            The output, in which pictures whose guidance has ended have the prompt's prediction in
            both halves.
        """
        leaves, form = pytree.tree_flatten(output)
        prediction = next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        first, second = prediction.detach().float().flatten(1).chunk(2)
        self._found = torch.cosine_similarity(first, second) >= self._similarity
        batch = len(self._ended)
        if not any(self._ended) or len(prediction) != 2 * batch:
            return output
        prompt, negative = (0, batch) if is_prompt_first else (batch, 0)
        negatives = [row + (prompt if ended else negative) for row, ended in enumerate(self._ended)]
        prompts = list(range(prompt, prompt + batch))
        rows = prompts + negatives if is_prompt_first else negatives + prompts
        return pytree.tree_unflatten([_with_rows(leaf, rows) for leaf in leaves], form)


def _with_rows(leaf: Any, rows: list[int]) -> Any:
    """Return a tensor's rows in another order; the tensor stays as it is. No index on the GPU."""
    if not isinstance(leaf, torch.Tensor) or leaf.shape[:1] != (len(rows),):
        return leaf
    return torch.cat([leaf[row : row + 1] for row in rows])
