"""What it costs to let two other ranks know a step: milliseconds from a plan to its tensors on both.

PYTHONPATH=replica:kernels python replica/benchmarks/control.py [--sequences 256] [--blocks 128] [--steps 400]

`order`: rank 0 flattens and encodes the plan, sends it, and both ranks read, check and decode it and build the
tensors of the batch; each then says so in one byte, and the last of these ends the time. `gloo`: the same buffer,
flattened and encoded alike, by a gloo broadcast between the same processes, its length in a broadcast of its own.
Two steps differ as those of decoding do: each sequence has another token, and one in 16 another block.

Measured with three processes on two AVX-512 cores that others used, too: see `replica/README.md`.
"""

import argparse
import multiprocessing
import socket
from collections.abc import Callable
from statistics import median, quantiles
from time import perf_counter

import numpy as np
import torch
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Chunk, Sample
from bakehouse_replica.executors.control import HEADER_WORDS, StepOrder, Words, decode, encode, read_header
from bakehouse_replica.executors.links import SECRET_BYTES, Invitation, Reception, join, receive_order, send_order
from bakehouse_replica.model.batch import build_batch, flatten
from bakehouse_replica.model.collective import Group, Meeting, open_store

BLOCK_SIZE = 16
N_RANKS = 3
N_WARM_UP = 20
HOST = "127.0.0.1"
SECRET = bytes(SECRET_BYTES)
CPU = torch.device("cpu")
SAMPLE = Sample(params=SamplingParams(), seeds=(0,), output_index=0)
# One buffer holds any step of the benchmark; a broadcast needs its size on all ranks beforehand.
READY = b"!"


def plan_of(step: int, n_sequences: int, n_blocks: int, tables: list[tuple[int, ...]]) -> tuple[Chunk, ...]:
    """A decode step of sequences whose contexts fill `n_blocks` blocks each; renews some of the `tables`."""
    for s in range(step % BLOCK_SIZE, n_sequences, BLOCK_SIZE):
        tables[s] = (*tables[s][:-1], step * n_sequences + s)
    start = n_blocks * BLOCK_SIZE - 1
    return tuple(
        Chunk(sequence_id=s, token_ids=(step + s,), start=start, block_ids=tables[s], sample=SAMPLE)
        for s in range(n_sequences)
    )


def apply(order: StepOrder) -> None:
    """What a follower does before its forward pass."""
    assert order.flat is not None, "the benchmark's plans have chunks"
    build_batch(order.flat, block_size=BLOCK_SIZE, device=CPU)


def follow(invitation: Invitation, rank: int, n_steps: int) -> None:
    """A rank: first by orders, then by broadcasts."""
    torch.set_num_threads(1)
    link = join(invitation, rank)
    for number in range(1, n_steps + 1):
        order = receive_order(link.orders, expected=number)
        assert order is not None, "rank 0 has more steps"
        apply(order)
        link.reports.sendall(READY)
    meeting = Meeting(rank=rank, size=N_RANKS, host=HOST, port=invitation.store_port, own_host=HOST)
    group = Group(meeting, CPU, lambda: None)
    for number in range(1, n_steps + 1):
        n_words = torch.zeros(1, dtype=torch.int32)
        group.broadcast_(n_words)
        buffer = torch.empty(int(n_words), dtype=torch.int32)
        group.broadcast_(buffer)
        words = buffer.numpy()
        apply(decode(read_header(words[:HEADER_WORDS]), words[HEADER_WORDS:], expected=number))
        link.reports.sendall(READY)


def time_steps(
    send: Callable[[Words], None], reports: list[socket.socket], n_steps: int, n_sequences: int, n_blocks: int
) -> list[float]:
    """Milliseconds of each step, those of the warm-up left out."""
    tables = [tuple(range(s * n_blocks, (s + 1) * n_blocks)) for s in range(n_sequences)]
    taken_ms = []
    for step in range(1, n_steps + 1):
        chunks = plan_of(step, n_sequences, n_blocks, tables)
        begun_s = perf_counter()
        send(encode(StepOrder(number=step, copies=(), flat=flatten(chunks))))
        for connection in reports:
            assert connection.recv(1) == READY, "a rank has failed"
        taken_ms.append(1000 * (perf_counter() - begun_s))
    return taken_ms[N_WARM_UP:]


def main() -> None:
    """Prints a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    n_steps = N_WARM_UP + options.steps
    reception = Reception(HOST, SECRET)
    store, store_port = open_store(HOST, N_RANKS)
    invitation = Invitation(
        host=HOST, port=reception.port, store_port=store_port, size=N_RANKS, timeout_s=60.0, secret=SECRET
    )
    spawned = multiprocessing.get_context("spawn")
    ranks = [spawned.Process(target=follow, args=(invitation, rank, n_steps)) for rank in range(1, N_RANKS)]
    for process in ranks:
        process.start()
    links = reception.welcome(N_RANKS, lambda: None)
    reports = [link.reports for link in links]
    shape = (n_steps, options.sequences, options.blocks)

    def send_orders(words: Words) -> None:
        for link in links:
            send_order(link.orders, words)

    show("order", time_steps(send_orders, reports, *shape))
    group = Group(
        Meeting(rank=0, size=N_RANKS, host=HOST, port=store_port, own_host=HOST), CPU, lambda: None, store
    )

    def broadcast(words: Words) -> None:
        group.broadcast_(torch.from_numpy(np.array([len(words)], np.int32)))
        group.broadcast_(torch.from_numpy(words))

    show("gloo", time_steps(broadcast, reports, *shape))
    for process in ranks:
        process.join()


def show(way: str, taken_ms: list[float]) -> None:
    """Median, and the quickest and slowest tenth."""
    tenths = quantiles(taken_ms, n=10)
    print(f"{way:>6}: median {median(taken_ms):.3f} ms, tenths {tenths[0]:.3f} and {tenths[-1]:.3f} ms")


if __name__ == "__main__":
    main()
