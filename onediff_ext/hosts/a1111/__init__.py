"""AUTOMATIC1111's Stable Diffusion WebUI."""
