"""LoRAs as a user names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from onediff_ext.core.errors import OptionError
from onediff_ext.hosts.diffusers.lora.lora_option import parse_lora, parse_lora_lines


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.safetensors", (Path("a.safetensors"), 1.0)),
        ("a.safetensors:0.5", (Path("a.safetensors"), 0.5)),
        ("a:b.safetensors:-1", (Path("a:b.safetensors"), -1.0)),
        (r"C:\a.safetensors", (Path(r"C:\a.safetensors"), 1.0)),
        (r"C:\a.safetensors:0.5", (Path(r"C:\a.safetensors"), 0.5)),
        (r"\\?\C:\a.safetensors", (Path(r"\\?\C:\a.safetensors"), 1.0)),
        (r"\\server\share\a.safetensors:2", (Path(r"\\server\share\a.safetensors"), 2.0)),
    ],
)
def test_the_weight_comes_after_the_last_colon(text: str, expected: tuple[Path, float]) -> None:
    assert parse_lora(text) == expected


def test_a_file_with_a_colon_in_its_name_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a:0.5"
    path.touch()
    assert parse_lora(str(path)) == (path, 1.0)


def test_loras_are_read_line_by_line() -> None:
    assert parse_lora_lines("") == []
    assert parse_lora_lines(" a.safetensors:0.5 \n\nb.safetensors") == [
        (Path("a.safetensors"), 0.5),
        (Path("b.safetensors"), 1.0),
    ]


@pytest.mark.parametrize("read", [parse_lora, parse_lora_lines])
def test_a_weight_that_is_no_number_is_refused(read: object) -> None:
    assert callable(read)
    with pytest.raises(OptionError, match="'much' is no LoRA weight"):
        read("a.safetensors:much")
