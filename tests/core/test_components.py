"""Components: their roles, and the names that people read."""

from __future__ import annotations

import pytest

from onediff_ext.core.components import ComponentId, Role
from onediff_ext.core.options import COMPONENTS, parse_ignores


@pytest.mark.parametrize(
    ("identity", "text"),
    [
        (ComponentId(Role.UNET), "unet"),
        (ComponentId(Role.VAE_DECODER), "vae_decoder"),
        (ComponentId(Role.CONTROLNET), "controlnet"),
        (ComponentId(Role.CONTROLNET, 1), "controlnet 2"),
    ],
)
def test_the_first_of_a_role_has_no_number(identity: ComponentId, text: str) -> None:
    assert str(identity) == text


def test_options_name_all_roles() -> None:
    assert set(COMPONENTS) == {role.value for role in Role} | {"vae"}
    assert {role for role in Role if role in parse_ignores("vae")} == {
        role for role in Role if role.is_vae
    }
