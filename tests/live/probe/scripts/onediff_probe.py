"""An extension for the WebUI under test: looks at the model's attributes, breaks jobs, and
changes layers as other extensions do.

It belongs to `tests/live` and knows nothing of the extension that is tested. See
`tests/live/README.md` for how it gets into the WebUI.
"""

import gc

from modules import script_callbacks, scripts, shared


class ProbeError(RuntimeError):
    """Raised on purpose in the middle of a forward."""


class Probe(scripts.Script):
    """Always on. Its arguments: the forward of the UNet (from 1) that raises, or 0; and what is
    changed for the length of the job, one of `CHANGES`, when sampling begins."""

    undo = staticmethod(lambda: None)

    def title(self):
        return "OneDiff probe"

    def show(self, is_img2img):
        return scripts.AlwaysVisible

    def ui(self, is_img2img):
        import gradio as gr

        return [
            gr.Number(value=0, label="Forward that raises", visible=False),
            gr.Textbox(value="", label="What is changed", visible=False),
        ]

    def process_before_every_sampling(self, p, forward=0, change="", *_, **__):
        if change:
            self.undo()
            self.undo = CHANGES[change]()

    def postprocess(self, p, processed, forward=0, change="", *_):
        self.undo()
        self.undo = lambda: None

    def process(self, p, forward=0, *_):
        if not forward:
            return
        left = [int(forward)]

        def count(*_):
            left[0] -= 1
            if left[0] == 0:
                handle.remove()
                raise ProbeError("raised by the probe")

        handle = unet().time_embed.register_forward_hook(count)


def change_layer():
    """One layer's own forward is replaced, as LyCORIS' own extension did."""
    layer = next(m for n, m in unet().named_modules() if n.endswith("attn1.to_q"))
    own = layer.forward
    layer.forward = lambda x: 10 * own(x)

    def undo():
        del layer.forward

    return undo


def change_hook():
    """A layer gets a forward hook."""
    layer = next(m for n, m in unet().named_modules() if n.endswith("in_layers.2"))
    return layer.register_forward_hook(lambda layer, args, output: 2 * output).remove


def change_class(cls, method):
    """A method of a class is replaced, for all layers or blocks."""
    own = vars(cls)[method]

    def changed(*args, **kwargs):
        return 1.5 * own(*args, **kwargs)

    setattr(cls, method, changed)
    return lambda: setattr(cls, method, own)


def change_linears():
    """All linear layers, by the class that the host has for them."""
    layer = next(m for n, m in unet().named_modules() if n.endswith("attn1.to_q"))
    return change_class(type(layer), "forward")


def change_blocks():
    """All transformer blocks, by what their class calls first."""
    block = next(m for m in unet().modules() if type(m).__name__ == "BasicTransformerBlock")
    return change_class(type(block), "forward")


def change_feed_forwards():
    """A class within the transformer blocks."""
    layer = next(m for m in unet().modules() if type(m).__name__ == "GEGLU")
    return change_class(type(layer), "forward")


CHANGES = {
    "layer": change_layer,
    "hook": change_hook,
    "all linears": change_linears,
    "all blocks": change_blocks,
    "all feed-forwards": change_feed_forwards,
}


def unet():
    """The UNet of any of the hosts."""
    objects = getattr(shared.sd_model, "forge_objects", None)
    if objects is not None:
        return objects.unet.model.diffusion_model
    return shared.sd_model.model.diffusion_model


def vae():
    objects = getattr(shared.sd_model, "forge_objects", None)
    return objects.vae.first_stage_model if objects else shared.sd_model.first_stage_model


def attributes():
    """Everything that a patch could change: instance attributes, hooks and classes' methods."""
    found, classes = {}, {}
    for part, model in (("unet", unet()), ("vae", vae())):
        for name, module in model.named_modules():
            cls = type(module)
            classes[f"{cls.__module__}.{cls.__qualname__}"] = [
                str(id(vars(cls).get(method))) for method in ("forward", "_forward", "__call__")
            ]
            own = vars(module)
            found[f"{part}.{name}"] = [
                f"{cls.__module__}.{cls.__qualname__}",
                sorted(own),
                [str(id(own[key])) for key in ("forward", "_forward") if key in own],
                [len(module._forward_hooks), len(module._forward_pre_hooks)],
                [type(own[key]).__module__ for key in ("forward", "_forward") if key in own],
            ]
    return {"modules": found, "classes": classes}


WATCH = {"is on": False, "most": 0}


def features():
    """Memory of the features that the tested extension keeps just now, in bytes: of all, of those
    that no CUDA graph reads, and the most that a watch has seen, which ends."""
    WATCH["is on"] = False
    gc.collect()  # the traceback of an error holds what its frames held, until then
    return {**feature_sizes(), "most": WATCH["most"]}


def watch_features():
    """Look at them at each step from now on, in the thread that draws.

    While another thread collects garbage, Forge Neo changes the list of loaded models that a job
    runs through (`weakref.finalize(model, cleanup_models)`).
    """
    gc.collect()
    WATCH.update({"is on": True, "most": 0})
    return feature_sizes()


def note_features(_):
    if WATCH["is on"]:
        WATCH["most"] = max(WATCH["most"], feature_sizes()["all"])


def feature_sizes():
    objects = gc.get_objects()
    found = [one for one in objects if type(one).__name__ == "Feature"]
    graphs = [one for one in objects if type(one).__name__ == "CapturedGraph"]
    read = {id(kept) for graph in graphs for kept in graph.keeps}
    sizes = [(one.size_bytes, id(one) in read) for one in found]
    return {
        "all": sum(size for size, _ in sizes),
        "free": sum(size for size, is_read in sizes if not is_read),
    }


def add_routes(_, app):
    app.add_api_route("/onediff-probe/attributes", attributes, methods=["GET"])
    app.add_api_route("/onediff-probe/features", features, methods=["GET"])
    app.add_api_route("/onediff-probe/watch-features", watch_features, methods=["POST"])
    app.add_api_route("/onediff-probe/functions", functions, methods=["GET"])
    app.add_api_route("/onediff-probe/conditions", conditions, methods=["GET"])
    app.add_api_route("/onediff-probe/remove-hypertile", remove_hypertile, methods=["POST"])
    app.add_api_route("/onediff-probe/stream-layers", stream_layers, methods=["POST"])
    app.add_api_route("/onediff-probe/reload", reload_ui, methods=["POST"])


def remove_hypertile():
    """A1111's HyperTile leaves its wrappers on layers when it is off."""
    for model in (unet(), vae(), getattr(shared.sd_model, "model", unet())):
        vars(model).pop("__webui_hypertile_layers", None)
        for module in model.modules():
            if vars(module).pop("__webui_hypertile_params", None) is not None:
                vars(module).pop("forward", None)
    return {}


def reload_ui():
    """Do the same as the button "Reload UI"."""
    shared.state.request_restart()
    return {}


def stream_layers(megabytes: int = 0):
    """Neo and reForge leave all but so many megabytes of a model to be streamed; 0 as usual."""
    try:
        from backend import memory_management
        from backend.patcher.base import ModelPatcher
    except ImportError:
        from ldm_patched.modules import model_management as memory_management
        from ldm_patched.modules.model_patcher import ModelPatcher

    own = vars(ModelPatcher)["load"]
    own = getattr(own, "__wrapped__", own)

    def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, **_):
        return own(self, device_to, megabytes * 2**20, force_patch_weights)

    load.__wrapped__ = own
    ModelPatcher.load = load if megabytes else own
    memory_management.unload_all_models()
    return {}


def functions():
    """How many of the UNet's layers apply functions to their weights at each call."""
    return sum(bool(vars(module).get("weight_function")) for module in unet().modules())


CALLS = []


def conditions():
    """How many calls of the model had so many conditions, since this was asked last: 2 where
    prompt and negative prompt go together, 1 where each goes alone. None where nobody counts:
    only Forge and Neo decide it by the free memory.
    """
    try:
        from backend.sampling import sampling_function
    except ImportError:
        return None
    own = sampling_function.compute_cond_mark
    if not hasattr(own, "__wrapped__"):

        def counted(cond_or_uncond, sigmas):
            CALLS.append(len(cond_or_uncond))
            return own(cond_or_uncond=cond_or_uncond, sigmas=sigmas)

        counted.__wrapped__ = own
        sampling_function.compute_cond_mark = counted
    counts = {str(count): CALLS.count(count) for count in sorted(set(CALLS))}
    CALLS.clear()
    return counts


script_callbacks.on_app_started(add_routes)
script_callbacks.on_cfg_denoiser(note_features)
