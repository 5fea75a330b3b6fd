"""What decides a picture besides its settings: checkpoint, VAE, LoRAs and precision, by content.

The command line and the stand-alone page use the same names, so each continues what the other one
began. This module loads no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from onediff_ext.core.errors import CheckpointError
from onediff_ext.hosts.diffusers.lora.lora_option import lora_identities
from onediff_ext.store.content_hash import model_folder

if TYPE_CHECKING:
    from onediff_ext.store import ContentHashes

AUTO = "auto"
_TOKENIZERS_SUFFIXES = {".txt", ".model", ".jinja"}  # their .json files are in the folder's hash
_TORCH_NAMES = {"fp32": "torch.float32", "fp16": "torch.float16", "bf16": "torch.bfloat16"}


def model_identity(
    hashes: ContentHashes,
    model: Path,
    loras: Iterable[tuple[Path, float]] = (),
    *,
    dtype: str = AUTO,
    vae: Path | None = None,
    config: Path | None = None,
    vae_tiling: str = AUTO,
) -> dict[str, object]:
    """Return the parts of a model that decide a picture.

    `core.options.precision_changes` may be added.

    Args:
        hashes: Hashes files, or knows their hashes.
        model: A checkpoint's file or folder.
        loras: (file, weight) of each LoRA.
        dtype: As the user names it: "auto", "fp32", "fp16" or "bf16".
        vae: A VAE in place of the checkpoint's.
        config: A folder with all that a transformer's single file has not.
        vae_tiling: As for `ImageGenerator`. Tiles change a picture; "auto" is left out, as earlier
            versions left out all.

    Raises:
        CheckpointError: A file cannot be read, or `config` is no folder.
    """
    identity: dict[str, object] = {
        "checkpoint": hashes.content_hash(model),
        "vae": None if vae is None else hashes.content_hash(vae),
        "loras": lora_identities(loras, hashes),
        "dtype": dtype,
    }
    if vae_tiling != AUTO:
        identity["vae_tiling"] = vae_tiling
    if config is not None:
        if not os.path.isdir(model_folder(config)):
            raise CheckpointError(
                f"There is no folder {config}.", "Name the diffusers folder of the same model."
            )
        identity["config"] = hashes.content_hash(config)
    hints = model.with_suffix(".yaml")
    if not model.is_dir() and hints.is_file():
        identity["yaml"] = hashes.content_hash(hints)
    if tokenizers := _tokenizers(model, config):
        identity["tokenizers"] = [
            f"{path.parent.name}/{path.name}:{hashes.content_hash(path)[:12]}"
            for path in tokenizers
        ]
    return identity


def _tokenizers(*models: Path | None) -> list[Path]:
    """The files of tokenizers in models' folders that are no part of a folder's hash."""
    return [
        path
        for model in models
        if model is not None
        for path in sorted(model_folder(model).glob("*/*"))
        if path.suffix in _TOKENIZERS_SUFFIXES and path.is_file()
    ]


def earlier_identities(
    identity: Mapping[str, object], torch_dtype: str | None = None
) -> tuple[dict[str, object], ...]:
    """Return the names that earlier versions gave to the same model.

    They left out tokenizers, and the page of version 0.2 and before named the type of torch.

    Args:
        identity: From `model_identity`, with all additions.
        torch_dtype: Such as ``"torch.float16"``; None when only torch knows what "auto" means.
    """
    before = {name: value for name, value in identity.items() if name != "tokenizers"}
    earlier = () if before == identity else (before,)
    torch_dtype = torch_dtype or _TORCH_NAMES.get(str(identity["dtype"]))
    if torch_dtype is None or identity["vae"] is not None or "config" in identity:
        return earlier  # the page takes neither
    others = {name: value for name, value in before.items() if name not in ("vae", "dtype")}
    return (*earlier, {**others, "dtype": torch_dtype})
