"""How each feature of diffusers' pipelines is accelerated; `docs/features.md` is its table."""
