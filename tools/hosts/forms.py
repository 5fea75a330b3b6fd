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
        return {
            "d_ff": self.t5_mlp,
            "d_kv": self.context // self.t5_heads,
            "d_model": self.context,
            "num_heads": self.t5_heads,
            "num_layers": self.t5_layers,
            "num_decoder_layers": self.t5_layers,
            "dense_act_fn": "gelu_new",
            "feed_forward_proj": "gated-gelu",
        }


FLUX = FluxForm()
T5_CONFIG = {name: v for name, v in FLUX.t5.items() if name.startswith(("d_", "num_"))} | {
    "dense_act_fn": "gelu_pytorch_tanh"
}
FLUX_DEV, CHROMA = (
    f"backend/huggingface/{name}" for name in ("black-forest-labs/FLUX.1-dev", "Chroma")
)
