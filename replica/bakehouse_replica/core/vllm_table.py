"""The metrics that `metrics.vllm_names` adds, so that dashboards which read vLLM's names fill: Ray's "Serve LLM".

They are counted at the replica and carry the label `model_name`, as those dashboards join them with the other
metrics of the same process. Not here are those of features that bakehouse lacks: KV offloading and transfer.
"""

from bakehouse_replica.core.metric_table import QUEUE_S, TOKEN_GAP_S, Kind, Label, Metric, Source, named

_TOKENS = (1.0, 10.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0, 10000.0, 25000.0, 50000.0, 1e5)
_vllm = named(Source.REPLICA, "vllm_")


def _vllm_times(name: str, meaning: str, bounds: tuple[float, ...] = QUEUE_S) -> Metric:
    return _vllm(f"{name}_seconds", Kind.HISTOGRAM, "seconds", meaning, bounds=bounds)


VLLM_RUNNING = _vllm("num_requests_running", Kind.GAUGE, "sequences", "As `bakehouse_running_sequences`.")
VLLM_WAITING = _vllm("num_requests_waiting", Kind.GAUGE, "sequences", "As `bakehouse_waiting_sequences`.")
VLLM_SWAPPED = _vllm("num_requests_swapped", Kind.GAUGE, "sequences", "Those that wait after a preemption.")
VLLM_KV_USAGE = _vllm("kv_cache_usage_perc", Kind.GAUGE, "ratio", "Held KV blocks of all.")
VLLM_PREFIX_QUERIES = _vllm(
    "prefix_cache_queries", Kind.COUNTER, "tokens", "As `bakehouse_prefix_queried_tokens`."
)
VLLM_PREFIX_HITS = _vllm("prefix_cache_hits", Kind.COUNTER, "tokens", "As `bakehouse_prefix_hit_tokens`.")
VLLM_PROMPT_TOKENS = _vllm("prompt_tokens", Kind.COUNTER, "tokens", "Prompt tokens, at the first output token.")
VLLM_GENERATION_TOKENS = _vllm("generation_tokens", Kind.COUNTER, "tokens", "Output tokens, step by step.")
VLLM_SUCCESS = _vllm(
    "request_success",
    Kind.COUNTER,
    "requests",
    "Ended requests.",
    Label("finished_reason", ("stop", "length", "abort", "error")),
)
VLLM_TTFT = _vllm_times("time_to_first_token", "From arrival at the replica to the first output token.")
VLLM_TOKEN_TIME = _vllm_times("request_time_per_output_token", "Mean time between output tokens.", TOKEN_GAP_S)
VLLM_E2E = _vllm_times("e2e_request_latency", "From arrival at the replica to the end.")
VLLM_QUEUE_TIME = _vllm_times("request_queue_time", "From arrival to the first admission.")
VLLM_PREFILL_TIME = _vllm_times("request_prefill_time", "From the first admission to the first output token.")
VLLM_DECODE_TIME = _vllm_times("request_decode_time", "From the first output token to the last.")
VLLM_REQUEST_PROMPT_TOKENS = _vllm(
    "request_prompt_tokens", Kind.HISTOGRAM, "tokens", "Prompt of a request.", bounds=_TOKENS
)
VLLM_REQUEST_GENERATION_TOKENS = _vllm(
    "request_generation_tokens", Kind.HISTOGRAM, "tokens", "Output of a request.", bounds=_TOKENS
)

VLLM_METRICS: tuple[Metric, ...] = (
    VLLM_RUNNING,
    VLLM_WAITING,
    VLLM_SWAPPED,
    VLLM_KV_USAGE,
    VLLM_PREFIX_QUERIES,
    VLLM_PREFIX_HITS,
    VLLM_PROMPT_TOKENS,
    VLLM_GENERATION_TOKENS,
    VLLM_SUCCESS,
    VLLM_TTFT,
    VLLM_TOKEN_TIME,
    VLLM_E2E,
    VLLM_QUEUE_TIME,
    VLLM_PREFILL_TIME,
    VLLM_DECODE_TIME,
    VLLM_REQUEST_PROMPT_TOKENS,
    VLLM_REQUEST_GENERATION_TOKENS,
)
