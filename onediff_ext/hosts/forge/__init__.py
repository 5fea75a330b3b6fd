"""Stable Diffusion WebUI Forge, and reForge, which shares its structure."""
