"""The panel: one table of all choices, the Gradio components made from it, a port to the host.

Only `panel`, `gradio_versions` and the modules named ``…_panel`` import gradio. The WebUI's API and
settings use the other modules without it.
"""
