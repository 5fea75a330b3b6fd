"""Messages that reach the panel in English; see `messages`.

They are of the store, the VAE, DeepCache and guidance steps.
"""

from __future__ import annotations

# What Verify says of a file, and what an import or a write raises.
_STORE = (
    "the file does not start like a graph",
    "the schema number is damaged",
    "written by another version (schema {schema}; this one reads {own})",
    "the file is cut short",
    "the header is cut short",
    "the header's hash differs",
    "the header names another schema",
    "the header cannot be read: {why}",
    "the file has {n} bytes, not {expected}",
    "the payload's hash differs",
    "it is not a regular file of a graph's size",
    "the file holds the graph of another kind",
    "the file belongs to {owner}",
    "the file may be written by {writers}",
    "unreadable ({why})",
    "damaged",
    "damaged; it is written again with the next graph",
    "kept apart while schema.json was damaged",
    "{name} is not a record: {why}",
    "{path} is {kind}, not a file.",
    "Name another file.",
    "Name a file.",
    "Name another.",
    "{path} is larger than a file of its kind may be ({size}).",
    "{path} is no name of a file.",
    "{path} takes too long to read.",
    "Copy it to a faster disk.",
    "{path} is a link that leads to no file.",
    "Name the file itself.",
    "it takes too long to read",
    "{name} holds a graph twice.",
    "{name} holds a graph of a size that none has.",
    "{name} holds {n} bytes of graphs, the store may have {most}.",
    "Raise the store's size limit in the settings.",
    "{name} holds {what}, which is no graph.",
    "{name} is packed in a way we do not use.",
    "{name} is not a sound archive: {why}.",
    "{name} holds the graph of another kind.",
    "{name} is damaged: {why}.",
    "{name} was {why}.",
    "Export it again on the machine that it comes from.",
    "Use the version that wrote it; this one builds its own.",
    "{path} cannot be read ({why}).",
    "Check the file's name.",
    "Graph {name} cannot be read ({why}).",
    "`onediff-ext graphs list` shows what is stored.",
    "{folder} belongs to {owner}.",
    "{folder} may be written by {writers}.",
    "If you trust what is in it, run `sudo chown -R {user} '{folder}'` or set {variable} to "
    "the store's folder; else set {root} to another one.",
    "Run `chmod go-w '{folder}'` as its owner. On a disk that keeps no permissions, set "
    "{root} to another folder, or {variable} to this store's.",
    "{path} could not be written ({why}).",
    "Check the folder and its disk, or set {root} to another folder.",
    "There is no space left in {folder}.",
    "Free some disk space, or shrink the store with `onediff-ext graphs prune`.",
    "{path} cannot be written ({why}).",
    "Make the folder writable, or set {root} to one that is.",
    "Another process has held the lock {name} for over {n} s.",
    "Wait for the other WebUI or command to finish, or end it.",
    "{path} has been locked for over {n} s.",
    "End the process that holds it, probably a stopped WebUI.",
    "The disk of {folder} does not support locks.",
    "Set {root} to a folder on a local disk.",
)
# Why DeepCache is off, or cannot be.
_DEEPCACHE = (
    "DeepCache gains nothing with {name}: its few steps differ too much",
    "DeepCache needs {least} steps or more; {n} differ too much",
    "DeepCache is off: {why}",
    "an extension draws the picture in parts",
    "another extension runs the {name} itself",
    "{name} calls the UNet in its own way",
    "A DeepCache depth of {n} leaves nothing of this UNet out.",
    "Choose 0 to {most}.",
    "DeepCache cannot work from {start} to {end} of the steps.",
    "Choose two numbers from 0 to 1, the smaller first.",
    "Unknown DeepCache schedule {name}.",
    "A centre of {n} cannot be used.",
    "Choose 0 to 1.",
    "A power of {n} cannot be used.",
    "Choose 1 to 4.",
    "A DeepCache {name} of {value} cannot be used.",
    "DeepCache does not know the blocks of this {name}.",
    "It works with the UNets of SD 1.x, SD 2.x and SDXL.",
    "Use a number.",
    "That is too large for a DeepCache interval.",
)
# What guidance steps did, and why they cannot be used.
_GUIDANCE = (
    "There are no guidance steps {value}.",
    "{value} says nothing of guidance steps.",
    "Use off, interval:0-0.6 (shares of a picture's steps) or adaptive:0.991.",
    "Guidance cannot be computed from {start} to {end} of the steps.",
    "Choose two numbers from 0 to 1, the smaller first, such as interval:0-0.6.",
    "Guidance cannot end at a similarity of {n}.",
    "Choose a number above 0 and up to 1, such as adaptive:0.991.",
    "Guidance in all steps: {why}",
    "Guidance left out in {n} of {needed} UNet calls",
    "the batch is not one prompt and one negative prompt for each picture",
    "prompt and negative prompt draw different latents",
    "an extension changes the UNet's blocks, and may tell both prompts apart",
    "an argument may have other rows: {name}",
    "the sampler does not say how many steps there are",
    "the UNet is called several times for one prediction",
    "the UNet is not among the components",
    "the batch cannot be split: one picture without guidance, or other arguments",
)
# Why another precision is used.
_PRECISION = (
    "{precision} is for GPUs",
    "{precision} needs compute capability {needed}, this GPU has {have}",
)
# What fits into a small GPU (core/gpu_advice.py).
_GPU = (
    "{n} GB of GPU memory: {advice}. CUDA graphs take up to {most} GB of what is free.",
    "SD1.5 fits whole; SDXL fits with --medvram-sdxl in A1111, with Forge's and Neo's own "
    "memory management, and with enable_model_cpu_offload() in diffusers",
    "SD1.5 fits whole; SDXL needs Forge or Neo, which keep a part of it in main memory",
    "SD1.5 fits with --medvram in A1111, and whole in Forge and Neo; SDXL needs Forge or "
    "Neo, which keep a part of it in main memory",
    "SD1.5 needs --lowvram in A1111, or Forge or Neo",
)
# How the VAE ran.
_VAE = (
    "VAE encoded in tiles: {why}",
    "VAE decoded in tiles: {why}",
    "VAE encoded in {dtype}: {why}",
    "VAE decoded in {dtype}: {why}",
    "it ran out of memory otherwise",
    "it overflows in fp16",
    "{free} free, {needed} needed",
    "The UNet or transformer overflowed (NaN) in {dtype}, so there is nothing to decode.",
    "The VAE overflowed (NaN) in {dtype} when it read the input picture.",
    "The VAE overflowed (NaN) in {dtype}, so there is no picture.",
    "Use another VAE (--vae), or another checkpoint.",
)
ENGINE_MESSAGES = (*_STORE, *_DEEPCACHE, *_GUIDANCE, *_PRECISION, *_GPU, *_VAE)
