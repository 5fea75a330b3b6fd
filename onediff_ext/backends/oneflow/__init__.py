"""OneFlow, OneDiff's own compiler: for Python 3.10 and GPUs of 2016 to 2022 (docs/oneflow.md)."""
