"""The examples of the documentation work as they are written."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

DOCS = Path(__file__).resolve().parents[2] / "docs"
CPU = torch.device("cpu")


@pytest.fixture
def example(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ModuleType]:
    """The Python code of one page as a module."""
    page: str = request.param
    code = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text("utf-8"), re.S | re.M)
    name = f"example_{Path(page).stem.replace('-', '_')}"
    path = tmp_path / f"{name}.py"
    path.write_text("\n".join(code), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a kind's key has the source of the modules that its classes are of
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.mark.parametrize("example", ["adding-a-block-family.md"], indirect=True)
def test_a_block_family(example: ModuleType, tmp_path: Path) -> None:
    model = example.GatedModel().eval()
    for tokens in (torch.randn(2, 7, 32), torch.randn(1, 50, 32)):
        with torch.no_grad():
            expected = model(tokens)
        output, kinds = example.run_through_graphs(model, tokens, tmp_path / "store")
        torch.testing.assert_close(output, expected)
        assert kinds == [("GatedBlock 32", "ready")]


@pytest.mark.parametrize("example", ["adding-a-backend.md"], indirect=True)
def test_a_backend(example: ModuleType) -> None:
    from diffusers.models.resnet import ResnetBlock2D

    from onediff_ext.core.errors import BackendError
    from onediff_ext.engine.blocks.block_tree import BlockTree
    from onediff_ext.engine.export.exporter import export_block
    from onediff_ext.hosts.diffusers.blocks import ResnetFamily

    block = ResnetBlock2D(in_channels=16, out_channels=24, temb_channels=32, groups=2).eval()
    family, tree = ResnetFamily(), BlockTree(block, ("diffusers.",))
    inputs = (torch.randn(2, 16, 8, 8).to(memory_format=torch.channels_last), torch.randn(2, 32))
    call = family.bind(block, inputs, {})
    program = export_block(tree.copy(), family, tree.names, tree.weights(), call, CPU)
    backend = example.InterpreterBackend()
    graph = backend.load(backend.build(program, CPU), CPU)
    with torch.no_grad():
        (output,) = graph([*tree.weights(), *inputs])
        torch.testing.assert_close(output, block(*inputs))
    with pytest.raises(BackendError):
        backend.load(b"foreign", CPU)


@pytest.mark.parametrize("example", ["adding-a-host.md"], indirect=True)
def test_a_host(example: ModuleType, tmp_path: Path) -> None:
    from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
    from tests.support import models

    ui = example.SmallUI(models.unet(seed=0))
    job = example.Job(ui, 64, 96)
    expected = job.draw()
    before = dict(vars(ui.unet))
    graphs = GraphsForJobs(example.SmallUIHost(ui))
    for _ in range(3):
        torch.testing.assert_close(example.draw(graphs, job, tmp_path / "store"), expected)
        assert vars(ui.unet).keys() == before.keys()
    assert graphs.status().running == "compiled"
    ui.uses_offloading = True
    torch.testing.assert_close(example.draw(graphs, job, tmp_path / "store"), expected)
    assert graphs.status().reasons == ("weights move while drawing",)
    graphs.close()


ROOT = DOCS.parent
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), ROOT / "tests" / "live" / "README.md"])
OF_HOSTS = ("modules/", "scripts/controlnet")
OF_OTHERS = ("schema.json", "model_index.json", "lru_cache.py")  # a store, a model, JAX
NAMES = {path.name for path in ROOT.rglob("*") if ".venv" not in path.parts}
PLACES = [ROOT, ROOT / "onediff_ext", *(p for p in (ROOT / "onediff_ext").rglob("*") if p.is_dir())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """Paths and links; a path may begin at the repository, the package, or one of its folders."""
    text = page.read_text("utf-8")
    paths = set(re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|json|md|safetensors))`", text))
    missing = [
        path
        for path in sorted(paths)
        if not path.startswith(OF_HOSTS) and not any((place / path).exists() for place in PLACES)
    ]
    bare = set(re.findall(r"`([\w-]+\.(?:py|json|md))`", text))
    missing += sorted(name for name in bare if name not in NAMES and name not in OF_OTHERS)
    links = {link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)}
    missing += [
        link
        for link in sorted(links - {""})
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert not missing


def test_tests_that_a_page_names_exist() -> None:
    found = re.findall(r"`([\w/]+\.py)::(\w+)`", (DOCS / "soundness.md").read_text("utf-8"))
    assert len(found) > 40
    missing = [
        f"{path}::{name}"
        for path, name in found
        if f"def {name}(" not in (ROOT / "tests" / path).read_text("utf-8")
    ]
    assert not missing


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's titles."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.S | re.M)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_and_titles_that_a_page_names_exist(page: Path) -> None:
    """What ``python -m`` runs, and the titles that links lead to."""
    text = page.read_text("utf-8")
    places = [
        (ROOT / m.replace(".", "/"), m) for m in re.findall(r"python -m ([a-z_.]*[a-z_])", text)
    ]
    missing = [
        module
        for place, module in places
        if module not in ("pip", "venv")
        and not (place.with_suffix(".py").exists() or (place / "__main__.py").exists())
    ]
    for link in re.findall(r"\]\(([^)\s:]+#[^)\s]+|#[^)\s]+)\)", text):
        name, title = link.split("#")
        if title not in anchors_of(page.parent / name if name else page):
            missing.append(link)
    assert not missing
