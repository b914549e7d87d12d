"""Rotates the residual stream of a decoder's weights, so that its rows lose less when they are rounded to 8 bits.

A few channels of a trained model are many times larger than the others. A row is rounded in steps of its largest
number, so they leave the others little. A rotation Q spreads them evenly, and costs nothing at run time: what
writes to the stream (embedding, output and down projections) is multiplied by Q once and for all, what reads from
it (query, key and value, gate and up, head) by its transpose. The norms between them commute with Q,
`rms_norm(x) @ Q = rms_norm(x @ Q)`, once their own weights have moved into the matrix behind. The model is the
same.

Q flips signs at random, then mixes by a Hadamard matrix, as in QuaRot (https://arxiv.org/abs/2404.00456), and by
a Hartley matrix where the width needs one. No entry of Q is more than √2 times their mean square, so that is how
much of a single channel is left in any. A random matrix in the place of the second left more, by luck.
Products in 8 bits raise the perplexity of SmolLM2-135M by 3.8 % without a rotation and by 1.4 % with it
(`replica/benchmarks/perplexity.py`); nearly all that is left comes from the input of the down projection.

Shape legend in `bakehouse_kernels.layout`; X is the fused width of query, key and value, V the vocabulary.
"""

from collections.abc import Mapping
from math import gcd, pi, sqrt

import torch
from torch import Tensor

# The largest side of the Hadamard factor. A number costs so many products, and as many as the other has rows.
_HADAMARD = 64


class ResidualRotation:
    """One orthogonal matrix Q `[E, E]`, always the same for the same width, never stored as a whole."""

    def __init__(self, width: int) -> None:
        n_hadamard = gcd(width, _HADAMARD)
        self._hadamard_PP = _hadamard(n_hadamard)
        self._hartley_MM = _hartley(width // n_hadamard)
        # Without them a stream whose channels are all alike would end up in one.
        generator = torch.Generator().manual_seed(width)
        self._sign_E = 1.0 - 2.0 * torch.randint(0, 2, (width,), generator=generator)

    def turn(self, x_E: Tensor) -> Tensor:
        """`x @ Q` over the last dimension, E, of a float32 tensor of any shape."""
        x_MP = (x_E * self._sign_E).view(*x_E.shape[:-1], len(self._hartley_MM), len(self._hadamard_PP))
        return (self._hartley_MM @ x_MP @ self._hadamard_PP).flatten(-2)

    def turn_ends(self, embedding_VE: Tensor, final_norm_E: Tensor, head_VE: Tensor) -> dict[str, Tensor]:
        """Embedding, last norm and head by their names; the head is no longer the embedding's."""
        return {
            "embedding_VE": self.turn(embedding_VE),
            "final_norm_E": torch.ones_like(final_norm_E),
            "head_VE": self.turn(head_VE * final_norm_E),
        }

    def turn_layer(self, layer: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a `LayerWeights` by their names."""
        turned = dict(layer)
        for norm, reader in (("attention_norm_E", "qkv_EX"), ("feed_forward_norm_E", "gate_up_EF2")):
            turned[reader] = self.turn(layer[reader].t() * layer[norm]).t().contiguous()
            turned[norm] = torch.ones_like(layer[norm])
        for writer in ("output_QE", "output_bias_E", "down_FE", "down_bias_E"):
            if writer in layer:
                turned[writer] = self.turn(layer[writer])
        return turned


def _hadamard(n: int) -> Tensor:
    """Of a power of two: orthogonal, all entries equal but for their signs; float32 `[n, n]`."""
    hadamard = torch.ones(1, 1)
    while len(hadamard) < n:
        hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
    return hadamard / sqrt(n)


def _hartley(n: int) -> Tensor:
    """Cosine plus sine of each pair's angle: orthogonal and symmetric for any n; float32 `[n, n]`."""
    index_N = torch.arange(n, dtype=torch.float64)
    angle_NN = torch.outer(index_N, index_N) * (2 * pi / n)
    return ((angle_NN.cos() + angle_NN.sin()) / sqrt(n)).float()
