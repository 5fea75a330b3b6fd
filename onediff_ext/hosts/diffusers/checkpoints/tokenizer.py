"""CLIP's tokenizer, from the files that ship with the package."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

END_OF_TEXT = "<|endoftext|>"
"""Padding token of the CLIP-L tokenizer of SD1 and SDXL (id 49407)."""

OPEN_CLIP_PAD = "!"
"""Padding token of SD2's tokenizer and of SDXL's second one (id 0)."""


def make_tokenizer(pad_token: str = END_OF_TEXT) -> CLIPTokenizer:
    """Build CLIP's tokenizer (49,408 tokens, 77 for each prompt) without a network.

    Args:
        pad_token: `END_OF_TEXT` or `OPEN_CLIP_PAD`.

    Source: Radford et al. 2021, arXiv:2103.00020; open_clip 3.3.0's BPE file.
    """
    from transformers import CLIPTokenizer

    folder = str(files("onediff_ext") / "assets" / "tokenizer")
    tokenizer: CLIPTokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    # Set afterwards: as an argument of from_pretrained, "!" would become a special token, and a
    # prompt's own "!" would count as padding.
    tokenizer.pad_token = pad_token
    return tokenizer
