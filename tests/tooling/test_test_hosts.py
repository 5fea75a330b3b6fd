"""The script that makes test hosts of WebUIs, as far as it goes without a WebUI."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel, SD3Transformer2DModel
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers
from safetensors.torch import load_file

from tests.support import live_files as files
from tests.support import models
from tools.hosts.__main__ import live_environment, main
from tools.hosts.checkout import (
    CheckoutError,
    add_extensions,
    add_models,
    fit_to_slim_models,
    version_note,
)
from tools.hosts.forms import SD35_LARGE, SD35_MEDIUM, VAE_WIDTHS, SD3Form
from tools.hosts.models import to_ldm_controlnet, vae, write_demo_models
from tools.hosts.neo_forms import QWEN25, QWEN_IMAGE, WAN_VAE_WIDTH
from tools.hosts.packages import requirements
from tools.hosts.qwen_models import write_qwen_image
from tools.hosts.sd3_models import transformer
from tools.hosts.taesd_models import write_taesd
from tools.hosts.wan_vae_models import wan_vae
from tools.hosts.webuis import WEBUIS, WebUI

PORTS = [webui.port for webui in WEBUIS.values()]
SMALL = WebUI(
    title="Small",
    commit="0" * 40,
    port=1,
    requirements="requirements.txt",
    packages=(),
    flags=(),
    slim_configs={"vae/config.json": {"block_out_channels": list(VAE_WIDTHS)}},
    slim_sources={
        "sd.py": (("'ch': 128,", "'ch': 32,"),),
        "repositories/guess/sizes.py": (("= 19", "= 2"), ("= 3072", "= 256")),
    },
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A WebUI with one config file and one Python file that know the VAE's width."""
    (tmp_path / "vae").mkdir()
    config = {"block_out_channels": [128, 256, 512, 512], "in_channels": 3}
    (tmp_path / "vae" / "config.json").write_text(json.dumps(config))
    (tmp_path / "sd.py").write_text("config = {'ch': 128, 'z': 4}\n")
    return tmp_path


def test_each_host_has_an_address_of_its_own() -> None:
    assert len(set(PORTS)) == len(PORTS)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("Pillow==9.5.0", ["Pillow==9.5.0"]),
        (
            "audioop-lts==0.2.2;python_version>='3.13'",
            ["audioop-lts==0.2.2;python_version>='3.13'"],
        ),
        ("https://example.org/a/pydantic_fix-1.10.15-py3-none-any.whl", ["pydantic_fix==1.10.15"]),
        ("torch", []),
        ("torchsde==0.2.6", ["torchsde==0.2.6"]),
        ("setuptools==69.5.1  # for old packages", []),
        ("# a comment", []),
        ("", []),
    ],
)
def test_a_list_of_packages(line: str, wanted: list[str]) -> None:
    assert list(requirements([line])) == wanted


def test_configs_fit_the_slim_models_and_stay_so(checkout: Path) -> None:
    for _ in range(2):
        fit_to_slim_models(SMALL, checkout)
        config = json.loads((checkout / "vae" / "config.json").read_text())
        assert config == {"block_out_channels": list(VAE_WIDTHS), "in_channels": 3}
        assert (checkout / "sd.py").read_text() == "config = {'ch': 32, 'z': 4}\n"


def test_a_file_that_is_missing_is_copied_and_one_that_is_there_stays(checkout: Path) -> None:
    webui = dataclasses.replace(SMALL, copies={"vae/copy.json": "vae/config.json"})
    fit_to_slim_models(webui, checkout)
    copy = checkout / "vae" / "copy.json"
    assert copy.read_bytes() == (checkout / "vae" / "config.json").read_bytes()
    copy.write_text("the host's own")
    fit_to_slim_models(webui, checkout)
    assert copy.read_text() == "the host's own"


def test_what_the_launcher_fetches_fits_once_it_is_there(checkout: Path) -> None:
    fit_to_slim_models(SMALL, checkout)
    fetched = checkout / "repositories" / "guess"
    fetched.mkdir(parents=True)
    with pytest.raises(CheckoutError, match=r"sizes\.py does not exist"):
        fit_to_slim_models(SMALL, checkout)
    (fetched / "sizes.py").write_text("depth = 19\nwidth = 3072\n")
    for _ in range(2):
        fit_to_slim_models(SMALL, checkout)
        assert (fetched / "sizes.py").read_text() == "depth = 2\nwidth = 256\n"


def test_a_file_of_another_version_is_named(checkout: Path) -> None:
    (checkout / "sd.py").write_text("config = {'ch': 64}\n")
    with pytest.raises(CheckoutError, match=r"sd\.py has no \"'ch': 128,\""):
        fit_to_slim_models(SMALL, checkout)
    (checkout / "sd.py").unlink()
    with pytest.raises(CheckoutError, match=r"Is .* a checkout of Small"):
        fit_to_slim_models(SMALL, checkout)


def test_a_picture_of_one_colour_passes_the_slim_vaes_norms() -> None:
    norms = [m for m in vae(0).modules() if isinstance(m, torch.nn.GroupNorm)]
    assert norms
    assert all(norm.num_channels // norm.num_groups > 1 for norm in norms)


def test_extensions_are_links_that_a_second_run_renews(checkout: Path, tmp_path: Path) -> None:
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        add_extensions(checkout, folder)
        assert (checkout / "extensions" / "onediff-ext").resolve() == folder
    assert (checkout / "extensions" / "onediff-probe" / "scripts").is_dir()


def test_models_are_linked_and_the_hosts_own_stay(checkout: Path, tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        path = tmp_path / "slim" / "Lora" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    own = checkout / "models" / "Lora" / "b.safetensors"
    own.parent.mkdir(parents=True)
    own.write_text("the host's own")
    add_models(checkout, tmp_path / "slim")
    assert (own.parent / "a.safetensors").read_text() == "a.safetensors"
    assert own.read_text() == "the host's own"


def test_the_demos_yaml_files_survive_a_move_of_the_repository(checkout: Path) -> None:
    add_extensions(checkout)
    write_demo_models(checkout / "models")
    yamls = list((checkout / "models").glob("*/*.yaml"))
    assert {path.stem for path in yamls} == {"onediff-demo", "onediff-demo-other", "tiny-xl"}
    for path in yamls:
        # A WebUI reads the path as seen from its own folder.
        named = path.read_text(encoding="utf-8").split("version: ")[1].split()[0]
        assert not Path(named).is_absolute()
        assert (checkout / named / "config.json").is_file()


def test_another_commit_is_said(checkout: Path) -> None:
    assert version_note(SMALL, checkout) == "Small: no commit; the tests were run with 00000000"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("build", "is no checkout of Forge"),
        ("start", "is not built"),
        ("test", "is not built"),
    ],
)
def test_a_folder_that_is_no_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, said: str
) -> None:
    assert main([command, "forge", str(tmp_path)]) == 1
    assert said in capsys.readouterr().err


def test_the_live_tests_are_told_the_address_and_the_checkpoints(tmp_path: Path) -> None:
    slim = live_environment(WEBUIS["forge"], tmp_path)
    assert slim["ONEDIFF_WEBUI_URL"] == "http://127.0.0.1:7861"
    assert slim["ONEDIFF_WEBUI_ROOT"] == str(tmp_path)
    assert slim["ONEDIFF_WEBUI_CHECKPOINTS"] == "slim-a.,slim-b."
    demo = live_environment(WEBUIS["a1111"], tmp_path)
    assert "ONEDIFF_WEBUI_INPAINTING" not in demo  # the demo has no such checkpoint


def test_the_live_tests_are_run_here_with_further_arguments(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_extensions(checkout)
    monkeypatch.setenv("ONEDIFF_WEBUI_URL", "http://127.0.0.1:9")
    seen: list[tuple[list[str], str]] = []

    def run(command: list[str], **how: Any) -> SimpleNamespace:
        seen.append((command, how["env"]["ONEDIFF_WEBUI_URL"]))
        return SimpleNamespace(returncode=5)

    monkeypatch.setattr("tools.hosts.__main__.subprocess.run", run)
    assert main(["test", "forge", str(checkout), "-k", "xyz"]) == 5
    main(["test", "forge", str(checkout), "tests/live/test_page.py::test_batch_tab"])
    (everything, url), (one, _) = seen
    assert everything[-3:] == ["tests/live", "-k", "xyz"]
    assert url == "http://127.0.0.1:9"  # what is set already stays
    assert one[-2:] == ["pytest", "tests/live/test_page.py::test_batch_tab"]


def test_a_tiny_vae_is_no_archive(tmp_path: Path) -> None:
    """A1111 looks through archives, and refuses those of PyTorch 2.13."""
    write_taesd(tmp_path)
    paths = sorted((tmp_path / "VAE-taesd").iterdir())
    assert len(paths) == 6
    for path in paths:
        assert not zipfile.is_zipfile(path)
        assert torch.load(path, weights_only=True)


def test_a_controlnet_in_the_original_layout() -> None:
    unet: Any = dict(models.sd15().components)["unet"]
    weights = files.controlnet(unet)
    renamed = to_ldm_controlnet(weights, unet.config)
    assert len(renamed) == len(weights)
    for theirs, ours in {
        "input_hint_block.0.weight": "controlnet_cond_embedding.conv_in.weight",
        "input_hint_block.2.bias": "controlnet_cond_embedding.blocks.0.bias",
        "input_hint_block.14.weight": "controlnet_cond_embedding.conv_out.weight",
        "zero_convs.0.0.weight": "controlnet_down_blocks.0.weight",
        "middle_block_out.0.bias": "controlnet_mid_block.bias",
        "input_blocks.0.0.weight": "conv_in.weight",
        "time_embed.2.weight": "time_embedding.linear_2.weight",
        "input_blocks.1.0.in_layers.2.weight": "down_blocks.0.resnets.0.conv1.weight",
        "middle_block.2.out_layers.3.weight": "mid_block.resnets.1.conv2.weight",
    }.items():
        assert renamed[f"control_model.{theirs}"] is weights[ours], theirs


def shapes_of(weights: Mapping[str, torch.Tensor], prefix: str = "") -> list[tuple[int, ...]]:
    return sorted(tuple(w.shape) for name, w in weights.items() if name.startswith(prefix))


def test_the_slim_vae_of_qwen_image_has_the_layers_of_diffusers_own() -> None:
    with torch.device("meta"):
        theirs = AutoencoderKLQwenImage(base_dim=WAN_VAE_WIDTH)
    assert shapes_of(wan_vae(0)) == shapes_of(theirs.state_dict())


def test_the_slim_qwen_image_has_the_layers_of_diffusers_own(tmp_path: Path) -> None:
    with torch.device("meta"):
        theirs = QwenImageTransformer2DModel(
            num_layers=QWEN_IMAGE.blocks,
            num_attention_heads=QWEN_IMAGE.heads,
            attention_head_dim=QWEN_IMAGE.width // QWEN_IMAGE.heads,
            joint_attention_dim=QWEN25.width,
        )
    write_qwen_image(tmp_path)
    path = tmp_path / "Stable-diffusion" / "slim-qwen-image.safetensors"
    prefix = "model.diffusion_model."
    assert shapes_of(load_file(str(path)), prefix) == shapes_of(theirs.state_dict())


@pytest.mark.parametrize("form", [SD35_MEDIUM, SD35_LARGE])
def test_the_slim_sd35_has_the_layers_of_diffusers_own(form: SD3Form) -> None:
    with torch.device("meta"):
        theirs = SD3Transformer2DModel(
            num_layers=form.blocks,
            num_attention_heads=form.blocks,
            caption_projection_dim=form.width,
            pos_embed_max_size=form.positions,
            dual_attention_layers=tuple(range(form.dual)),
            qk_norm="rms_norm",
        ).state_dict()
        made = {name: torch.empty(shape) for name, shape in transformer(form)}
        made["pos_embed"] = torch.empty(1, form.positions**2, form.width)
    ours = convert_sd3_transformer_checkpoint_to_diffusers(made)
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}
