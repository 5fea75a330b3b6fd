"""Passwords of URLs in texts."""

from __future__ import annotations

import logging

import pytest

from onediff_ext.cli.main import PrintableFormatter
from onediff_ext.core.errors import PictureError
from onediff_ext.core.url_secrets import without_secrets, without_secrets_in


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ftp://me:pw@host/a", "ftp://me:***@host/a"),
        ("no ftp://me:pw@host:21/a, 's3://k:s@b/x'.", "no ftp://me:***@host:21/a, 's3://k:***@b/x'."),
        ("ftp://me:p@ss@host/a@2x.png", "ftp://me:***@host/a@2x.png"),
        ("ftp://:pw@host/", "ftp://:***@host/"),
        ("s3://key:a/b+c@bucket/x", "s3://key:***@bucket/x"),
        ("s3:/key:pw@bucket/x", "s3:/key:***@bucket/x"),
        (r"s3:\\key:pw@bucket\\x", r"s3:\\key:***@bucket\\x"),
        ("simplecache::ftp://me:pw@host/a", "simplecache::ftp://me:***@host/a"),
        ("zip://a.zip::ftp://me:pw@host/a", "zip://a.zip::ftp://me:***@host/a"),
        ("https://host/a?sv=1&sig=abc%3D&x=2#y", "https://host/a?sv=1&sig=***&x=2#y"),
        ("https://host/a?X-Amz-Credential=k&b=c", "https://host/a?X-Amz-Credential=***&b=c"),
    ],
)  # fmt: skip
def test_they_are_hidden(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
    assert str(PictureError(text, text)) == f"{shown} {shown}"
    assert PictureError(text).args == (shown, "")
    assert without_secrets_in({"a": [text, 3, None]}) == {"a": [shown, 3, None]}
    record = logging.LogRecord("a", logging.INFO, "", 0, "%s", (text,), None)
    assert PrintableFormatter("%(message)s").format(record) == shown


@pytest.mark.parametrize(
    "text",
    [
        "ftp://host:21/dir/a@2x.png",
        "abfs://container@account/x",
        "s3://bucket/a:b@c.png",
        r"C:\me:pw@host",
        "C:/me:pw@host",
        "me:pw@host",
        "10.0.0.1:6379",
        "https://host/a?size=3",
        "3 of 4: a picture",
    ],
)
def test_other_texts_stay(text: str) -> None:
    assert without_secrets(text) == text
