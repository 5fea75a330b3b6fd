"""Reading the JSON body of an API request, with limits on size and time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from typing import Any, NoReturn

from fastapi import HTTPException, Request

from onediff_ext.core.errors import OptionError
from onediff_ext.core.json_schema import check_names

MAX_BODY_BYTES = 64 * 1024
TIMEOUT_S = 10.0
_JSON = "application/json"
_SHOWN_CHARS = 500


async def read_body(request: Request, names: Collection[str]) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        request: The server's request.
        names: The entries that the object may have.

    Raises:
        HTTPException: 415 for another content type, 413 for a body over `MAX_BODY_BYTES`, 408 for
            one that takes longer than `TIMEOUT_S`, 400 for invalid JSON, 422 for a value that is
            not an object or has unknown entries.
    """
    if _content_type(request) != _JSON:
        refuse(415, "Send the body as JSON, with the header Content-Type: application/json.")
    try:
        content = await asyncio.wait_for(_read(request), TIMEOUT_S)
    except asyncio.TimeoutError:
        refuse(408, f"The body did not arrive within {TIMEOUT_S:.0f} seconds.")
    if not content.strip():
        refuse(400, 'The body is empty; send a JSON object, such as {"sizes": "512x768"}.')
    try:
        body = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as exc:
        reason = "it is nested too deeply" if isinstance(exc, RecursionError) else str(exc)
        refuse(400, f"The body is not JSON: {reason}.")
    if not isinstance(body, dict):
        refuse(422, "The body must be a JSON object.")
    try:
        check_names(body, names)
    except OptionError as exc:
        refuse(422, str(exc))
    return body


async def read_no_body(request: Request) -> None:
    """Check a request that needs no body; an empty JSON object is accepted too.

    Many clients name the content type of all their requests, with and without a body.

    Raises:
        HTTPException: As in `read_body`.
    """
    length = request.headers.get("content-length", "0").strip()
    has_body = length != "0" or "transfer-encoding" in request.headers
    if has_body or _content_type(request) not in ("", _JSON):
        await read_body(request, ())


def refuse(status: int, reason: str) -> NoReturn:
    """Raise the error that answers a request.

    Args:
        status: The HTTP status.
        reason: Shown to the user. Lone surrogates are replaced; a long text is cut.

    Raises:
        HTTPException: Always.
    """
    text = reason.encode("utf-8", "replace").decode("utf-8")
    raise HTTPException(status, text[:_SHOWN_CHARS])


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def _read(request: Request) -> bytes:
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 19 or int(length) > MAX_BODY_BYTES:
        refuse(413, f"The body may have {MAX_BODY_BYTES:,} bytes.")
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_BODY_BYTES:
            refuse(413, f"The body may have {MAX_BODY_BYTES:,} bytes.")
    return bytes(content)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
