"""The code of a graph runs on another GPU than the one that it was built for."""

from __future__ import annotations

from onediff_ext.backends.inductor.device_index import for_device


def test_the_code_of_a_graph_names_another_gpu() -> None:
    source = (
        "with torch.cuda._DeviceGuard(0):\n    torch.cuda.set_device(0)\n"
        "    stream0 = get_raw_stream(0)\n    x = y.to(device(type='cuda', index=0))\n"
        "kernel = async_compile.triton('k', 'device=DeviceProperties(type=\\'cuda\\', index=0)')\n"
    )
    moved = for_device(source, 3)
    assert "_DeviceGuard(3)" in moved
    assert "set_device(3)" in moved
    assert "get_raw_stream(3)" in moved
    assert "device(type='cuda', index=3)" in moved
    assert moved.splitlines()[-1] == source.splitlines()[-1]  # what names the kernel in caches
    assert for_device(moved, 0) == source
