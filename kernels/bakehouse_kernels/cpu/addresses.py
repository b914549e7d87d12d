"""Arrays and numbers at raw addresses, in compiled code.

A tensor's address crosses into compiled code in 0.1 µs, its NumPy array in 0.8. There an array that one function
hands to another is counted up and down, and is ten numbers to hand over.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]  # which its hints leave out
from numpy.typing import NDArray

from bakehouse_kernels.cpu.compile import compiled, intrinsic


@intrinsic
def _float32_pointer(_typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(types.int64), generate  # type: ignore[no-untyped-call]


@compiled()
def float32_rows(address: int, n_rows: int, n_columns: int) -> NDArray[np.float32]:
    """The contiguous `[n_rows, n_columns]` at an address, whose owner keeps it alive."""
    rows: NDArray[np.float32] = carray(_float32_pointer(address), (n_rows, n_columns))
    return rows


def _integer_at(n_bits: int) -> Any:
    @intrinsic
    def integer_at(_typing: Any, address: Any, i: Any) -> Any:
        """Number `i` of those that begin at `address`."""

        def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> ir.Value:
            n_bytes = n_bits // 8
            place = builder.add(args[0], builder.mul(args[1], ir.Constant(ir.IntType(64), n_bytes)))
            number = builder.load(builder.inttoptr(place, ir.IntType(n_bits).as_pointer()), align=n_bytes)
            return builder.sext(number, ir.IntType(64)) if n_bits < 64 else number

        return types.int64(types.int64, types.int64), generate

    return integer_at


int32_at, int64_at = _integer_at(32), _integer_at(64)


@intrinsic
def float32_at(_typing: Any, address: Any) -> Any:
    """The number at `address`."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> ir.Value:
        return builder.load(builder.inttoptr(args[0], ir.FloatType().as_pointer()), align=4)

    return types.float32(types.int64), generate


@intrinsic
def put_float32(_typing: Any, address: Any, number: Any) -> Any:
    """Write `number` at `address`."""

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> ir.Value:
        builder.store(args[1], builder.inttoptr(args[0], ir.FloatType().as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), generate
