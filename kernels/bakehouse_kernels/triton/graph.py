"""CUDA graphs: operations captured once, then started by one call, on the same memory each time."""

from collections.abc import Callable

import torch
from torch import Tensor


class GraphRecorder:
    """Captures on one device, into one pool of memory: graphs are played one after the other, never at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: cuBLAS keeps some 32 MB for each stream that it has ever met.
        self._stream = torch.cuda.Stream(device)

    def recording(self, work: Callable[[], Tensor]) -> "GraphRecording":
        """Captures `work`, having done it once before: kernels are compiled, libraries set up outside of graphs.

        The result keeps its memory as long as the recording lives; what lies between is any recording's.
        """
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile: that of NCCL looks at its events.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            result = work()
        return GraphRecording(graph, result)


class GraphRecording:
    """A captured graph, and where its result stands."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: Tensor) -> None:
        self._graph = graph
        self._result = result

    @property
    def result(self) -> Tensor:
        """Where the result stands from a `play` until the next."""
        return self._result

    def play(self) -> None:
        """Start the graph on the current stream; returns at once."""
        self._graph.replay()
