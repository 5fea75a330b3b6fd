"""Digests of many tensors on a GPU, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_CHUNK_BYTES = 1 << 18
_THREADS = 256

# Each CUDA block digests one chunk, 4 words of 32 bits at a time. Each word is mixed with its
# index, so that a changed word, two exchanged words and a changed sign all change the sum. Sums
# are exact: there are no atomics.
_SOURCE = """
extern "C" __global__ void digest_chunks(
    const unsigned long long* places, const int* sizes, unsigned long long* digests, int chunks)
{
    int chunk = blockIdx.x;
    if (chunk >= chunks) return;
    const unsigned char* bytes = (const unsigned char*)places[chunk];
    int size = sizes[chunk];
    unsigned long long sum = 0;
    bool aligned = (places[chunk] & 15) == 0;
    int vectors = aligned ? size / 16 : 0;
    const uint4* wide = (const uint4*)bytes;
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
        uint4 v = wide[i];
        unsigned int place = 4u * i * 2654435761u;
        unsigned int words[4] = {v.x, v.y, v.z, v.w};
        for (int j = 0; j < 4; ++j) {
            unsigned long long x = (unsigned long long)(words[j] + place + j * 40503u);
            x *= 0x9E3779B97F4A7C15ull; x ^= x >> 29; x *= 0xBF58476D1CE4E5B9ull; x ^= x >> 32;
            sum += x;
        }
    }
    for (int i = vectors * 16 + threadIdx.x; i < size; i += blockDim.x) {
        unsigned long long x = ((unsigned long long)i << 8) | bytes[i];
        x *= 0x9E3779B97F4A7C15ull; x ^= x >> 29; x *= 0xBF58476D1CE4E5B9ull; x ^= x >> 32;
        sum += x;
    }
    __shared__ unsigned long long sums[256];
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) digests[chunk] = sums[0];
}
"""


class ContentKernel:
    """Digests tensors on one GPU.

    torch compiles the kernel once in a process, with the NVRTC that it ships. Where this torch
    cannot (before 2.9, or ROCm), torch's operators compute the digests, slower.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._kernel = device, _compiled(device)
        # Address and bytes of each tensor, chunks of each, and address and bytes of each chunk.
        self._table: tuple[list[tuple[int, int]], list[int], torch.Tensor, torch.Tensor] | None = (
            None
        )

    def digests(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
        """Return int64 digests on the GPU, equal for equal contents, and how many each tensor has.

        The tensors of an image are those of the image before it, mostly. Then this takes Python
        two calls for each tensor, and one launch.

        Args:
            tensors: Contiguous.

        Returns:
            [chunks of all tensors], without the kernel [tensors]; and their number by tensor.
        """
        if self._kernel is None:
            found = [_digest_by_operators(tensor) for tensor in tensors]
            stacked = torch.stack(found) if found else torch.empty(0, device=self._device)
            return stacked, [1] * len(found)
        forms = [(t.data_ptr(), t.nbytes) for t in tensors]
        if self._table is None or self._table[0] != forms:
            chunks = [
                (place + start, min(_CHUNK_BYTES, size - start))
                for place, size in forms
                for start in range(0, size, _CHUNK_BYTES)
            ]
            places = torch.tensor([p for p, _ in chunks], dtype=torch.int64, device=self._device)
            sizes = torch.tensor([s for _, s in chunks], dtype=torch.int32, device=self._device)
            counts = [-(-size // _CHUNK_BYTES) for _, size in forms]
            self._table = (forms, counts, places, sizes)
        _, counts, places, sizes = self._table
        digests = torch.empty_like(places)
        if len(places):
            with torch.cuda.device(self._device):
                self._kernel(
                    grid=(len(places), 1, 1),
                    block=(_THREADS, 1, 1),
                    args=(places, sizes, digests, len(places)),
                )
        return digests, counts


def _compiled(device: torch.device) -> Any:
    compile_kernel = getattr(torch.cuda, "_compile_kernel", None)
    if compile_kernel is None or torch.version.hip is not None:
        return None
    try:
        with torch.cuda.device(device):
            return compile_kernel(_SOURCE, "digest_chunks")
    except (RuntimeError, OSError, ValueError):  # no NVRTC beside this torch
        return None


def _digest_by_operators(tensor: torch.Tensor) -> torch.Tensor:
    """Return the digest [] of a tensor: the exact sum of its bytes times weights by index."""
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    step = 1 << 24
    for start in range(0, raw.numel(), step):
        piece = raw[start : start + step].to(torch.int64)
        places = torch.arange(start, start + piece.numel(), device=tensor.device)
        total += ((piece + 1) * ((places * 2654435761) % 1048573 + 1)).sum()
    return total
