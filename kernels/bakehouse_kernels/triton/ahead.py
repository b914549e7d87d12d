"""Launches compiled ahead for a class of devices, without one, and what machine code they come to.

A launcher is called with tensors of the `meta` device, which have shapes and no memory, within `noting`. What
Triton compiles for such a launch follows from its arguments; here Triton itself is asked, as on the device.
"""

import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from tempfile import NamedTemporaryFile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime.jit import create_function_from_signature

from bakehouse_kernels.triton.launch import DeviceClass, Started, noting

CAPABILITIES: Mapping[DeviceClass, int] = {"sm80": 80, "sm90": 90}
_THREADS_A_WARP = 32


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Specialised:
    """A kernel as Triton compiles it for some launch.

    Launches whose `key` is the same run the same machine code. It has the kernel's name, of each argument its type
    and what is known of its value (`D`: a multiple of 16), and the options.
    """

    kernel: Any
    key: str
    types: Mapping[str, str]
    constants: Mapping[tuple[int, ...], object]
    attributes: Mapping[tuple[int, ...], object]
    options: Mapping[str, object]

    @property
    def name(self) -> str:
        """That of the kernel."""
        return str(self.kernel.__name__).strip("_")


def specialised(started: Started, device_class: DeviceClass) -> Specialised:
    """What Triton compiles for a launch on the class, by the steps that `JITFunction.run` takes."""
    kernel = started.kernel
    backend = make_backend(_target(device_class))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    given = {"debug": False, **started.options}
    bound, specialisation, options = bind(*started.arguments, **given)
    parsed, types, constants, attributes = kernel._pack_args(backend, given, bound, specialisation, options)
    values = {
        name: value for name, value in bound.items() if kernel.params[kernel.arg_names.index(name)].is_constexpr
    }
    return Specialised(
        kernel=kernel,
        key=f"{kernel.__name__} {specialisation} {values} {sorted(options.items())}",
        types=types,
        constants=constants,
        attributes=attributes,
        options=parsed.__dict__,
    )


def launches_of(call: Callable[[], object], device_class: DeviceClass) -> list[Specialised]:
    """What `call` would launch."""
    with noting(device_class) as notes:
        call()
    return [specialised(started, device_class) for started in notes.launches]


def compiled(one: Specialised, device_class: DeviceClass) -> CompiledKernel:
    """Compiled for the class, or taken from Triton's cache."""
    source = ASTSource(one.kernel, one.types, one.constants, one.attributes)
    return triton.compile(source, target=_target(device_class), options=one.options)


def usage_of(one: Specialised, device_class: DeviceClass) -> Usage:
    """Compiles a launch for the class, and says what it takes."""
    kernel = compiled(one, device_class)
    used = _resources(kernel.asm["cubin"])
    return Usage(
        registers=used["REG"],
        spilled_bytes=used["STACK"] + used["LOCAL"],
        shared_bytes=kernel.metadata.shared,
    )


def _target(device_class: DeviceClass) -> GPUTarget:
    return GPUTarget("cuda", CAPABILITIES[device_class], _THREADS_A_WARP)


def _resources(cubin: bytes) -> dict[str, int]:
    """What `cuobjdump`, which comes with Triton, says of the one kernel of a binary."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        dump = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        answer = subprocess.run(dump, check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", answer)}
