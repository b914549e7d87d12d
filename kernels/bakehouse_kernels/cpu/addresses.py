"""Arrays over raw addresses, in compiled code.

A tensor's address crosses into compiled code in 0.1 µs, its NumPy array in 0.8.
"""

from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]  # which its hints leave out
from numpy.typing import NDArray

from bakehouse_kernels.cpu.compile import compiled, intrinsic

A = TypeVar("A", bound=NDArray[Any])


@intrinsic
def _float32_pointer(_typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(types.int64), generate  # type: ignore[no-untyped-call]


@intrinsic
def _pointer(_typing: Any, array: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        return context.make_array(signature.args[0])(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), generate  # type: ignore[no-untyped-call]


@compiled()
def borrowed(array: A) -> A:
    """The same contiguous array without a count of its references, which `array` must outlive.

    An array that one function hands to another is counted up and down; threads that share it fight for the count.
    """
    same: Any = carray(_pointer(array), array.shape)
    return same  # type: ignore[no-any-return]


@compiled()
def float32_rows(address: int, n_rows: int, n_columns: int) -> NDArray[np.float32]:
    """The contiguous `[n_rows, n_columns]` at an address, whose owner keeps it alive."""
    rows: NDArray[np.float32] = carray(_float32_pointer(address), (n_rows, n_columns))
    return rows
