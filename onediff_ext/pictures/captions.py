"""A picture's own prompt: a text file of its name beside it, as training sets have them."""

from __future__ import annotations

from pathlib import Path

from onediff_ext.core.errors import PictureError

SUFFIX = ".txt"


def read_caption(picture: Path) -> str | None:
    """Return the text of ``cat.txt`` for ``cat.jpg`` as one line; None when there is no file.

    Raises:
        PictureError: The file cannot be read as text.
    """
    path = picture.with_suffix(SUFFIX)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as exc:
        raise PictureError(
            f"The caption {path} cannot be read.", "Save it as UTF-8 text, or leave --captions out."
        ) from exc
    return " ".join(text.split()) or None


def is_caption(path: Path, names: set[str]) -> bool:
    """Whether a file of a folder is the caption of another one of its `names`."""
    if path.suffix.lower() != SUFFIX:
        return False
    return any(name != path.name and Path(name).stem == path.stem for name in names)
