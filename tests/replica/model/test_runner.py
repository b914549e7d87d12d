"""The runner: a plan in, tokens out, nothing kept but the cache."""

import pytest
import torch
from bakehouse_kernels.layout import KVCache
from bakehouse_kernels.reference import ReferenceOps
from bakehouse_replica.core.types import BlockCopy, Chunk, Draw, Sample, Sampled, SamplingParams, StepPlan
from bakehouse_replica.model.batch import build_batch
from bakehouse_replica.model.decoder import Decoder
from bakehouse_replica.model.runner import Runner
from bakehouse_replica.model.sampler import draw
from bakehouse_replica.model.spec import ModelSpec
from bakehouse_replica.model.weights import DecoderWeights, LayerWeights
from torch import Tensor

CPU = torch.device("cpu")
SPEC = ModelSpec(
    n_layers=1,
    hidden_size=16,
    n_heads=2,
    n_kv_heads=1,
    head_dim=8,
    feed_forward_size=24,
    vocabulary_size=50,
    context_length=64,
    norm_eps=1e-5,
    rope_frequencies=(1.0, 0.1, 0.01, 0.001),
    has_tied_head=True,
)
PROMPT = (3, 1, 4, 1, 5, 9, 2)
BLOCKS = (5, 2)


@pytest.fixture
def decoder() -> Decoder:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    layer = LayerWeights(
        attention_norm_E=torch.ones(16),
        qkv_EX=random(16, 32),
        output_QE=random(16, 16),
        feed_forward_norm_E=torch.ones(16),
        gate_up_EF2=random(16, 48),
        down_FE=random(24, 16),
    )
    embedding_VE = random(50, 16)
    weights = DecoderWeights(
        embedding_VE=embedding_VE, layers=(layer,), final_norm_E=torch.ones(16), head_VE=embedding_VE
    )
    return Decoder(SPEC, weights, ReferenceOps())


def new_cache() -> KVCache:
    return KVCache.allocate(
        n_layers=1, n_blocks=8, block_size=4, n_kv_heads=1, head_dim=8, dtype=torch.float32, device=CPU
    )


def runner_of(decoder: Decoder, cache: KVCache) -> Runner:
    return Runner(decoder=decoder, cache=cache, ops=ReferenceOps(), device=CPU)


def prompt_chunk(seeds: tuple[int, ...], params: SamplingParams) -> Chunk:
    sample = Sample(params=params, seeds=seeds, output_index=0)
    return Chunk(sequence_id=8, token_ids=PROMPT, start=0, block_ids=BLOCKS, sample=sample)


def plan_of(*chunks: Chunk, copies: tuple[BlockCopy, ...] = ()) -> StepPlan:
    return StepPlan(step=0, copies=copies, chunks=chunks)


def test_the_noise_is_that_of_the_position_where_the_new_token_will_stand(decoder: Decoder) -> None:
    chunk = prompt_chunk((11, 12, 13), SamplingParams(temperature=2.0))
    assert chunk.sample is not None
    logits_RV = decoder.forward(build_batch((chunk,), block_size=4, device=CPU), new_cache())
    (token_ids,) = draw(logits_RV, [chunk.sample], [len(PROMPT)])
    found = runner_of(decoder, new_cache()).run(plan_of(chunk))
    assert found == (Sampled(sequence_id=8, draws=tuple(Draw(token_ids=(id_,)) for id_ in token_ids)),)


def test_warming_up_changes_no_result(decoder: Decoder) -> None:
    chunk = prompt_chunk((1, 2), SamplingParams(temperature=1.0))
    warm = runner_of(decoder, new_cache())
    warm.warm_up()
    assert warm.run(plan_of(chunk)) == runner_of(decoder, new_cache()).run(plan_of(chunk))


def test_a_plan_of_copies_alone_copies_every_layer_s_keys_and_values(decoder: Decoder) -> None:
    cache = new_cache()
    runner = runner_of(decoder, cache)
    runner.run(plan_of(prompt_chunk((1,), SamplingParams())))
    assert runner.run(plan_of(copies=(BlockCopy(source=5, target=0), BlockCopy(source=2, target=7)))) == ()
    for tensors in (cache.key, cache.value):
        assert torch.equal(tensors[0][0], tensors[0][5])
        assert torch.equal(tensors[0][7, :3], tensors[0][2, :3])
