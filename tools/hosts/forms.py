"""The forms of the slim checkpoints that several hosts get: how many layers and channels.

A host does not read all of these numbers from a checkpoint: `WebUI.slim_configs` and
`WebUI.slim_sources` tell it.
"""

from __future__ import annotations

from dataclasses import dataclass

# A text in a Python file, and what takes its place.
Replacement = tuple[str, str]

# The slim checkpoints' text encoders, of which reForge reads the third last hidden states.
TEXT_LAYERS = 3
# Their VAE: a quarter of the usual width, but for the first level. Its norms have 32 groups, and a
# group of one channel leaves nothing but rounding of a picture of one colour.
VAE_WIDTHS = (64, 64, 128, 128)

TEXT_CONFIG = {"num_hidden_layers": TEXT_LAYERS}
VAE_CONFIG = {"block_out_channels": list(VAE_WIDTHS)}


def t5_config(width: int, heads: int, head: int, mlp: int, layers: int) -> dict[str, object]:
    """The config of a text encoder T5, as transformers has it.

    Args:
        width: Channels of a token.
        heads: Heads of its attention.
        head: Channels of a head.
        mlp: Channels within its MLP.
        layers: Number of layers.
    """
    return {
        "d_ff": mlp,
        "d_kv": head,
        "d_model": width,
        "num_heads": heads,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "dense_act_fn": "gelu_new",
        "feed_forward_proj": "gated-gelu",
    }


@dataclass(frozen=True)
class FluxForm:
    """The form of checkpoints of Flux.1-dev and Chroma; by default of the slim ones.

    Args:
        width: Channels of a token; a head has 128.
        context: Channels of the text encoder T5.
        double, single: Blocks of each kind.
        guidance_width: Channels of Chroma's network for modulations.
        t5_layers, t5_heads, t5_mlp: Of T5, with the channels within its MLP.
        clip_layers: Of the other text encoder.
        vae_widths: Channels of the VAE's levels.
    """

    width: int = 256
    context: int = 128
    double: int = 2
    single: int = 2
    guidance_width: int = 64
    t5_layers: int = 2
    t5_heads: int = 4
    t5_mlp: int = 256
    clip_layers: int = TEXT_LAYERS
    vae_widths: tuple[int, ...] = VAE_WIDTHS

    @property
    def t5(self) -> dict[str, object]:
        """The config of the text encoder, as transformers has it."""
        head = self.context // self.t5_heads
        return t5_config(self.context, self.t5_heads, head, self.t5_mlp, self.t5_layers)


@dataclass(frozen=True)
class SD3Form:
    """The form of the transformer of SD3.5; by default of a slim SD3.5-large.

    The last block leaves the text as it is.

    Args:
        blocks: Number of blocks, which is that of the heads too; a head has 64 channels.
        positions: Rows and columns of the embeddings of positions.
        dual: How many blocks, from the first one, have a second attention among the image's tokens.
    """

    blocks: int = 3
    positions: int = 192
    dual: int = 0

    @property
    def width(self) -> int:
        """Channels of a token."""
        return 64 * self.blocks


FLUX = FluxForm()
_T5_NUMBERS = ("d_", "num_")
T5_CONFIG = {name: v for name, v in FLUX.t5.items() if name.startswith(_T5_NUMBERS)} | {
    "dense_act_fn": "gelu_pytorch_tanh"
}
# Forge tells SD3.5-medium by its number of positions.
SD35_MEDIUM, SD35_LARGE = SD3Form(positions=384, dual=1), SD3Form()
# Forge fixes this text encoder's width in its code.
SD3_T5 = t5_config(width=4096, heads=2, head=64, mlp=256, layers=2)
SD3_T5_CONFIG = {name: v for name, v in SD3_T5.items() if name.startswith(_T5_NUMBERS)}
FLUX_DEV, CHROMA, SD3 = (
    f"backend/huggingface/{name}"
    for name in (
        "black-forest-labs/FLUX.1-dev",
        "Chroma",
        "stabilityai/stable-diffusion-3-medium-diffusers",
    )
)
