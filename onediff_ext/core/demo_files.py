"""Paths of the demo checkpoint and the sample photographs that ship with the package."""

from __future__ import annotations

from pathlib import Path

_ASSETS = Path(__file__).resolve().parents[1] / "assets"

DEMO_MODEL = _ASSETS / "demo" / "onediff-demo.safetensors"
DEMO_PHOTOS = _ASSETS / "photos"
