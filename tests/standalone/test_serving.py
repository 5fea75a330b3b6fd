"""Where the page is served, and who may use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onediff_ext.cli.main import main
from onediff_ext.core.errors import OptionError
from onediff_ext.panel.foreign_requests import foreign_reason, is_loopback
from onediff_ext.standalone.serving import Serving, parse_serving


def serving(host: str = "127.0.0.1", **more: Any) -> Serving:
    return parse_serving(host=host, port=None, open_browser=False, **more)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.53", "[::1]"])
def test_the_loopback_needs_no_password(host: str) -> None:
    assert is_loopback(host)
    assert serving(host).is_local
    assert serving(host).auth == ()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "my-machine", "localhost.x", ""])
def test_every_other_address_needs_one(host: str) -> None:
    with pytest.raises(OptionError, match="has no password") as caught:
        serving(host)
    assert "--auth-file" in caught.value.hint
    assert "--no-auth" in caught.value.hint
    assert serving(host, auth=["a:b"]).auth == (("a", "b"),)
    assert serving(host, no_auth=True).auth == ()
    assert not serving(host, no_auth=True).is_local


def test_a_proxys_name_needs_one_as_well() -> None:
    with pytest.raises(OptionError, match="has no password"):
        serving(allowed_hosts=["pictures.example"])
    made = serving(allowed_hosts=["Pictures.Example"], auth=["a:b"])
    assert not made.is_local
    assert foreign_reason("pictures.example:80", None, made.names) is None
    assert foreign_reason("evil.example", None, made.names) is not None


def test_the_machines_own_name_is_known_where_others_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Studio.lan")
    made = serving("0.0.0.0", auth=["a:b"])
    for name in ("studio.lan", "STUDIO:7860", "studio.local", "0.0.0.0:7860"):
        assert foreign_reason(name, None, made.names) is None
    assert foreign_reason("studio.lan", None, serving().names) is not None


@pytest.mark.parametrize("text", ["", ":", "someone", "someone:", ":secret-word", " :secret-word"])
def test_a_user_without_password_is_refused_and_not_printed(text: str) -> None:
    with pytest.raises(OptionError, match="user and a password") as caught:
        serving(auth=[text])
    assert "secret-word" not in str(caught.value)


def test_users_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "users"
    path.write_text("\ufeffa:one\n\nb:two:three \r\n", encoding="utf-8")
    assert serving(auth_file=path).auth == (("a", "one"), ("b", "two:three "))
    assert serving(auth=["c:d"], auth_file=path).auth[0] == ("c", "d")


@pytest.mark.parametrize("content", [b"", b"\n", b"secret-word", b"\xff\xfe", b"a:b\n" * 50_000])
def test_a_file_that_is_no_good(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "users"
    path.write_bytes(content)
    with pytest.raises(OptionError) as caught:
        serving(auth_file=path)
    assert "secret-word" not in str(caught.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", Path("/dev/zero")):
        with pytest.raises(OptionError):
            serving(auth_file=path)


def test_a_missing_file_is_called_missing(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="No such file") as caught:
        serving(auth_file=tmp_path / "none")
    assert "name" in caught.value.hint


def test_passwords_or_none() -> None:
    with pytest.raises(OptionError, match="exclude each other"):
        serving(auth=["a:b"], no_auth=True)


def test_the_command_refuses_before_it_loads_anything(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gradio", reason="the page needs gradio, which is not installed")
    from onediff_ext.cli import library_imports

    monkeypatch.setattr(library_imports, "import_libraries", lambda: pytest.fail("too late"))
    assert main(["ui", "--host", "0.0.0.0", "--no-browser"]) == 2
    said = capsys.readouterr().err
    assert "has no password" in said
    assert "--auth" in said
    assert main(["ui", "--port", "70000"]) == 2
