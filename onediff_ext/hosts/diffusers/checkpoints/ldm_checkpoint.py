"""Read the components of a checkpoint in the original (LDM) layout, at any width.

The tensors' names are converted by diffusers' own functions; hyper-parameters come from the
shapes, the checkpoint's hints and the architecture's defaults, never from a network.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from onediff_ext.core.errors import CheckpointError
from onediff_ext.hosts.diffusers.checkpoints.architectures import Architecture, read_architecture
from onediff_ext.hosts.diffusers.checkpoints.file_kinds import describe_keys
from onediff_ext.hosts.diffusers.checkpoints.ldm_architecture import (
    GUIDANCE_KEYS,
    UNET_PREFIX,
    VAE_PREFIX,
    Shapes,
    below,
    deduce_text_encoder,
    deduce_unet,
    deduce_vae,
)
from onediff_ext.hosts.diffusers.checkpoints.ldm_hints import LdmHints
from onediff_ext.hosts.diffusers.checkpoints.ldm_text_encoders import (
    TEXT_ENCODERS,
    TextEncoderPlace,
    text_keys,
    used_layers,
)
from onediff_ext.hosts.diffusers.checkpoints.tensor_file import TensorFile
from onediff_ext.hosts.diffusers.checkpoints.tokenizer import (
    END_OF_TEXT,
    OPEN_CLIP_PAD,
    make_tokenizer,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Placement:
    """Where weights go.

    Args:
        dtype: Of floating-point weights; None keeps each tensor's own.
        device: As torch takes it.
    """

    dtype: torch.dtype | None = None
    device: str | torch.device = "cpu"


def find_architecture(file: TensorFile) -> Architecture:
    """Tell which architecture a checkpoint has.

    Raises:
        CheckpointError: The file is something else than a checkpoint.
    """
    shapes = file.shapes
    if f"{UNET_PREFIX}input_blocks.0.0.weight" not in shapes:
        what, hint = describe_keys(shapes)
        raise CheckpointError(f"{file.path} is {what}, not a checkpoint.", hint)
    if any(key.startswith("conditioner.embedders.1.") for key in shapes):
        return read_architecture("sdxl")
    if any(key.startswith("conditioner.embedders.0.model.") for key in shapes):
        return read_architecture("sdxl-refiner")
    if f"{UNET_PREFIX}label_emb.0.0.weight" in shapes:
        return read_architecture("sdxl")
    linear = any(
        key.startswith(UNET_PREFIX) and key.endswith(".proj_in.weight") and len(shape) == 2
        for key, shape in shapes.items()
    )
    return read_architecture("sd2" if linear else "sd1")


def read_components(
    file: TensorFile, hints: LdmHints, place: Placement, vae_file: TensorFile | None = None
) -> dict[str, Any]:
    """Read UNet, VAE, text encoders and tokenizers.

    Args:
        file: The checkpoint.
        hints: What it says about itself.
        place: Where weights go.
        vae_file: A VAE to use in place of the checkpoint's own.

    Returns:
        Component name → model, named as diffusers' pipelines name them (no scheduler).

    Raises:
        CheckpointError: A component is missing or damaged.
    """
    architecture = find_architecture(file)
    parts: dict[str, Any] = {}
    for text_place in TEXT_ENCODERS[architecture.label]:
        name = text_place.component
        parts[name] = _read_text_encoder(file, text_place, architecture, hints, place)
        # SDXL's second encoder and SD2's only one are OpenCLIP's.
        pad = OPEN_CLIP_PAD if text_place.open_clip else END_OF_TEXT
        parts[name.replace("text_encoder", "tokenizer")] = make_tokenizer(pad)
    pooled_width = 0
    if "text_encoder_2" in parts:
        pooled_width = parts["text_encoder_2"].config.projection_dim
    parts["vae"] = _read_vae(vae_file or file, architecture, hints, place)
    parts["unet"] = _read_unet(file, architecture, hints, place, pooled_width)
    return parts


def unet_config(
    shapes: Shapes, architecture: Architecture, hints: LdmHints, pooled_width: int
) -> dict[str, Any]:
    """Complete a UNet's config from its shapes, its hints and its architecture's defaults.

    Args:
        shapes: Without the `UNET_PREFIX`.
        architecture: Gives what is left open.
        hints: What the checkpoint says about itself.
        pooled_width: Width of SDXL's pooled text, part of its conditioning.

    Raises:
        CheckpointError: A layout that is not supported.
    """
    config = {**architecture.unet, **deduce_unet(shapes)}
    count, width = hints.head_count, hints.head_width
    if not count and not width:
        count, width = architecture.head_count, architecture.head_width
    # diffusers' `attention_head_dim` is the number of heads.
    config["attention_head_dim"] = (
        count if count else [max(1, channels // width) for channels in config["block_out_channels"]]
    )
    _check_heads(config)
    config["norm_num_groups"] = hints.unet_groups or config["norm_num_groups"]
    config["sample_size"] = hints.sample_size or config["sample_size"]
    conditioning = config.get("projection_class_embeddings_input_dim")
    if architecture.time_ids and conditioning is not None:
        config["addition_time_embed_dim"] = (conditioning - pooled_width) // architecture.time_ids
    elif "label_emb.0.0.weight" in shapes:
        raise CheckpointError(
            "The UNet has class conditioning, as unCLIP variations have.",
            "Use a text-to-image checkpoint.",
        )
    if config["in_channels"] not in (4, 9):
        raise CheckpointError(
            f"The UNet takes {config['in_channels']} channels, as depth, upscaling or"
            " InstructPix2Pix models do.",
            "Use a text-to-image checkpoint (4 channels) or an inpainting one (9).",
        )
    return config


def _check_heads(config: dict[str, Any]) -> None:
    widths, counts = config["block_out_channels"], config["attention_head_dim"]
    counts = [counts] * len(widths) if isinstance(counts, int) else counts
    attending = [kind.startswith("CrossAttn") for kind in config["down_block_types"]]
    for width, heads, attends in zip(widths, counts, attending, strict=True):
        if attends and width % heads:
            raise CheckpointError(
                f"{heads} attention heads do not divide the UNet's {width} channels.",
                "Give the model's number of heads in a .yaml beside the checkpoint, or correct"
                " the one that is there.",
            )


def _read_unet(
    file: TensorFile,
    architecture: Architecture,
    hints: LdmHints,
    place: Placement,
    pooled_width: int,
) -> Any:
    from diffusers import UNet2DConditionModel
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    config = unet_config(below(file.shapes, UNET_PREFIX), architecture, hints, pooled_width)
    keys = [key for key in file.shapes if key.startswith(UNET_PREFIX)]
    tensors = file.read(keys, place.dtype, place.device)
    weights = convert_ldm_unet_checkpoint(tensors, config)
    for key in GUIDANCE_KEYS:
        if UNET_PREFIX + key in tensors:
            weights["time_embedding.cond_proj.weight"] = tensors[UNET_PREFIX + key]
    return fill(file, "UNet", lambda: UNet2DConditionModel(**config), weights, place)


def _read_vae(
    file: TensorFile, architecture: Architecture, hints: LdmHints, place: Placement
) -> Any:
    from diffusers import AutoencoderKL
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    # A VAE file of its own has no prefix.
    bare = "decoder.conv_in.weight" in file.shapes
    prefix = "" if bare else VAE_PREFIX
    keys = [key for key in file.shapes if key.startswith(prefix)]
    if f"{prefix}decoder.conv_in.weight" not in file.shapes:
        raise CheckpointError(
            f"{file.path} has no VAE ({VAE_PREFIX}*).",
            "Give a VAE file beside it, or use the full checkpoint.",
        )
    if f"{prefix}decoder.mid.block_1.conv1.weight" not in file.shapes:
        raise CheckpointError(
            f"{file.path} has a VAE in another layout than the original one.",
            "Use a VAE .safetensors in the original (LDM) layout.",
        )
    config = {**architecture.vae, **deduce_vae(below(file.shapes, prefix))}
    config["norm_num_groups"] = hints.vae_groups or config["norm_num_groups"]
    config["scaling_factor"] = hints.scaling_factor or config["scaling_factor"]
    config["sample_size"] = 8 * hints.sample_size if hints.sample_size else config["sample_size"]
    tensors = file.read(keys, place.dtype, place.device)
    tensors = {VAE_PREFIX + key[len(prefix) :]: tensor for key, tensor in tensors.items()}
    weights = convert_ldm_vae_checkpoint(tensors, config)
    return fill(file, "VAE", lambda: AutoencoderKL(**config), weights, place)


def _read_text_encoder(
    file: TensorFile,
    text_place: TextEncoderPlace,
    architecture: Architecture,
    hints: LdmHints,
    place: Placement,
) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    keys = text_keys(file.shapes, text_place)
    if not keys:
        raise CheckpointError(
            f"{file.path} has no text encoder ({text_place.prefix}*).",
            "Use the full checkpoint: a UNet alone cannot read a prompt.",
        )
    prefix = text_place.prefix if text_place.open_clip else f"{text_place.prefix}text_model."
    shapes = below({key: file.shapes[source] for key, source in keys.items()}, prefix)
    published = architecture.text_encoders[text_place.component]
    config = {**published, **deduce_text_encoder(shapes)}
    if text_place.component in hints.text_heads:
        config["num_attention_heads"] = hints.text_heads[text_place.component]
    if architecture.label == "sd2":
        config["num_hidden_layers"] = used_layers(
            shapes, published["num_hidden_layers"], bool(hints.text_last_layer)
        )
    cls = CLIPTextModelWithProjection if text_place.pooled else CLIPTextModel
    read = file.read(keys.values(), place.dtype, place.device)
    tensors = {key: read[source] for key, source in keys.items()}
    text_config = CLIPTextConfig(**config)

    def convert(model: Any) -> dict[str, torch.Tensor]:
        return _convert_text(model, tensors, text_place)

    return fill(file, text_place.component, lambda: cls(text_config), convert, place)


def _convert_text(
    model: Any, tensors: dict[str, torch.Tensor], text_place: TextEncoderPlace
) -> dict[str, torch.Tensor]:
    from diffusers.loaders import single_file_utils as diffusers_names

    weights: dict[str, torch.Tensor]
    if text_place.open_clip:
        weights = diffusers_names.convert_open_clip_checkpoint(
            model, tensors, prefix=text_place.prefix
        )
    else:
        weights = diffusers_names.convert_ldm_clip_checkpoint(tensors)
    if not hasattr(model, "text_model"):
        # transformers 5.6 flattened CLIPTextModel.
        weights = {key.removeprefix("text_model."): value for key, value in weights.items()}
    return weights


def fill(file: TensorFile, what: str, build: Any, weights: Any, place: Placement) -> Any:
    """Build a module without memory of its own and hand it its weights.

    Args:
        file: Named in errors.
        what: The component, named in errors.
        build: Returns the module.
        weights: Its state dict, or a function from the empty module to it. More than the module
            needs is left out.
        place: Where the weights are, and where its buffers go.

    Raises:
        CheckpointError: Weights are missing or of another shape.
    """
    from accelerate import init_empty_weights

    with init_empty_weights():
        model = build()
    if callable(weights):
        weights = weights(model)
    needed = model.state_dict()
    missing = sorted(key for key in needed if weights.get(key) is None)
    again = "The file is damaged or incomplete; use another copy."
    if missing:
        raise CheckpointError(
            f"{file.path}: {len(missing)} tensors of the {what} are missing,"
            f" among them {missing[0]}.",
            again,
        )
    wrong = [key for key, tensor in needed.items() if weights[key].shape != tensor.shape]
    if wrong:
        found, expected = tuple(weights[wrong[0]].shape), tuple(needed[wrong[0]].shape)
        raise CheckpointError(
            f"{file.path}: the {what}'s {wrong[0]} has the shape {found}, not {expected}.", again
        )
    spare = len(weights) - len(needed)
    if spare:
        logger.debug("%s: %d tensors beside the %s's own left out", file.path, spare, what)
    model.load_state_dict({key: weights[key] for key in needed}, assign=True)
    return model.to(place.device).eval()
