"""What one call of the paged attention is given, and the memory that its threads work in."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bakehouse_kernels.cpu.addresses import borrowed
from bakehouse_kernels.cpu.attention_plan import CpuPlan
from bakehouse_kernels.cpu.compile import compiled
from bakehouse_kernels.cpu.tile import SHAPE

Floats = NDArray[np.float32]

_COLUMNS = SHAPE.columns


class Call(NamedTuple):
    """The arguments of one call, as the compiled functions take them. `softcap` counts only where `capped`."""

    q_TND: Floats
    out_TND: Floats
    key: int  # address of the layer's [P, H, K / C, D, C], C columns of a tile
    value: int  # of [P, H, D / C, K, C]
    n_kv_heads: int
    block_size: int
    scale: np.float32
    window: int
    capped: bool
    softcap: np.float32


class Scratch(NamedTuple):
    """One thread's working memory for the G heads of each of a tile's rows, here together M = rows · G."""

    q_MD: Floats
    scores: Floats  # [K / C, M, C]: of one block, then the weights
    sums: Floats  # [D / C, M, C]
    highest_M: Floats  # score so far
    total_M: Floats  # of the weights, relative to the highest
    factor_M: Floats  # for the sums so far


@compiled(exact=True)
def n_panels(n_columns: int) -> int:
    return -(-n_columns // _COLUMNS)


@compiled(exact=True)
def without_counts(call: Call, plan: CpuPlan) -> tuple[Call, CpuPlan]:
    """The same without counted references; both must outlive it."""
    borrowed_call = Call(
        borrowed(call.q_TND),
        borrowed(call.out_TND),
        call.key,
        call.value,
        call.n_kv_heads,
        call.block_size,
        call.scale,
        call.window,
        call.capped,
        call.softcap,
    )
    borrowed_plan = CpuPlan(
        borrowed(plan.block_table), borrowed(plan.rows), borrowed(plan.positions), borrowed(plan.sequences)
    )
    return borrowed_call, borrowed_plan


@compiled(exact=True)
def numbers_a_state(call: Call) -> int:
    head_dim: int = call.q_TND.shape[2]
    return head_dim + (n_panels(call.block_size) + n_panels(head_dim)) * _COLUMNS + 3


@compiled(exact=True)
def scratch_in(room: Floats, n_states: int, call: Call) -> Scratch:
    """One thread's, in its part of the room."""
    head_dim = call.q_TND.shape[2]
    q_end = n_states * head_dim
    scores_end = q_end + n_states * n_panels(call.block_size) * _COLUMNS
    sums_end = scores_end + n_states * n_panels(head_dim) * _COLUMNS
    return Scratch(
        room[:q_end].reshape((n_states, head_dim)),
        room[q_end:scores_end].reshape((-1, n_states, _COLUMNS)),
        room[scores_end:sums_end].reshape((-1, n_states, _COLUMNS)),
        room[sums_end : sums_end + n_states],
        room[sums_end + n_states : sums_end + 2 * n_states],
        room[sums_end + 2 * n_states : sums_end + 3 * n_states],
    )
