"""The panel: one description of every choice, Gradio components made from it, a port to a host.

Only `panel`, `gradio_versions` and `standalone` import gradio; the WebUI's API and settings use
the rest without it.
"""
