"""Compiled functions by the address of their machine code, and their arguments by the address of a copy.

So a call can be left for another thread (`cpu.pool`), or for later (`cpu.recording`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import register_jitable
from numpy.typing import NDArray

from bakehouse_kernels.cpu.compile import intrinsic

P = ParamSpec("P")
R = TypeVar("R")

# Of a `Crew`: where its threads meet (`cpu.pool`).
Cells = NDArray[np.int64]
Words = NDArray[np.int64]

# What a call returns that has nothing to complain of, or has no result at all.
NOTHING_WRONG = -1

_LONG = ir.IntType(64)


def entry_to(kernel: Any) -> Any:
    """For compiled code: `entry(call)`, the address of a function that takes the address of a tuple like `call`.

    It calls `kernel` with the tuple and returns what that does, an integer, or `NOTHING_WRONG`. No kernel raises.
    """

    @intrinsic
    def entry(typing: Any, call: Any) -> Any:
        signature = typing.resolve_function_type(typing.resolve_value_type(kernel), tuple(call), {})

        def generate(context: Any, builder: ir.IRBuilder, _signature: Any, _args: list[ir.Value]) -> ir.Value:
            overload = kernel.overloads[tuple(call)]
            name = f"entry_to_{overload.fndesc.mangled_name}"
            function = ir.Function(builder.module, ir.FunctionType(_LONG, [_LONG]), name)
            function.linkage = "internal"
            inner = ir.IRBuilder(function.append_basic_block("entry"))
            values = inner.load(inner.inttoptr(function.args[0], context.get_value_type(call).as_pointer()))
            arguments = [inner.extract_value(values, i) for i in range(len(call))]
            _, result = context.call_internal_no_propagate(inner, overload.fndesc, signature, arguments)
            has_result = signature.return_type != types.none
            inner.ret(result if has_result else ir.Constant(_LONG, NOTHING_WRONG))
            context.active_code_library.add_linking_library(overload.library)
            return builder.ptrtoint(function, _LONG)

        return types.int64(call), generate

    return entry


@intrinsic
def call_at(_typing: Any, entry: Any, address: Any) -> Any:
    """For compiled code: call what `entry_to` gave with the tuple at `address`."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> ir.Value:
        function = builder.inttoptr(args[0], ir.FunctionType(_LONG, [_LONG]).as_pointer())
        return builder.call(function, [args[1]])

    return types.int64(types.int64, types.int64), generate


@intrinsic
def address_of(_typing: Any, call: Any) -> Any:
    """For compiled code: where a copy of `call` stands until the calling function returns."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> ir.Value:
        with builder.goto_entry_block():
            room = builder.alloca(args[0].type)
        builder.store(args[0], room)
        return builder.ptrtoint(room, _LONG)

    return types.int64(call), generate


@intrinsic
def _n_words(_typing: Any, call: Any) -> Any:
    def generate(context: Any, _builder: ir.IRBuilder, _signature: Any, _args: list[ir.Value]) -> ir.Value:
        n_bytes = context.get_abi_sizeof(context.get_value_type(call))
        return ir.Constant(_LONG, -(-n_bytes // 8))

    return types.int64(call), generate


@intrinsic
def _store(_typing: Any, call: Any, address: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> ir.Value:
        room = builder.inttoptr(args[1], args[0].type.as_pointer())
        builder.store(_without_counts(context, builder, call, args[0]), room, align=8)
        return context.get_dummy_value()

    return types.void(call, types.int64), generate


@register_jitable
def stored(call: Any) -> Words:
    """For compiled code: a copy of the tuple `call` whose arrays own nothing. Who owns them must outlive it."""
    words = np.empty(_n_words(call), np.int64)
    _store(call, words.ctypes.data)
    return words


def _without_counts(context: Any, builder: ir.IRBuilder, kind: Any, value: ir.Value) -> ir.Value:
    """The same with arrays that no reference is counted of, nor of arrays in tuples inside."""
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        array.meminfo = ir.Constant(array.meminfo.type, None)
        array.parent = ir.Constant(array.parent.type, None)
        return array._getvalue()
    if isinstance(kind, types.BaseTuple):
        of_items: tuple[Any, ...] = tuple(kind)  # type: ignore[arg-type]  # it iterates, which its hints leave out
        for i, of_item in enumerate(of_items):
            part = _without_counts(context, builder, of_item, builder.extract_value(value, i))
            value = builder.insert_value(value, part, i)
    return value


def noting(kernel: Any) -> Callable[..., tuple[int, Words]]:
    """For compiled code: `note(call)`, the entry to `kernel` and a stored copy of the arguments."""
    entry = entry_to(kernel)

    @register_jitable
    def note(call: Any) -> tuple[int, Words]:
        return entry(call), stored(call)

    return cast("Callable[..., tuple[int, Words]]", note)


@dataclass(frozen=True, slots=True)
class Kernel(Generic[P, R]):
    """A compiled function that a `Crew` calls with its cells, and the one that notes such a call (`noting`)."""

    do: Callable[Concatenate[Cells, P], R]
    note: Callable[Concatenate[Cells, P], tuple[int, Words]]

    def __call__(self, cells: Cells, *arguments: P.args, **named: P.kwargs) -> R:
        """Do it now."""
        return self.do(cells, *arguments, **named)
