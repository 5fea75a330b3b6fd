"""Targets: request bodies and headers, the panel's choices, command lines, what is shown."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from onediff_ext.cli import bench, demo, doctor, graphs, img2img, txt2img, ui
from onediff_ext.cli import warmup as warmup_command
from onediff_ext.cli.argument_types import required_sizes
from onediff_ext.cli.main import Parser, main
from onediff_ext.cli.model_arguments import parse_options
from onediff_ext.core.deepcache_options import DeepCacheOptions
from onediff_ext.core.errors import OneDiffError, OptionError
from onediff_ext.core.status import Status
from onediff_ext.hosts.diffusers.lora.lora_option import parse_lora, parse_lora_lines
from onediff_ext.panel import html
from onediff_ext.panel.choices import Choices, from_arguments
from onediff_ext.panel.details import detail_lines, technical_lines
from onediff_ext.panel.fields import BY_NAME, FIELDS
from onediff_ext.panel.foreign_requests import foreign_reason
from onediff_ext.panel.header import header_of
from onediff_ext.panel.infotext_entries import infotext_entries, value_from_infotext
from onediff_ext.panel.phrases import ENGLISH
from onediff_ext.panel.reasons import explain
from onediff_ext.pictures.naming import NameTemplate
from onediff_ext.pictures.size_rules import parse_size_rule
from onediff_ext.standalone.serving import parse_serving
from tests.fuzz.strategies import JSON, TEXTS, joined, near
from tests.fuzz.target import Target

BODIES = [
    {"sizes": "512x768, 64x64@2"},
    {"sizes": ["512x768", "64x64"], "preset": "Custom", "deepcache": "3 depth=1"},
    {
        "enabled": True, "preset": "Custom", "components": ["UNet", "VAE"], "vae": "ignore all",
        "sizes": "64x64", "backend": "eager", "captures": False, "size_box": "64x64 - 99x99",
        "batch_range": "1 - 4", "on_failure": "stop", "precision": "fp8",
        "deepcache": {"interval": 3},
    },
]  # fmt: skip


def _body(value: list[Any]) -> None:
    """A body as it came from the network: 4xx, or choices, or a refusal."""
    from fastapi import HTTPException, Request

    from onediff_ext.webui.request_body import MAX_BODY_BYTES, read_body

    text, kind, length = value
    content = text.encode("utf-8", "surrogatepass")
    headers = [(b"content-type", kind.encode("utf-8", "replace"))]
    if length is not None:
        headers.append((b"content-length", length.encode("utf-8", "replace")))
    sent = [0]

    async def receive() -> dict[str, Any]:
        part = content[sent[0] : sent[0] + 1000]
        sent[0] += 1000
        return {"type": "http.request", "body": part, "more_body": sent[0] < len(content)}

    request = Request({"type": "http", "headers": headers}, receive)
    body: Any = None
    refusal_reason: HTTPException | None = None
    try:
        body = asyncio.run(read_body(request, tuple(BY_NAME)))
    except HTTPException as exc:
        refusal_reason = exc
    if refusal_reason is not None:
        assert 400 <= refusal_reason.status_code < 500
        assert refusal_reason.detail.encode("utf-8")
        return
    assert isinstance(body, dict)
    assert kind.partition(";")[0].strip().lower() == "application/json"
    assert len(content) <= MAX_BODY_BYTES
    _choices(body)


def _choices(values: Any) -> None:
    """Parse any input as choices that survive infotext, or raise an OptionError."""
    choices, refusal_reason = None, ""
    try:
        choices = Choices.parse(from_arguments(values if isinstance(values, list) else [values]))
    except OptionError as exc:
        refusal_reason = str(exc)
    assert len(refusal_reason) < 1000
    if choices is None:
        return
    entries = infotext_entries(choices)
    read = {field.name: value_from_infotext(field, entries) for field in FIELDS if field.infotext}
    if entries:
        again = Choices.parse({**read, "sizes": choices.sizes})
        assert again == choices


def _deepcache(value: Any) -> None:
    with contextlib.suppress(OptionError):
        options = DeepCacheOptions.parse(value)
        assert str(DeepCacheOptions.parse(str(options))) == str(options)


def _headers(value: list[Any]) -> None:
    host, origin = value
    names = {"pictures.example"}
    if foreign_reason(host, origin, names) is None:
        assert host
        name = host.strip().lower()
        assert name.startswith(("localhost", "pictures.example", "[")) or name[0].isdigit()
        if origin is not None:
            assert origin.strip().lower().partition("://")[2] == name


def _shown(text: str) -> None:
    status = Status(
        "eager",
        reasons=(text,),
        problem=text,
        deepcache=text,
        building_now=(text,),
        changed_by=((text, text),),
        notes=(text,),
    )
    plain = explain(text, ENGLISH, {text: text})
    for piece in (
        html.header(header_of(status, True, plain, ENGLISH)),
        html.details([text], detail_lines(status, True, [plain], ENGLISH)),
        html.technical(technical_lines(status)),
        html.message(text),
        html.error(OptionError(text, text)),
    ):
        piece.encode("utf-8")
        assert "<script" not in piece.lower()


_COMMANDS = (img2img, txt2img, ui, warmup_command, graphs, bench, doctor, demo)


@cache
def _words() -> list[str]:
    parser = Parser()
    commands = parser.add_subparsers()
    for module in _COMMANDS:
        module.add_parser(commands)
    words = set(commands.choices)
    for command in commands.choices.values():
        words |= {option for action in command._actions for option in action.option_strings}
        words |= {str(one) for action in command._actions for one in action.choices or ()}
    return [*sorted(words - {"-v", "--verbose"}), "a.safetensors:0.8", "0.5", "64x64", "own", "1"]


def _after_parsing(arguments: argparse.Namespace) -> int:
    """The checks of command-line texts that run before anything is loaded."""
    given = vars(arguments)
    for text in given.get("lora") or []:
        parse_lora(text)
    if isinstance(given.get("size"), str):
        parse_size_rule(given["size"])
    if isinstance(given.get("name"), str):
        NameTemplate(given["name"])
    if isinstance(given.get("sizes"), str):
        required_sizes(given["sizes"])
    if "store_limit_gb" in given and "backend" in given:
        parse_options(arguments)
    if "auth" in given:
        parse_serving(
            host=arguments.host, port=arguments.port, open_browser=False, auth=arguments.auth,
            auth_file=arguments.auth_file, no_auth=arguments.no_auth,
            allowed_hosts=arguments.allow_host,
        )  # fmt: skip
    return 0


def _parse_only(parser: argparse.ArgumentParser, argv: Any = None) -> argparse.Namespace:
    arguments = argparse.ArgumentParser.parse_args(parser, argv)
    if hasattr(arguments, "run"):
        arguments.run = _after_parsing
    return arguments


def _command_line(words: list[str]) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Parser, "parse_args", _parse_only))
        stack.enter_context(mock.patch("onediff_ext.cli.main._set_up_logging"))
        stack.enter_context(mock.patch("atexit.register"))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        try:
            status = main(words)
        except SystemExit as exc:
            status = exc.code if isinstance(exc.code, int) else 1
    assert status in (0, 2), status
    assert status == 0 or err.getvalue().strip()


def _texts(text: str) -> None:
    """Texts of the page that name files and people."""
    for read in (
        parse_lora_lines,
        parse_lora,
        lambda given: parse_serving(host=given, port=None, open_browser=False),
        lambda given: parse_serving(host="::1", port=1, open_browser=False, auth=[given]),
        lambda given: parse_serving(
            host="::1", port=1, open_browser=False, auth_file=Path(given.replace("\0", "") or "x")
        ),
    ):
        with contextlib.suppress(OneDiffError):
            read(text)


_JSON_TEXTS = st.one_of(
    near(BODIES).map(json.dumps),
    JSON.map(json.dumps),
    joined(['{"sizes": "', '"}', "[", "{", "]", ":", "1", '"', "\\ud800", " ", "NaN"], 10),
)
_NAMES = joined(["localhost", "127.0.0.1", "[::1]", ":7860", "evil.example", ".", "]", "[", ":"], 4)

TARGETS = (
    Target(
        "request-bodies",
        st.tuples(
            _JSON_TEXTS,
            st.one_of(st.just("application/json"), st.just("application/json; charset=x"), TEXTS),
            st.one_of(st.none(), st.just("10"), TEXTS),
        ).map(list),
        _body,
    ),
    Target("choices", st.one_of(near(BODIES), st.lists(JSON, max_size=14)), _choices),
    Target(
        "deepcache",
        st.one_of(
            JSON, joined(["3", "depth=", "start=", "0.5", " ", ",", "light", "=", "end=1"], 6)
        ),
        _deepcache,
    ),
    Target(
        "headers",
        st.tuples(
            st.one_of(st.none(), _NAMES, TEXTS),
            st.one_of(st.none(), _NAMES.map(lambda name: f"http://{name}"), TEXTS),
        ).map(list),
        _headers,
    ),
    Target(
        "shown-texts", st.one_of(TEXTS, joined(["<script>", "&", "<", '"', "\ud800"], 5)), _shown
    ),
    Target(
        "command-lines",
        st.lists(
            st.one_of(
                st.deferred(lambda: st.sampled_from(_words())),
                TEXTS.map(lambda text: text.replace("\0", "")),
            ),
            max_size=7,
        ),
        _command_line,
        limit_s=3,
    ),
    Target(
        "texts", st.one_of(TEXTS, joined(["a", ":", "0.5", "\n", "C:\\", "/", ".", "9"], 6)), _texts
    ),
)
