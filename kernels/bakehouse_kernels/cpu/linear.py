"""Matrix products whose weights stay in oneDNN's blocked layout.

Two threads, float32, GFLOP/s, weights of 12 layers in turn so that none stays in the cache (AMD EPYC with AVX-512;
`python kernels/benchmarks/matmul.py`):

    rows                    1     4     8    32    96   256
    576→3072  x @ w        11    16    36    91   143   176
              F.linear      6    17    23    93   143   177
              packed       10    48    70   175   204   218
    1536→576  x @ w         6    17    34    87   143   180
              F.linear      8    20    45   105   156   186
              packed       10    35    61   159   199   216

torch offers this layout only below the surface, as the operators that its own compiler emits for frozen weights;
where they are missing the product is `x @ w`.
"""

from typing import cast

import torch
from torch import Tensor

# oneDNN chooses the blocks for a number of rows; those for 32 were the fastest or close to it from 1 to 256.
_TYPICAL_ROWS = 32


def pack(weight_IO: Tensor) -> Tensor:
    """A copy of the weight in the layout that `linear` reads fastest."""
    if not torch._C._has_mkldnn:
        return weight_IO
    return cast("Tensor", torch.ops.mkldnn._reorder_linear_weight(weight_IO.t().contiguous(), _TYPICAL_ROWS))


def linear(x_TI: Tensor, packed: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`x @ weight + bias`; `[T, O]`. See `api.Ops.linear`."""
    if not packed.is_mkldnn:
        return x_TI @ packed if bias_O is None else torch.addmm(bias_O, x_TI, packed)
    return cast("Tensor", torch.ops.mkldnn._linear_pointwise(x_TI, packed, bias_O, "none", [], ""))
