"""Triton kernels for what Inductor is clearly behind at, and where they go into a graph.

`python -m benchmarks.kernels` compares them with Inductor's own code. Importing a module of
this package needs Triton; nothing but the inductor backend does, on CUDA devices.
"""
