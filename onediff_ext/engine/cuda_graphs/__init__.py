"""CUDA graphs: a model's whole forward of one shape, recorded once and replayed.

`captured_forward` replaces a model's forward, and `captured_parts` those of its parts.
`forward_call` reads the arguments of a call, `recording_policy` decides which sizes are recorded,
`forward_recorder` records them, and `replay_checks` compares replays with eager. `model_tracker`
and `staleness` see whether the model has changed since. `cache` holds the CUDA graphs of a session
and evicts them, `static_buffers` has their inputs and outputs, and `text_kv_graph` the keys and
values that all sizes share. `recorder` is the port to `torch.cuda.graph`. `oom_fallback` decides
what is given up when memory runs out.
"""
