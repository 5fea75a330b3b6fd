"""The stand-alone page: the panel with txt2img, img2img and batch on the diffusers host."""
