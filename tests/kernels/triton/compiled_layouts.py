"""Compiles the attention kernels for GPUs and prints the layouts of their splits' scores, as JSON; needs no GPU.

TRITON_INTERPRET=0 python -m tests.kernels.triton.compiled_layouts
"""

import json
import re

import triton
from bakehouse_kernels.triton.attention_call import Signature
from bakehouse_kernels.triton.cases import signatures_of
from bakehouse_kernels.triton.launch import DeviceClass
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CASES: tuple[tuple[DeviceClass, str], ...] = (
    ("sm80", "attention 32/8x128 bf16"),
    ("sm90", "attention 32/8x128 bf16"),
    ("sm90", "attention 8/4x256 bf16"),
    ("sm90", "attention 32/8x128 f32"),
)


def layouts(signature: Signature, device_class: DeviceClass) -> list[str]:
    """Those of the products that are as wide as a split's tile of keys."""
    order = signature.arguments
    source = ASTSource(
        signature.kernel,
        {name: signature.types.get(name, "constexpr") for name in order},
        {name: value for name, value in signature.options.items() if not name.startswith("num_")},
        {(order.index(name),): [["tt.divisibility", 16]] for name in sorted(signature.divisible)},
    )
    options = {name: signature.options[name] for name in ("num_warps", "num_stages")}
    compiled = triton.compile(source, target=GPUTarget("cuda", int(device_class[2:]), 32), options=options)
    text = compiled.asm["ttgir"]
    layout_of = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    product = rf"dot .*-> tensor<\d+x{signature.options['BLOCK_N']}xf32, (#\w+)>"
    return sorted({layout_of[name] for name in re.findall(product, text)})


if __name__ == "__main__":
    found = {}
    for device_class, name in CASES:
        ragged, alone, _, shared = signatures_of(name, device_class)
        found[f"{device_class} {name}"] = [layouts(kernel, device_class) for kernel in (alone, shared, ragged)]
    print(json.dumps(found))
