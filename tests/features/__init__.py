"""How each feature of diffusers' UNet pipelines is accelerated; `docs/features.md` is its table."""
