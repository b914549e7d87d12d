"""Block copies of a step, all layers in one launch: the copies of copy-on-write.

    layer[target[i]] = layer[source[i]]    for every layer's keys and values

Kwon et al. 2023, Efficient Memory Management for LLM Serving with PagedAttention (arXiv 2309.06180), 4.4: sharers
of a block copy it before the first write. Shape legend in `layout`; C copies.
"""

import triton
import triton.language as tl
from torch import Tensor

from bakehouse_kernels.layout import KVCache
from bakehouse_kernels.triton.cache import TritonCache
from bakehouse_kernels.triton.launch import device_class_of, launch_of, start_kernel

_WORD_BYTES = 4  # what a thread moves at a time; a warp moves a whole line


def copy_blocks(cache: KVCache, source_C: Tensor, target_C: Tensor) -> None:
    """Copy blocks `source[i]` onto `target[i]` in all layers; modifies the cache. See `api.Ops.copy_blocks`."""
    assert isinstance(cache, TritonCache), "a cache from `new_cache`"
    assert source_C.shape == target_C.shape, f"{tuple(source_C.shape)} sources, {tuple(target_C.shape)} targets"
    first = cache.key[0]
    block_bytes = first[0].nbytes
    assert block_bytes % _WORD_BYTES == 0, f"a block of {block_bytes} bytes is not made of words"
    n_words = block_bytes // _WORD_BYTES
    if source_C.shape[0] == 0:
        return
    launch = launch_of("copy_blocks", device_class_of(first.device))
    grid = (source_C.shape[0], cache.addresses.shape[0], triton.cdiv(n_words, launch.tiles["BLOCK"]))
    start_kernel(_copy_blocks, grid, cache.addresses, source_C, target_C, n_words, **launch.options)


@triton.jit(do_not_specialize=["source", "target"])
def _copy_blocks(addresses, source, target, n_words, BLOCK: tl.constexpr):
    """A program for each copy, layer and part of a block."""
    copy, layer, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    words = tl.load(addresses + layer).to(tl.pointer_type(tl.int32))
    word = part * BLOCK + tl.arange(0, BLOCK)
    inside = word < n_words
    read = tl.load(words + tl.load(source + copy) * n_words + word, mask=inside)
    tl.store(words + tl.load(target + copy) * n_words + word, read, mask=inside)
