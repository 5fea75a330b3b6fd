"""Stable Diffusion WebUI Forge Neo."""
