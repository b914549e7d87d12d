"""Launches compiled ahead for a class of devices, without one, and what machine code they come to.

A launcher is called with tensors of the `meta` device, which have shapes and no memory; what it would launch is
noted instead, as the signature that Triton compiles.
"""

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from tempfile import NamedTemporaryFile
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from bakehouse_kernels.triton.attention_call import Signature
from bakehouse_kernels.triton.launch import DeviceClass

CAPABILITIES: Mapping[DeviceClass, tuple[int, int]] = {"sm80": (8, 0), "sm90": (9, 0)}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*u1",
}
_ALIGNMENT = 16  # Triton tells arguments apart by whether they are multiples of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a launch takes of a device: registers of a thread, bytes spilled from them, bytes of shared memory."""

    registers: int
    spilled_bytes: int
    shared_bytes: int

    @property
    def record(self) -> dict[str, int]:
        """As JSON has it."""
        return asdict(self)


@contextmanager
def noted(device_class: DeviceClass) -> Iterator[list[Signature]]:
    """What is launched within, on a device of the class, is not launched but added to the list."""
    signatures: list[Signature] = []

    def note(kernel: JITFunction, *args: object, grid: object, warmup: bool, **given: object) -> None:
        signatures.append(_signature(kernel, args, given))

    with (
        patch.object(JITFunction, "run", note),
        patch("torch.cuda.get_device_capability", lambda _: CAPABILITIES[device_class]),
    ):
        yield signatures


def launches_of(call: Callable[[], object], device_class: DeviceClass) -> list[Signature]:
    """What `call` would launch."""
    with noted(device_class) as signatures:
        call()
    return signatures


def usage_of(signature: Signature, device_class: DeviceClass) -> Usage:
    """Compiles a launch for the class, and says what it takes."""
    place = {name: (index,) for index, name in enumerate(signature.arguments)}
    source = ASTSource(
        signature.kernel,
        {name: signature.types.get(name, "constexpr") for name in signature.arguments},
        {name: value for name, value in signature.options.items() if name not in _OPTIONS},
        {place[name]: [["tt.divisibility", _ALIGNMENT]] for name in sorted(signature.divisible)},
    )
    options = {name: value for name, value in signature.options.items() if name in _OPTIONS}
    major, minor = CAPABILITIES[device_class]
    compiled = triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=options)
    used = _resources(compiled.asm["cubin"])
    return Usage(
        registers=used["REG"],
        spilled_bytes=used["STACK"] + used["LOCAL"],
        shared_bytes=compiled.metadata.shared,
    )


def _signature(kernel: JITFunction, args: tuple[object, ...], given: Mapping[str, object]) -> Signature:
    bound = {**dict(zip(kernel.arg_names, args, strict=False)), **given}
    constants = {param.name for param in kernel.params if param.is_constexpr} | set(_OPTIONS)
    values = {name: bound[name] for name in kernel.arg_names if name not in constants}
    return Signature(
        kernel=kernel,
        arguments=tuple(kernel.arg_names),
        types={name: _type(value) for name, value in values.items()},
        divisible=frozenset(
            name
            for name, value in values.items()
            if isinstance(value, Tensor) or (isinstance(value, int) and value % _ALIGNMENT == 0)
        ),
        options={name: value for name, value in bound.items() if name in constants and isinstance(value, int)},
    )


def _type(value: object) -> str:
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype]
    assert isinstance(value, int | float), f"{value!r} is no argument of a kernel"
    return "fp32" if isinstance(value, float) else "i32"


def _resources(cubin: bytes) -> dict[str, int]:
    """What `cuobjdump`, which comes with Triton, says of the one kernel of a binary."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        dump = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        answer = subprocess.run(dump, check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", answer)}
