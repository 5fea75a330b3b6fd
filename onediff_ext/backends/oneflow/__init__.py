"""OneFlow, OneDiff's own compiler: Python 3.10 and NVIDIA GPUs of 2016 to 2022 (docs/oneflow.md)."""
