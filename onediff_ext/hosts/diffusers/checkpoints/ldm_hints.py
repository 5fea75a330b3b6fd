"""Hyper-parameters that a checkpoint states outside its weights: .yaml, metadata, marker tensors.

Shapes do not show attention heads, groups of the norms, the prediction type and the latent scale.
Sources, the first one wins: the A1111-style .yaml beside the file, our own metadata
(`METADATA_KEY`), other metadata (modelspec), marker tensors (`v_pred`, `ztsnr`).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from onediff_ext.core.errors import CheckpointError, UnsafeFileError
from onediff_ext.core.untrusted_files import read_regular
from onediff_ext.hosts.diffusers.checkpoints.tensor_file import TensorFile

METADATA_KEY = "onediff.ldm"
SCHEMA = 1
_MAX_HINT = 2**20
_MAX_YAML_BYTES = 2**16

PREDICTIONS = {
    "eps": "epsilon",
    "epsilon": "epsilon",
    "v": "v_prediction",
    "v_prediction": "v_prediction",
}
"""Name in files → name in diffusers."""


@dataclass(frozen=True)
class LdmHints:
    """Hyper-parameters that shapes do not show; None where no source states them.

    Args:
        head_count: Attention heads of the UNet at every width.
        head_width: Channels of a head, when the count follows the width.
        prediction_type: "epsilon" or "v_prediction".
        zero_snr: The noise levels were rescaled to end in pure noise.
        sample_size: Side of the training images, in latent cells.
        scaling_factor: Factor of the latents.
        unet_groups, vae_groups: Groups of the GroupNorms.
        text_heads: Component name → attention heads of that text encoder.
        text_last_layer: SD2 uses the text encoder's last layer, not the last but one.
    """

    head_count: int | None = None
    head_width: int | None = None
    prediction_type: str | None = None
    zero_snr: bool | None = None
    sample_size: int | None = None
    scaling_factor: float | None = None
    unet_groups: int | None = None
    vae_groups: int | None = None
    text_heads: dict[str, int] = field(default_factory=dict)
    text_last_layer: bool | None = None

    def or_else(self, other: LdmHints) -> LdmHints:
        """Fill unknown entries from other hints; head count and head width go together."""
        merged = {
            f.name: getattr(other, f.name)
            if getattr(self, f.name) in (None, {})
            else getattr(self, f.name)
            for f in fields(self)
        }
        if self.head_count or self.head_width:
            merged |= {"head_count": self.head_count, "head_width": self.head_width}
        return LdmHints(**merged)

    def to_metadata(self, architecture: str) -> dict[str, str]:
        """Return the safetensors metadata entry that `read_hints` reads back."""
        entry = {"schema": SCHEMA, "architecture": architecture, **asdict(self)}
        return {METADATA_KEY: json.dumps(entry, sort_keys=True)}


def read_hints(file: TensorFile) -> LdmHints:
    """Collect the hints of a checkpoint.

    Raises:
        CheckpointError: The .yaml beside the checkpoint cannot be understood.
    """
    hints = LdmHints()
    yaml_path = file.path.with_suffix(".yaml")
    if os.path.isfile(yaml_path):
        hints = _from_yaml(yaml_path)
    return hints.or_else(_from_metadata(file)).or_else(_from_markers(file))


def _from_metadata(file: TensorFile) -> LdmHints:
    try:
        entry = json.loads(file.metadata.get(METADATA_KEY, "{}"))
    except (ValueError, RecursionError):
        entry = {}
    if not isinstance(entry, dict) or entry.get("schema") != SCHEMA:
        return LdmHints()
    return LdmHints(**{name: value for name, value in entry.items() if _is_sound(name, value)})


def _is_sound(name: str, value: object) -> bool:
    """Whether a hint from a file has a valid value; invalid hints are ignored."""
    if name in ("head_count", "head_width", "sample_size", "unet_groups", "vae_groups"):
        return _is_count(value)
    if name == "prediction_type":
        return value in PREDICTIONS.values()
    if name in ("zero_snr", "text_last_layer"):
        return isinstance(value, bool)
    if name == "scaling_factor":
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and 0 < value < _MAX_HINT  # type: ignore[operator]
    return (
        name == "text_heads"
        and isinstance(value, dict)
        and all(isinstance(key, str) and _is_count(count) for key, count in value.items())
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MAX_HINT


def _from_markers(file: TensorFile) -> LdmHints:
    prediction = PREDICTIONS.get(file.metadata.get("modelspec.prediction_type", ""))
    if "v_pred" in file.shapes:
        prediction = "v_prediction"
    return LdmHints(prediction_type=prediction, zero_snr=True if "ztsnr" in file.shapes else None)


def _from_yaml(path: Path) -> LdmHints:
    import yaml

    from onediff_ext.hosts.diffusers.checkpoints.plain_yaml import load_plain

    hint = "Correct it, or move it away to let OneDiff deduce the settings."
    try:
        content = read_regular(path, limit_bytes=_MAX_YAML_BYTES, limit_s=30.0)
        config = load_plain(content.decode("utf-8"))
        params = config["model"]["params"]
        unet = (params.get("unet_config") or params["network_config"])["params"]
        return _from_params(params, unet)
    except UnsafeFileError as exc:
        raise CheckpointError(exc.message, hint) from exc
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read: {exc.strerror}.", hint) from exc
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as exc:
        raise CheckpointError(f"{path} is not a readable .yaml file: {exc}.", hint) from exc
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as exc:
        raise CheckpointError(
            f"{path} does not describe a Stable Diffusion model ({exc!r}).", hint
        ) from exc


def _from_params(params: dict[str, Any], unet: dict[str, Any]) -> LdmHints:
    # In the original code -1 means that the other entry decides.
    count, width = int(unet.get("num_heads") or -1), int(unet.get("num_head_channels") or -1)
    text = (params.get("cond_stage_config") or {}).get("params") or {}
    denoiser = str((params.get("denoiser_config") or {}).get("params") or "")
    prediction = None
    if params.get("unet_config"):
        # SD1 and SD2; without an entry the original code predicts noise.
        prediction = PREDICTIONS[str(params.get("parameterization") or "eps")]
    elif "VScaling" in denoiser and "EDMVScaling" not in denoiser:
        prediction = "v_prediction"
    scale = params.get("scale_factor")
    hints = LdmHints(
        head_count=count if count > 0 and width <= 0 else None,
        head_width=width if width > 0 else None,
        prediction_type=prediction,
        scaling_factor=None if scale is None else float(scale),
        text_last_layer=text["layer"] == "last" if text.get("layer") else None,
    )
    for name in ("head_count", "head_width", "scaling_factor"):
        value = getattr(hints, name)
        if value is not None and not _is_sound(name, value):
            raise ValueError(f"{name} is {value}")
    return hints
