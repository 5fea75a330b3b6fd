"""Unusable checkpoint files are refused, each with its own message and a next step."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from onediff_ext.core.errors import CheckpointError
from onediff_ext.hosts.diffusers.checkpoints.ldm_hints import METADATA_KEY, LdmHints, read_hints
from onediff_ext.hosts.diffusers.checkpoints.ldm_saving import save_ldm
from onediff_ext.hosts.diffusers.checkpoints.load import load_checkpoint
from onediff_ext.hosts.diffusers.checkpoints.tensor_file import TensorFile, open_tensor_file
from onediff_ext.hosts.diffusers.lora.lora_file import load_lora
from tests.support import adapter_weights, models


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_ldm(models.sd15(), tmp_path_factory.mktemp("saved") / "model.safetensors")


def refuse(path: Path, message: str, hint: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(path)
    assert hint in caught.value.hint


def test_missing_path(tmp_path: Path) -> None:
    refuse(tmp_path / "none.safetensors", "There is no checkpoint", "nothing is downloaded")


def test_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    refuse(path, "is empty", "Download the file again")


@pytest.mark.parametrize("suffix", [".ckpt", ".pt", ".bin", ".PTH"])
def test_pickle_by_name(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(b"anything")
    refuse(path, "runs whatever code", "--disable-safe-unpickle")


def test_pickle_under_another_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    torch.save({"a": torch.zeros(2)}, path)
    refuse(path, "is a pickle", "convert it to safetensors")


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer", "git lfs pull"),
        (b"\n<!doctype html><html>", "web page", "Download the file itself"),
        (b"GGUF\3\0\0\0" + b"\0" * 64, "GGUF", ".safetensors version"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 64, "not a safetensors file", "Choose"),
        (b"abc", "not a safetensors file", "Choose"),
        (b"\x40" + b"\0" * 7 + b"{" + b"x" * 80, "damaged safetensors header", "Download"),
    ],
)
def test_other_files(content: bytes, message: str, hint: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    refuse(path, message, hint)


@pytest.mark.parametrize("first", [0x80, ord("P"), 0x0A])
def test_a_header_of_any_length_is_a_header(first: int, tmp_path: Path) -> None:
    """The low byte of the length may equal a pickle's first byte."""
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(3)}, str(path), metadata={"pad": "x" * 8})
    content = path.read_bytes()
    header = content[8 : 8 + int.from_bytes(content[:8], "little")].rstrip()
    header += b" " * ((first - len(header)) % 256)
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[-12:])
    assert path.read_bytes()[0] == first
    file = open_tensor_file(path)
    assert dict(file.shapes) == {"w": (3,)}
    assert torch.equal(file.read(["w"])["w"], torch.ones(3))
    path.write_bytes(path.read_bytes()[:-4])
    refuse(path, "cut short", "Download the file again")


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        '{"w": 3}',
        '{"w": {"data_offsets": [0, 4]}}',
        '{"w": {"shape": 1, "data_offsets": [0, 4]}}',
        '{"w": {"shape": ["x"], "data_offsets": [0, 4]}}',
        '{"w": {"shape": [1]}}',
        '{"w": {"shape": [1], "data_offsets": []}}',
        '{"w": {"shape": [1], "data_offsets": [0, null]}}',
        '{"__metadata__": "text"}',
        '{"w": {"shape": [1e999], "data_offsets": [0, 4]}}',
        '{"w": ' + 100_000 * "[",
        '{"__metadata__": {"a": 5}}',
        '{"__metadata__": {"a": ["b"]}}',
        '{"w": {"dtype": "F32", "shape": [99999999999999999999], "data_offsets": [0, 4]}}',
        '{"w": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
        '{"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        '{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
    ],
)
def test_damaged_header(header: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(64))
    started_otherwise = not header.startswith("{")
    message = "not a safetensors file" if started_otherwise else "damaged safetensors header"
    refuse(path, message, "Choose" if started_otherwise else "Download")


@pytest.mark.parametrize("keep", [0.5, 0.001, 0.999_999])
def test_truncated_file(keep: float, saved: Path, tmp_path: Path) -> None:
    content = saved.read_bytes()
    path = tmp_path / "model.safetensors"
    path.write_bytes(content[: int(len(content) * keep)])
    refuse(path, "is cut short", "Download the file again")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
@pytest.mark.parametrize("what", ["pipe", "endless", "loop", "long", "socket"])
def test_what_is_no_file_is_refused_at_once(what: str, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / f"{what}.safetensors"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "endless":
        path.symlink_to("/dev/zero")
    elif what == "loop":
        path.symlink_to(path)
    elif what == "long":
        path = tmp_path / ("x" * 300 + ".safetensors")
    else:
        socket.socket(socket.AF_UNIX).bind(str(path))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert caught.value.hint
    with pytest.raises(CheckpointError):
        load_checkpoint(saved, vae_path=path)
    with pytest.raises(CheckpointError):
        load_lora(models.sd15(), path)


def test_a_yaml_that_is_no_file(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(saved.read_bytes())
    path.with_suffix(".yaml").write_bytes(b"a: b\n" * 2**20)
    refuse(path, "larger than a file of its kind", "move it away")


@pytest.mark.parametrize(
    "hints",
    [
        {"head_count": "four"}, {"head_count": -1}, {"head_count": 10**30}, {"unet_groups": 0.5},
        {"scaling_factor": "x"}, {"scaling_factor": float("nan")}, {"sample_size": []},
        {"prediction_type": 3}, {"text_heads": [1]}, {"text_heads": {"text_encoder": "x"}},
        {"zero_snr": "no"},
    ],
)  # fmt: skip
def test_hints_that_cannot_be_are_passed_over(hints: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    metadata = {METADATA_KEY: json.dumps({"schema": 1, **hints})}
    save_file({"w": torch.zeros(1)}, str(path), metadata=metadata)
    assert read_hints(open_tensor_file(path)) == LdmHints()


def test_shapes_that_make_no_model(saved: Path, tmp_path: Path) -> None:
    tensors = load_file(saved)
    path = tmp_path / "model.safetensors"
    for key in [name for name in tensors if name.endswith((".0.weight", "_embedding.weight"))][:8]:
        for other in (torch.zeros(3), torch.zeros(0, 5), torch.tensor(1.0), torch.zeros(1, 1, 1)):
            save_file({**tensors, key: other}, str(path))
            with pytest.raises(CheckpointError):
                load_checkpoint(path)


def _only(prefix: str) -> Callable[[str], bool]:
    return lambda key: key.startswith(prefix)


def _without(prefix: str) -> Callable[[str], bool]:
    return lambda key: not key.startswith(prefix)


@pytest.mark.parametrize(
    ("keep", "strip", "message", "hint"),
    [
        (_without("cond_stage_model."), "", "no text encoder", "full checkpoint"),
        (_without("first_stage_model."), "", "no VAE", "Give a VAE file"),
        (_only("first_stage_model."), "", "is a VAE", "Choose a checkpoint"),
        (_only("first_stage_model."), "first_stage_model.", "is a VAE", "Choose a checkpoint"),
        (_only("model."), "model.diffusion_model.", "a UNet alone", "full checkpoint"),
        (_only("cond_stage_model."), "", "is a text encoder", "full checkpoint"),
        (_without("model.diffusion_model.out."), "", r"lacks the tensor .*out\.2\.weight", "copy"),
        (_without("model.diffusion_model.time_embed."), "", "4 tensors of the UNet", "copy"),
        (_without("first_stage_model.quant"), "", "2 tensors of the VAE", "copy"),
    ],
)
def test_parts_of_a_checkpoint(
    keep: Callable[[str], bool], strip: str, message: str, hint: str, saved: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {key.removeprefix(strip): one for key, one in load_file(saved).items() if keep(key)}
    save_file(tensors, str(path))
    refuse(path, message, hint)


@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
def test_lora_as_checkpoint(layout: str, tmp_path: Path) -> None:
    path = adapter_weights.save_lora(models.sd15(), tmp_path / "lora.safetensors", layout)
    refuse(path, "is a LoRA, not a checkpoint", "Choose a checkpoint first")


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("control_model.input_hint_block.0.weight", "a ControlNet"),
        ("emb_params", "a textual inversion"),
        ("double_blocks.0.img_attn.qkv.weight", "a Flux model"),
        ("joint_blocks.0.x_block.mlp.fc1.weight", "a Stable Diffusion 3 model"),
        ("something.else", "no Stable Diffusion model"),
    ],
)
def test_other_models(key: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({key: torch.zeros(2)}, str(path))
    refuse(path, f"is {what}, not a checkpoint", "")


def test_unet_of_a_diffusers_folder(tmp_path: Path) -> None:
    models.sd15().unet.save_pretrained(tmp_path)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    refuse(path, "the UNet of a diffusers folder", "model_index.json")


@pytest.mark.parametrize("channels", [5, 8])
def test_other_numbers_of_channels(channels: int, tmp_path: Path) -> None:
    pipe = models.sd15(in_channels=channels)
    path = save_ldm(pipe, tmp_path / "model.safetensors")
    refuse(path, f"takes {channels} channels", "inpainting")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", "not a readable .yaml"),
        ("hello", "does not describe"),
        ("model: {params: {unet_config: {params: {}}, parameterization: x0}}", "does not describe"),
    ],
)
def test_damaged_yaml(content: str, message: str, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(saved.read_bytes())
    path.with_suffix(".yaml").write_text(content)
    refuse(path, message, "move it away")


_REPEATED = "x0: &x0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n" + "".join(
    f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]\n" for n in range(1, 9)
)
_MERGED = "x0: &x0 {a: 1}\n" + "".join(
    f"x{n}: &x{n} {{<<: [{', '.join([f'*x{n - 1}'] * 9)}]}}\n" for n in range(1, 12)
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"{_REPEATED}model: {{params: {{unet_config: {{params: {{}}}}, parameterization: *x8}}}}",
         "aliases are not read"),
        (_MERGED, "aliases are not read"),
        ("[" * 60_000, "nested too deeply"),
        ("- " * 30_000, "nested too deeply"),
    ],
    ids=["repeated lists", "merged mappings", "brackets", "dashes"],
)  # fmt: skip
def test_yaml_that_takes_more_than_its_size(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.with_suffix(".yaml").write_text(content)
    start = time.process_time()
    with pytest.raises(CheckpointError, match=message):
        read_hints(TensorFile(path, {}))
    assert time.process_time() - start < 2


def test_heads_that_do_not_divide(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(saved.read_bytes())
    text = saved.with_suffix(".yaml").read_text()
    path.with_suffix(".yaml").write_text(text.replace("num_heads: 4", "num_heads: 7"))
    refuse(path, "7 attention heads do not divide", ".yaml")


def test_folder_without_index(tmp_path: Path) -> None:
    refuse(tmp_path, "no model_index.json", "top folder")
    (tmp_path / "model.safetensors").touch()
    refuse(tmp_path, "no model_index.json", "Did you mean the file model.safetensors")


def test_folder_with_damaged_index(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{")
    refuse(tmp_path, "is damaged", "Download the folder again")


def test_folder_of_another_model(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
    refuse(tmp_path, "a WanPipeline", "docs/transformers.md")


@pytest.mark.parametrize(
    "component",
    [["evil", "Evil"], ["diffusers", "DiffusionPipeline"], ["os", "system"],
     ["transformers", "AutoModel"], ["unet", "UNet2DConditionModel"], ["diffusers"], []],
)  # fmt: skip
def test_code_of_a_folder_is_not_run(component: list[str], saved: Path, tmp_path: Path) -> None:
    models.sd15().save_pretrained(tmp_path)
    marker = tmp_path / "ran"
    for name in ("evil", "unet"):
        (tmp_path / "unet" / f"{name}.py").write_text(f"open({str(marker)!r}, 'w')")
    index = json.loads((tmp_path / "model_index.json").read_text())
    index["unet"] = component
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    refuse(tmp_path, "no known class of these models", "original folder")
    assert not marker.exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
@pytest.mark.parametrize("name", ["model_index.json", "unet/config.json", "vae/more.bin"])
def test_a_pipe_in_a_folder_is_not_waited_for(name: str, tmp_path: Path) -> None:
    models.sd15().save_pretrained(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    refuse(tmp_path, "is not an ordinary file", "Download the folder again")


def test_incomplete_folder(tmp_path: Path) -> None:
    models.sd15().save_pretrained(tmp_path)
    weights = tmp_path / "unet" / "diffusion_pytorch_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:1000])
    refuse(tmp_path, "is cut short", "Download the file again")
    weights.unlink()
    refuse(tmp_path, "cannot be loaded", "Download the folder again")
    weights.with_suffix(".bin").write_bytes(b"")
    refuse(tmp_path, r"pickled weights \(\.bin\)", "--disable-safe-unpickle")


def test_vae_file_for_a_folder(tmp_path: Path, saved: Path) -> None:
    models.sd15().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="single-file"):
        load_checkpoint(tmp_path, vae_path=saved)
