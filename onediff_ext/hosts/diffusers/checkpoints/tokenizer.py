"""CLIP's tokenizer, built from the files that ship with the package."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

END_OF_TEXT = "<|endoftext|>"
"""What the CLIP-L tokenizer of SD1 and SDXL pads with (id 49407)."""

OPEN_CLIP_PAD = "!"
"""What SD2's tokenizer and SDXL's second one pad with (id 0)."""


def make_tokenizer(pad_token: str = END_OF_TEXT) -> CLIPTokenizer:
    """Build CLIP's tokenizer (49,408 tokens, 77 a prompt) without a network.

    Args:
        pad_token: `END_OF_TEXT` or `OPEN_CLIP_PAD`.

    Source: Radford et al. 2021, arXiv:2103.00020; open_clip 3.3.0's BPE file.
    """
    from transformers import CLIPTokenizer

    folder = str(files("onediff_ext") / "assets" / "tokenizer")
    tokenizer: CLIPTokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    # Set afterwards: given to from_pretrained, "!" would turn into a special token and a
    # prompt's own "!" would become padding.
    tokenizer.pad_token = pad_token
    return tokenizer
