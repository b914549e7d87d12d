"""Compiles the attention kernels for GPUs and prints the layouts of their splits' scores, as JSON; needs no GPU.

TRITON_INTERPRET=0 python -m tests.kernels.triton.compiled_layouts
"""

import json
import re

from bakehouse_kernels.triton.ahead import Specialised, compiled
from bakehouse_kernels.triton.cases import launches_of_case
from bakehouse_kernels.triton.launch import DeviceClass

CASES: tuple[tuple[DeviceClass, str], ...] = (
    ("sm80", "attention 32/8x128 bf16"),
    ("sm90", "attention 32/8x128 bf16"),
    ("sm90", "attention 8/4x256 bf16"),
    ("sm90", "attention 32/8x128 f32"),
)


def layouts(one: Specialised, device_class: DeviceClass) -> list[str]:
    """Those of the products that are as wide as a split's tile of keys."""
    width = one.constants[(one.kernel.arg_names.index("BLOCK_N"),)]
    text = compiled(one, device_class).asm["ttgir"]
    layout_of = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    product = rf"dot .*-> tensor<\d+x{width}xf32, (#\w+)>"
    return sorted({layout_of[name] for name in re.findall(product, text)})


if __name__ == "__main__":
    found = {}
    for device_class, name in CASES:
        # In their order: Triton's cache knows a kernel by a hash that depends on those that came before it.
        ragged, alone, shared = (layouts(one, device_class) for one in launches_of_case(name, device_class)[:3])
        found[f"{device_class} {name}"] = (alone, shared, ragged)
    print(json.dumps(found))
