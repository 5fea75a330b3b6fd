"""How much of a UNet one OneFlow graph should hold: whole UNets against blocks, on a CPU.

  python -m benchmarks.oneflow_regions [--json FILE]     needs onediff-ext[oneflow]

Both run the same small UNet at the same size. "Whole" is one graph that holds the weights;
"blocks" is one graph for each kind of block, which takes them, with the rest in torch. Times
are processor seconds, since other work on the machine moves those least.

"weights" is about blocks of usual width: what it costs that a graph takes its weights as inputs,
which are shared with torch (`crossing_s`) and then copied by OneFlow (`copy_s`, the same copy by
torch), as against the whole call (`call_s`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.fingerprint import fingerprint
from onediff_ext.backends.oneflow import tensor_exchange
from onediff_ext.backends.oneflow.availability import process_reason
from onediff_ext.backends.oneflow.operator_table import TABLE
from onediff_ext.backends.oneflow.program import FlowProgram
from onediff_ext.backends.oneflow.static_graphs import Plans
from onediff_ext.engine.blocks.block_tree import BlockTree
from onediff_ext.engine.export.exporter import export_block
from onediff_ext.hosts.diffusers.blocks import ResnetFamily, TransformerFamily
from tests.support import models

CASES = (("sd15", 16), ("sd15", 32))
REPEATS = 5
CPU = torch.device("cpu")


def main() -> None:
    """Measure each case and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    problem = process_reason()
    if problem is not None:
        parser.error(problem)
    import oneflow

    with torch.no_grad():
        rows = [_measure(oneflow, name, size) for name, size in CASES]
        weights = [_weights(oneflow, *block) for block in _wide_blocks()]
    result = {
        "machine": fingerprint(CPU),
        "python": platform.python_version(),
        "oneflow": oneflow.__version__,
        "unit": "processor seconds",
        "load_average": os.getloadavg()[0],
        "cases": rows,
        "weights": weights,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")


def _measure(flow: Any, name: str, size: int) -> dict[str, Any]:
    unet = models.BUILDERS[name]().unet
    inputs = models.unet_inputs(unet, 2, size, size)
    expected = unet(**inputs).sample
    row = {"model": name, "latent": size, "torch_s": _best(lambda: unet(**inputs))}
    row |= {f"whole_{k}": v for k, v in _whole(flow, unet, inputs, expected).items()}
    row |= {f"blocks_{k}": v for k, v in _blocks(flow, unet, inputs, expected).items()}
    return row


def _best(run: Callable[[], object]) -> float:
    return round(min(_seconds(run) for _ in range(REPEATS)), 5)


def _seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def _whole(flow: Any, unet: Any, inputs: dict[str, Any], expected: torch.Tensor) -> dict[str, Any]:
    names = [name for name, _ in unet.named_parameters()]
    weights = [weight.detach() for weight in unet.parameters()]
    order = ("sample", "timestep", "encoder_hidden_states")
    added = inputs.get("added_cond_kwargs", {})
    tensors = [*(inputs[name].float() for name in order), *added.values()]

    class Whole(torch.nn.Module):
        def forward(self, weights: list[torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
            more = dict(zip(added, tensors[3:], strict=True))
            named = {"added_cond_kwargs": more or None, "return_dict": False}
            held = dict(zip(names, weights, strict=True))
            return torch.func.functional_call(unet, held, tensors[:3], named)[0]

    exported = torch.export.export(Whole(), (weights, *tensors), strict=False)
    program = FlowProgram(exported.run_decompositions({}).graph_module)
    crossed = [tensor_exchange.to_flow(flow, tensor) for tensor in (*weights, *tensors)]

    class Holder(flow.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for i, weight in enumerate(crossed[: len(weights)]):
                setattr(self, f"w{i}", flow.nn.Parameter(weight, requires_grad=False))

        def forward(self, *tensors: Any) -> Any:
            held = [getattr(self, f"w{i}") for i in range(len(weights))]
            return program.run(flow, [*held, *tensors])

    class Graph(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.holder = Holder()

        def build(self, *tensors: Any) -> Any:
            return self.holder(*tensors)

    graph = Graph()

    def run() -> torch.Tensor:
        given = [tensor_exchange.to_flow(flow, tensor) for tensor in tensors]
        return tensor_exchange.to_torch(flow, graph(*given))

    plan_s = _seconds(run)
    return {"plan_s": round(plan_s, 2), "step_s": _best(run), "error": _error(run(), expected)}


def _blocks(flow: Any, unet: Any, inputs: dict[str, Any], expected: torch.Tensor) -> dict[str, Any]:
    plans = Plans(flow)
    programs: dict[str, tuple[FlowProgram, float]] = {}
    families = (ResnetFamily(), TransformerFamily())
    for module in list(unet.modules()):
        for family in families:
            if type(module) is family.block_class():
                module.forward = _replaced(plans, programs, module, family)
    unet(**inputs)  # exports, plans
    # Export apart, as for the whole UNet.
    plan_s = round(sum(seconds for _, seconds in programs.values()), 2)
    step_s = _best(lambda: unet(**inputs))
    error = _error(unet(**inputs).sample, expected)
    return {"plan_s": plan_s, "step_s": step_s, "error": error, "graphs": len(plans)}


def _replaced(
    plans: Plans, programs: dict[str, tuple[FlowProgram, float]], block: Any, family: Any
) -> Any:
    tree = BlockTree(block, family.sources)
    weights = tree.weights() or []

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        call = family.bind(block, args, kwargs)
        key = repr((sorted(tree.entries.items()), [t.shape for t in call.tensors], call.statics))
        if key not in programs:
            exported = export_block(tree.copy(), family, tree.names, weights, call, CPU)
            program = FlowProgram(exported.run_decompositions({}).graph_module)
            seconds = _seconds(lambda: plans.run(program, [*weights, *call.tensors]))
            programs[key] = (program, seconds)
        return plans.run(programs[key][0], [*weights, *call.tensors])

    return forward


def _wide_blocks() -> list[tuple[str, Any, Any, tuple[Any, ...]]]:
    """Blocks of SD1.5's second level at 512x512, with CFG: name, family, block, inputs."""
    from diffusers.models.attention import BasicTransformerBlock
    from diffusers.models.resnet import ResnetBlock2D

    resnet = ResnetBlock2D(in_channels=640, out_channels=640, temb_channels=1280)
    transformer = BasicTransformerBlock(640, 8, 80, cross_attention_dim=768)
    images, time_embedding = torch.randn(2, 640, 32, 32), torch.randn(2, 1280)
    tokens, text = torch.randn(2, 1024, 640), torch.randn(2, 77, 768)
    return [
        ("resnet 640", ResnetFamily(), resnet.eval(), (images, time_embedding)),
        ("transformer 640", TransformerFamily(), transformer.eval(), (tokens, None, text)),
    ]


def _weights(
    flow: Any, name: str, family: Any, block: Any, inputs: tuple[Any, ...]
) -> dict[str, Any]:
    tree = BlockTree(block.requires_grad_(False), family.sources)
    weights, call = tree.weights() or [], family.bind(block, inputs, {})
    exported = export_block(tree.copy(), family, tree.names, weights, call, CPU)
    program = FlowProgram(exported.run_decompositions({}).graph_module)
    plans, arguments = Plans(flow), [*weights, *call.tensors]
    error = _error(plans.run(program, arguments), block(*inputs))
    copies = [torch.empty_like(weight) for weight in weights]
    return {
        "block": name,
        "weights_mib": round(sum(w.numel() * w.element_size() for w in weights) / 2**20, 1),
        "call_s": _best(lambda: plans.run(program, arguments)),
        "crossing_s": _best(
            lambda: [tensor_exchange.to_flow(flow, tensor) for tensor in arguments]
        ),
        "copy_s": _best(lambda: [a.copy_(b) for a, b in zip(copies, weights, strict=True)]),
        "torch_s": _best(lambda: block(*inputs)),
        "error": error,
    }


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(f"{(found - expected).abs().max().item():.1e}")


if __name__ == "__main__":
    # Only whole UNets have these two.
    TABLE["aten.arange.start"] = lambda flow, a, b, dtype=None, **_: flow.arange(  # type: ignore[index]
        a, b, dtype=getattr(flow, str(dtype).removeprefix("torch."))
    )
    main()
