"""Draws and adjustments by tensors mean what the sampler means, to the token and to the bit."""

import math
import random
from collections import Counter
from collections.abc import Sequence

import torch
from bakehouse_kernels.layout import DrawTensors, LogitChanges
from bakehouse_kernels.reference import ReferenceOps
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Sample
from bakehouse_replica.model.adjust import adjusted
from bakehouse_replica.model.noise import noise_key
from bakehouse_replica.model.sampler import draw

N_ROWS, N_VOCABULARY = 3000, 700


def asks_of(samples: Sequence[Sample], positions: Sequence[int]) -> DrawTensors:
    """What one-seed samples ask, in tensors."""
    params = [sample.params for sample in samples]
    return DrawTensors(
        temperature_R=torch.tensor([one.temperature for one in params], dtype=torch.float32),
        top_k_R=torch.tensor([one.top_k or 0 for one in params], dtype=torch.int32),
        top_p_R=torch.tensor([one.top_p for one in params], dtype=torch.float64),
        min_p_R=torch.tensor([one.min_p for one in params], dtype=torch.float64),
        key_R=torch.tensor(
            [noise_key(sample.seeds[0], position) for sample, position in zip(samples, positions, strict=True)]
        ),
    )


def test_thousands_of_draws_are_those_of_the_sampler() -> None:
    """Ties, masks and extremes among them; the sampler's sums differ by 1e-6, which no bound here is near to."""
    chooser, generator = random.Random(5), torch.Generator().manual_seed(5)
    samples = [
        Sample(
            params=SamplingParams(
                temperature=chooser.choice((0.0, 1e-30, 0.3, 1.0, 2.5, 100.0)),
                top_k=chooser.choice((None, None, 1, 2, 40, N_VOCABULARY, 10 * N_VOCABULARY)),
                top_p=chooser.choice((1.0, 1.0, 1e-9, 0.3, 0.9, 0.9999)),
                min_p=chooser.choice((0.0, 0.0, 0.02, 0.5, 1.0)),
            ),
            seeds=(chooser.randrange(-(2**63), 2**63),),
            output_index=0,
        )
        for _ in range(N_ROWS)
    ]
    positions = [chooser.randrange(100_000) for _ in range(N_ROWS)]
    logits = torch.randn(N_ROWS, N_VOCABULARY, generator=generator) * 3
    logits[::3] = logits[::3].round()
    is_masked = torch.rand(logits[1::5].shape, generator=generator) < 0.9
    logits[1::5] = logits[1::5].masked_fill(is_masked, -math.inf)
    logits[:, 11] = 1.0
    ops = ReferenceOps()
    expected = [draws[0].token_ids[0] for draws in draw(ops, logits, samples, positions)]
    assert ops.draw(logits, asks_of(samples, positions)).tolist() == expected


def test_changes_have_the_bits_of_the_samplers_adjustments() -> None:
    prompt, output = (3, 3, 5, 40, 7), (5, 5, 9, 12, 5)
    params = SamplingParams(
        repetition_penalty=1.3,
        presence_penalty=0.7,
        frequency_penalty=-0.3,
        logit_bias=((5, 2.5), (20, -100.0)),
        stop_token_ids=(9, 30),
        min_tokens=50,
    )
    sample = Sample(params=params, seeds=(0,), output_index=5, prompt_ids=prompt, output_ids=output)
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(2)) * 4
    expected = torch.stack((logits[0], adjusted(logits[1], sample, None)))
    bias = dict(params.logit_bias) | dict.fromkeys(params.stop_token_ids, -math.inf)
    count, seen = Counter(output), {*prompt, *output}
    ids = sorted(seen | bias.keys())
    changes = LogitChanges(
        repetition_R=torch.tensor([1.0, params.repetition_penalty]),
        presence_R=torch.tensor([0.0, params.presence_penalty]),
        frequency_R=torch.tensor([0.0, params.frequency_penalty]),
        row_C=torch.ones(len(ids), dtype=torch.int32),
        id_C=torch.tensor(ids, dtype=torch.int32),
        is_seen_C=torch.tensor([id_ in seen for id_ in ids]),
        count_C=torch.tensor([count[id_] for id_ in ids], dtype=torch.int32),
        bias_C=torch.tensor([bias.get(id_, 0.0) for id_ in ids]),
    )
    ReferenceOps().adjust(logits, changes)
    assert logits.equal(expected)
