"""Serves the stand-alone page with Gradio."""

from __future__ import annotations

from starlette.middleware import Middleware

from onediff_ext.panel.foreign_requests import RefuseForeign
from onediff_ext.panel.gradio_versions import accepted
from onediff_ext.standalone.page import Page, page_css, page_theme
from onediff_ext.standalone.page_language import page_script
from onediff_ext.standalone.serving import Serving

_MAX_UPLOAD = "100mb"
_HOST_HINT = "Start the page with --allow-host NAME if that is its name."


def launch(page: Page, serving: Serving, *, wait: bool = True) -> None:
    """Serve the page.

    Args:
        page: With its events.
        serving: Address and users.
        wait: Block until the process ends; otherwise serve in the background.
    """
    blocks = page.blocks
    look = accepted(blocks.launch, css=page_css(), theme=page_theme(), js=page_script())
    # Gradio would take these from environment variables that were set for other programs.
    plain = accepted(
        blocks.launch, share=False, ssr_mode=False, mcp_server=False, enable_monitoring=False
    )
    guard = Middleware(RefuseForeign, names=serving.names, hint=_HOST_HINT)
    blocks.queue().launch(
        server_name=serving.host,
        server_port=serving.port,
        inbrowser=serving.open_browser,
        auth=list(serving.auth) or None,
        max_file_size=None if serving.is_local else _MAX_UPLOAD,
        app_kwargs={"middleware": [guard]},
        quiet=True,
        prevent_thread_lock=not wait,
        **plain,
        **look,
    )
