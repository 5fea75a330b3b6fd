"""The panel in a real browser, in each Gradio that hosts it: see README.md."""
