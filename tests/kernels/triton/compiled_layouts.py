"""Compiles the decode kernels for GPUs and prints the layouts of their products, as JSON; needs no GPU.

TRITON_INTERPRET=0 python -m tests.kernels.triton.compiled_layouts
"""

import json

import torch
import triton
from bakehouse_kernels.triton import paged_attention, shared_prefix, split_decode
from bakehouse_kernels.triton.attention_call import AttentionCall, Signature
from bakehouse_kernels.triton.launch import DeviceClass
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CASES: tuple[tuple[DeviceClass, int, int, int], ...] = (
    ("sm80", 32, 8, 128),
    ("sm90", 32, 8, 128),
    ("sm90", 8, 4, 256),
)
"""Class, query heads, key heads, head dimension."""


def call_of(device_class: DeviceClass, n_heads: int, n_kv_heads: int, head_dim: int) -> AttentionCall:
    """In bfloat16."""
    q_TND = torch.empty((1, n_heads, head_dim), dtype=torch.bfloat16, device="meta")
    key = torch.empty((1, n_kv_heads, 16, head_dim), dtype=torch.bfloat16, device="meta")
    return AttentionCall(
        q_TND=q_TND,
        out_TND=q_TND,
        key=key,
        value=key,
        scale=1.0,
        window=None,
        softcap=None,
        device_class=device_class,
    )


def layouts(signature: Signature, device_class: DeviceClass) -> list[str]:
    """The lines of the compiled kernel that define layouts of products."""
    names = list(signature.types)
    constants = {name: value for name, value in signature.options.items() if not name.startswith("num_")}
    order = signature.arguments
    source = ASTSource(
        signature.kernel,
        {name: signature.types.get(name, "constexpr") for name in order},
        constants,
        {(order.index(name),): [["tt.divisibility", 16]] for name in names if name in signature.divisible},
    )
    options = {name: signature.options[name] for name in ("num_warps", "num_stages")}
    compiled = triton.compile(source, target=GPUTarget("cuda", int(device_class[2:]), 32), options=options)
    return sorted(line for line in compiled.asm["ttgir"].splitlines() if line.startswith("#mma"))


if __name__ == "__main__":
    found = {}
    for device_class, *heads in CASES:
        call = call_of(device_class, *heads)
        kernels = (
            split_decode.signatures(call, 512)[0],
            *shared_prefix.signatures(call, 512),
            *paged_attention.signatures(call, 512),
        )
        found[f"{device_class} {heads[-1]}"] = [layouts(kernel, device_class) for kernel in kernels]
    print(json.dumps(found))
