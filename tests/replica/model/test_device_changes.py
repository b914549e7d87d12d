"""What requests change in logits, listed for a device, gives the sampler's tokens; the host has the rest."""

from random import Random

import pytest
import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.layout import DrawTensors
from bakehouse_kernels.reference import ReferenceOps
from bakehouse_replica.core.sampling import Grammar, GrammarKind, SamplingParams
from bakehouse_replica.core.types import Sample
from bakehouse_replica.model.adjust import adjusted
from bakehouse_replica.model.device_changes import changes_of, is_for_device
from bakehouse_replica.model.noise import noise_key
from bakehouse_replica.model.sampler import draw

CPU = torch.device("cpu")
N_VOCABULARY = 300


def random_sample(random: Random) -> Sample:
    """Penalties, biases, bans and filters in any combination, none of them also."""

    def ids(n_most: int) -> tuple[int, ...]:
        return tuple(random.randrange(N_VOCABULARY) for _ in range(random.randint(0, n_most)))

    output_ids = ids(30)
    params = SamplingParams(
        temperature=random.choice((0.0, 0.3, 1.0, 2.5)),
        top_k=random.choice((None, None, 3, 40)),
        top_p=random.choice((1.0, 0.5, 0.95)),
        min_p=random.choice((0.0, 0.0, 0.1)),
        repetition_penalty=random.choice((1.0, 1.0, 0.7, 1.3)),
        presence_penalty=random.choice((0.0, 0.0, 0.6, -0.4)),
        frequency_penalty=random.choice((0.0, 0.0, 0.3, -1.1)),
        logit_bias=tuple((token_id, random.uniform(-9.0, 9.0)) for token_id in ids(6)),
        stop_token_ids=ids(3),
        min_tokens=random.choice((0, 0, 100)),
        bad_words_ids=tuple((*output_ids[-random.randint(0, 2) :][:1], token_id) for token_id in ids(2)),
        seed=0,
    )
    seed = random.randrange(-(2**63), 2**63)
    return Sample(
        params=params, seeds=(seed,), output_index=len(output_ids), prompt_ids=ids(40), output_ids=output_ids
    )


def drawn_by_device(ops: Ops, logits: torch.Tensor, samples: list[Sample], positions: list[int]) -> list[int]:
    logits, params = logits.clone(), [sample.params for sample in samples]
    changes = changes_of(list(enumerate(samples)), len(samples), CPU)
    assert changes is not None
    ops.adjust(logits, changes)
    asks = DrawTensors(
        temperature_R=torch.tensor([one.temperature for one in params], dtype=torch.float32),
        top_k_R=torch.tensor([one.top_k or 0 for one in params], dtype=torch.int32),
        top_p_R=torch.tensor([one.top_p for one in params], dtype=torch.float64),
        min_p_R=torch.tensor([one.min_p for one in params], dtype=torch.float64),
        key_R=torch.tensor(
            [noise_key(sample.seeds[0], position) for sample, position in zip(samples, positions, strict=True)]
        ),
    )
    ids: list[int] = ops.draw(logits, asks).tolist()
    return ids


def test_hundreds_of_changed_rows_have_the_samplers_bits_and_tokens() -> None:
    random, generator = Random(7), torch.Generator().manual_seed(7)
    samples = [random_sample(random) for _ in range(400)]
    positions = [random.randrange(10_000) for _ in samples]
    assert all(is_for_device(sample, None, N_VOCABULARY) for sample in samples)
    logits = torch.randn(len(samples), N_VOCABULARY, generator=generator) * 3
    changed, changes = logits.clone(), changes_of(list(enumerate(samples)), len(samples), CPU)
    assert changes is not None
    ReferenceOps().adjust(changed, changes)
    for row, sample in enumerate(samples):
        assert changed[row].equal(adjusted(logits[row], sample, None)), sample
    expected = [draws[0].token_ids[0] for draws in draw(ReferenceOps(), logits, samples, positions)]
    assert drawn_by_device(ReferenceOps(), logits, samples, positions) == expected


def test_interpreted_kernels_draw_the_samplers_tokens_from_changed_rows() -> None:
    pytest.importorskip("triton", reason="triton is not installed: it exists for Linux only")
    from bakehouse_kernels.triton.ops import TritonOps  # after the check

    random = Random(8)
    samples = [random_sample(random) for _ in range(24)]
    positions = [random.randrange(10_000) for _ in samples]
    logits = torch.randn(len(samples), N_VOCABULARY, generator=torch.Generator().manual_seed(8)) * 3
    expected = [draws[0].token_ids[0] for draws in draw(ReferenceOps(), logits, samples, positions)]
    assert drawn_by_device(TritonOps(CPU, torch.float32), logits, samples, positions) == expected


def test_rows_that_ask_for_no_change_send_nothing() -> None:
    plain = Sample(params=SamplingParams(temperature=1.0, top_p=0.9), seeds=(1,), output_index=0)
    assert changes_of([(0, plain)], 4, CPU) is None


@pytest.mark.parametrize(
    ("params", "n_seeds", "is_device"),
    [
        (SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5), 1, True),
        (SamplingParams(logit_bias=((3, 2.0),), min_p=0.1, top_k=4, top_p=0.5), 1, True),
        (SamplingParams(bad_words_ids=((1, 2),), stop_token_ids=(4,), min_tokens=2), 1, True),
        (SamplingParams(temperature=0.0), 4, False),
        (SamplingParams(logprobs=0), 1, False),
        (SamplingParams(allowed_token_ids=(3, 4)), 1, False),
        (SamplingParams(bad_words_ids=tuple((token_id,) for token_id in range(N_VOCABULARY))), 1, False),
    ],
    ids=["penalties", "bias and filters", "bans", "forks", "logprobs", "allowed", "all banned"],
)
def test_the_host_is_left_what_a_few_places_cannot_say(
    params: SamplingParams, n_seeds: int, is_device: bool
) -> None:
    sample = Sample(params=params, seeds=tuple(range(n_seeds)), output_index=0)
    assert is_for_device(sample, None, N_VOCABULARY) is is_device


def test_a_grammar_is_the_hosts() -> None:
    class AllowsAll:
        def allowed(self, n_vocabulary: int) -> torch.Tensor:
            return torch.ones(n_vocabulary, dtype=torch.bool)

        def is_complete_after(self, token_id: int) -> bool:
            return False

    params = SamplingParams(grammar=Grammar(kind=GrammarKind.REGEX, text="a*"))
    assert not is_for_device(Sample(params=params, seeds=(1,), output_index=0), AllowsAll(), N_VOCABULARY)
