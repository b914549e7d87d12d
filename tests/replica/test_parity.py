"""Greedy ids equal transformers' float32 `generate`, under everything that scheduling can do to a request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
import torch
from bakehouse_kernels.dispatch import select_ops
from bakehouse_replica.core.executor import Executor, Pending, execute
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.scheduler import Scheduler
from bakehouse_replica.core.types import (
    Capacity,
    FinishReason,
    ModelSource,
    Request,
    SchedulingPolicy,
    StepPlan,
    TokenDelta,
)
from bakehouse_replica.executors.in_process import InProcessExecutor, build_executor
from bakehouse_replica.executors.tensor_parallel import gather
from bakehouse_replica.model.checkpoint import open_checkpoint
from bakehouse_replica.model.collective import Collective
from bakehouse_replica.model.sharding import Shard, local_spec
from bakehouse_replica.model.spec import ModelSpec, read_spec
from bakehouse_replica.model.weights import load_weights
from bakehouse_replica.source import ModelFiles, open_source
from bakehouse_router.text.model_text import load_model_text
from ranks import leader_of
from transformers import LlamaConfig, LlamaForCausalLM

MAX_STEP_TOKENS = 64
# Two float32 implementations may order their sums differently; a closer race than this is not an error.
EXCUSED_MARGIN = 1e-3


@dataclass
class Recorder:
    """An executor that carries out every plan and counts what scheduling did."""

    inner: Executor
    n_preemptions: int = 0
    n_partial_prefills: int = 0
    n_mixed_steps: int = 0
    _reached: dict[int, int] = field(default_factory=dict)

    @property
    def capacity(self) -> Capacity:
        return self.inner.capacity

    def begin(self, plan: StepPlan) -> Pending:
        assert sum(len(chunk.token_ids) for chunk in plan.chunks) <= MAX_STEP_TOKENS
        for chunk in plan.chunks:
            # A sequence goes back only where its blocks were taken from it.
            self.n_preemptions += chunk.start < self._reached.get(chunk.sequence_id, 0)
            self._reached[chunk.sequence_id] = chunk.start + len(chunk.token_ids)
            self.n_partial_prefills += chunk.sample is None
        self.n_mixed_steps += len({len(chunk.token_ids) > 1 for chunk in plan.chunks}) == 2
        return self.inner.begin(plan)

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True)
class Served:
    """What a crowd of requests got, and how."""

    output_ids: dict[str, tuple[int, ...]]
    cached_tokens: dict[str, int]
    recorder: Recorder


def serve(executor: Executor, arrivals: Mapping[int, Sequence[Request]], max_model_len: int) -> Served:
    """Runs all requests, each added before its step, with an audit after every event."""
    recorder = Recorder(executor)
    scheduler = Scheduler(
        capacity=executor.capacity,
        policy=SchedulingPolicy(max_model_len=max_model_len),
        model_digest="",
        hash_key=b"",
    )
    served = Served({}, {}, recorder)
    step = 0
    while step <= max(arrivals) or scheduler.has_work:
        for request in arrivals.get(step, ()):
            scheduler.add(request, float(step))
            served.output_ids[request.request_id] = ()
        plan = scheduler.plan(float(step))
        scheduler.check()
        if plan is not None:
            _book(served, scheduler.apply(recorder.begin(plan).result(), float(step)))
            scheduler.check()
        step += 1
    assert scheduler.load().n_held_blocks == 0
    return served


def _book(served: Served, deltas: Sequence[TokenDelta]) -> None:
    for delta in deltas:
        assert delta.start == len(served.output_ids[delta.request_id])
        served.output_ids[delta.request_id] += delta.token_ids
        if delta.finish is not None:
            assert delta.finish in (FinishReason.LENGTH, FinishReason.STOP)
            assert delta.usage is not None
            served.cached_tokens[delta.request_id] = delta.usage.cached_tokens


def third_of_demand(prompts: Sequence[tuple[int, ...]], max_tokens: int, block_size: int) -> int:
    """A third of the blocks that all requests together would hold, or what the longest one needs."""
    demand = [-(-(len(prompt) + max_tokens) // block_size) for prompt in prompts]
    return max(sum(demand) // 3, max(demand) + 1)


def arrivals_of(
    prompts: Sequence[tuple[int, ...]], max_tokens: int, stop_ids: tuple[int, ...]
) -> dict[int, list[Request]]:
    """The four longest arrive late and are more urgent, so that they take the place of those that run."""
    arrivals: dict[int, list[Request]] = {}
    urgent = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))[-4:]
    for index, prompt in enumerate(prompts):
        request = Request(
            request_id=f"{index}",
            prompt_ids=prompt,
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=index, stop_token_ids=stop_ids),
            priority=-1 if index in urgent else 0,
        )
        arrivals.setdefault(12 * (1 + urgent.index(index)) if index in urgent else 0, []).append(request)
    return arrivals


@dataclass(frozen=True)
class Expected:
    """What transformers generates, and by how much each id led the runner-up."""

    output_ids: tuple[int, ...]
    margins: tuple[float, ...]


def generate_all(
    oracle: LlamaForCausalLM, prompts: Sequence[tuple[int, ...]], max_tokens: int, stop_ids: tuple[int, ...]
) -> dict[tuple[int, ...], Expected]:
    """`generate` for each distinct prompt; four of similar length share a call, which costs as much as one."""
    by_length = sorted(set(prompts), key=len)
    expected: dict[tuple[int, ...], Expected] = {}
    for begin in range(0, len(by_length), 4):
        expected.update(_generate(oracle, by_length[begin : begin + 4], max_tokens, stop_ids))
    return expected


def _generate(
    oracle: LlamaForCausalLM, prompts: Sequence[tuple[int, ...]], max_tokens: int, stop_ids: tuple[int, ...]
) -> dict[tuple[int, ...], Expected]:
    width = max(map(len, prompts))
    output = oracle.generate(
        torch.tensor([(0,) * (width - len(prompt)) + prompt for prompt in prompts]),
        attention_mask=torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best_RK2 = torch.stack(output.logits, dim=1).topk(2).values
    expected = {}
    for row, prompt in enumerate(prompts):
        ids = output.sequences[row, width:].tolist()
        n_output = next((index + 1 for index, token_id in enumerate(ids) if token_id in stop_ids), len(ids))
        margins = (best_RK2[row, :, 0] - best_RK2[row, :, 1]).tolist()
        expected[prompt] = Expected(tuple(ids[:n_output]), tuple(margins[:n_output]))
    return expected


def count_excused(
    prompts: Sequence[tuple[int, ...]], served: Served, expected: Mapping[tuple[int, ...], Expected]
) -> int:
    """Asserts equality prompt by prompt; prints and counts the differences that a close race excuses."""
    n_excused = 0
    for index, prompt in enumerate(prompts):
        found, wanted = served.output_ids[f"{index}"], expected[prompt]
        if found == wanted.output_ids:
            continue
        at = next(k for k, pair in enumerate(zip(found, wanted.output_ids, strict=False)) if pair[0] != pair[1])
        print(f"prompt {index} of {len(prompt)} tokens differs at output {at}; margin {wanted.margins[at]:.2e}")
        assert wanted.margins[at] < EXCUSED_MARGIN, f"expected {wanted.output_ids}, found {found}"
        n_excused += 1
    return n_excused


def oracle_for(files: ModelFiles, spec: ModelSpec) -> LlamaForCausalLM:
    """transformers' own model, in float32, with the tensors of the same checkpoint."""
    theta = round(spec.rope_frequencies[1] ** (-spec.head_dim / 2))
    config = LlamaConfig(
        vocab_size=spec.vocabulary_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.feed_forward_size,
        num_hidden_layers=spec.n_layers,
        num_attention_heads=spec.n_heads,
        num_key_value_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.context_length,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": float(theta)},
        tie_word_embeddings=spec.has_tied_head,
        dtype=torch.float32,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    with open_checkpoint(files, spec) as checkpoint:
        state = {
            name: checkpoint.read(name).float()
            for name in model.state_dict()
            if not (spec.has_tied_head and name == "lm_head.weight")
        }
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    model.train(False)
    return model


def executor_for(files: ModelFiles, spec: ModelSpec, n_blocks: int, block_size: int = 16) -> Executor:
    return build_executor(
        spec=spec,
        weights=load_weights(files, spec, dtype=torch.float32, device=torch.device("cpu")),
        ops=select_ops(torch.device("cpu"), torch.float32, torch.get_num_threads()),
        capacity=Capacity(
            n_blocks=n_blocks, block_size=block_size, max_step_tokens=MAX_STEP_TOKENS, max_sequences=24
        ),
    )


def shared_executor_for(files: ModelFiles, spec: ModelSpec, n_blocks: int, n_ranks: int) -> Executor:
    """The same model on several ranks, each of which reads its slices of the weights."""

    def load(collective: Collective) -> InProcessExecutor:
        shard = Shard(collective.rank, collective.size)
        return build_executor(
            spec=local_spec(spec, shard),
            weights=load_weights(files, spec, dtype=torch.float32, device=torch.device("cpu"), shard=shard),
            ops=select_ops(torch.device("cpu"), torch.float32, 1),
            capacity=Capacity(n_blocks=n_blocks, block_size=16, max_step_tokens=MAX_STEP_TOKENS, max_sequences=24),
            collective=collective,
        )

    return gather(leader_of(n_ranks, load), load)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A random model of 4 layers, grouped queries and an untied head."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.15,  # at the usual 0.02 all logits are nearly equal
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return open_source(ModelSource(model=str(folder)), cache_root=folder / "cache")


# 24 lengths from 3 to 900, blocks of 16 and chunks of 64 met exactly, by one more and by one less.
LENGTHS = (
    3,
    5,
    15,
    16,
    17,
    31,
    33,
    47,
    64,
    65,
    90,
    100,
    127,
    128,
    150,
    180,
    200,
    230,
    260,
    300,
    350,
    420,
    600,
    900,
)


def prompts_from(text_ids: Sequence[int]) -> list[tuple[int, ...]]:
    """24 prompts in mixed order: every third shares a common beginning, the others begin anywhere; two repeat."""
    random = Random(3)
    prompts = []
    for index, length in enumerate(LENGTHS):
        begin = 0 if index % 3 == 0 else random.randrange(len(text_ids) - length)
        prompts.append(tuple(text_ids[begin : begin + length]))
    prompts[3], prompts[8] = prompts[20], prompts[16]
    prompts[0] = tuple(text_ids[:3])
    random.shuffle(prompts)
    return prompts


def check_parity(
    files: ModelFiles,
    prompts: list[tuple[int, ...]],
    max_tokens: int,
    stop_ids: tuple[int, ...],
    n_ranks: int = 1,
) -> None:
    spec = read_spec(files)
    n_blocks = third_of_demand(prompts, max_tokens, 16)
    if n_ranks == 1:
        executor = executor_for(files, spec, n_blocks)
    else:
        executor = shared_executor_for(files, spec, n_blocks, n_ranks)
    arrivals = arrivals_of(prompts, max_tokens, stop_ids)
    served = serve(executor, arrivals, max_model_len=1024)
    executor.close()
    recorder = served.recorder
    print(
        f"{recorder.n_preemptions} preemptions, {recorder.n_partial_prefills} partial prefills, "
        f"{recorder.n_mixed_steps} mixed steps, {sum(served.cached_tokens.values())} cached tokens"
    )
    assert recorder.n_preemptions > 0
    assert recorder.n_partial_prefills > 0
    assert recorder.n_mixed_steps > 0
    assert sum(served.cached_tokens.values()) > 0
    expected = generate_all(oracle_for(files, spec), prompts, max_tokens, stop_ids)
    assert count_excused(prompts, served, expected) <= 1


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_greedy_ids_of_a_random_model_equal_those_of_transformers(tiny: ModelFiles, n_ranks: int) -> None:
    random = Random(5)
    prompts = prompts_from([random.randrange(500) for _ in range(2000)])
    check_parity(tiny, prompts, max_tokens=16, stop_ids=(7, 8), n_ranks=n_ranks)


@pytest.mark.e2e
@pytest.mark.timeout(900)  # 45 s on two quiet cores, several times as much on busy ones
def test_greedy_ids_of_the_default_model_equal_those_of_transformers() -> None:
    files = open_source(ModelSource())
    licence = Path(__file__).parents[2] / "LICENSE"
    text_ids = load_model_text(files).tokenizer.encode_raw(licence.read_text())
    check_parity(files, prompts_from(text_ids), max_tokens=16, stop_ids=(2,))


@pytest.mark.parametrize("n_ranks", [1, 2, 4])  # of four, two have copies of each key head
def test_choices_share_the_prompt_until_they_write(tiny: ModelFiles, n_ranks: int) -> None:
    executor = executor_for(tiny, read_spec(tiny), n_blocks=20)
    if n_ranks > 1:
        executor = shared_executor_for(tiny, read_spec(tiny), 20, n_ranks)
    scheduler = Scheduler(
        capacity=executor.capacity, policy=SchedulingPolicy(max_model_len=256), model_digest="", hash_key=b""
    )
    prompt = tuple(range(17))
    params = SamplingParams(n=4, temperature=0.0, max_tokens=20, seed=1)
    scheduler.add(Request(request_id="r", prompt_ids=prompt, params=params), 0.0)
    held: list[int] = []
    output_ids: list[tuple[int, ...]] = [()] * 4
    while (plan := scheduler.plan(0.0)) is not None:
        for delta in scheduler.apply(execute(executor, plan), 0.0):
            output_ids[delta.choice] += delta.token_ids
        scheduler.check()
        held.append(scheduler.load().n_held_blocks)
    executor.close()
    # The prompt's two blocks; then each choice writes position 17: three copy the second block, the last keeps it.
    assert held[:2] == [2, 5]
    expected = generate_all(oracle_for(tiny, read_spec(tiny)), [prompt], 20, ())
    assert output_ids == [expected[prompt].output_ids] * 4
