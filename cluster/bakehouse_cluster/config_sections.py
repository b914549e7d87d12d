"""The sections of the configuration file: which keys there are, what they may hold, what they are by default."""

from pathlib import Path
from reprlib import Repr
from typing import Annotated, Literal, Self

from bakehouse_router.settings import LogForm, ToolFormatName
from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, model_validator

from bakehouse_cluster.serve_environment import Ingress

# Up to here a number is exact wherever the configuration is read: Helm has no other than floats of 64 bits.
MAX_NUMBER = 2**53 - 1
MAX_SECONDS = 10**9


# What an error shows of a wrong value: aliases make gigabytes of a few lines of YAML.
_SHOWING = Repr()
_SHOWING.maxstring = _SHOWING.maxother = 200
_SHOWING.maxlong = 80
_SHOWING.maxlevel = 2


def shown(value: object) -> str:
    """A value in an error: in one line, which is never long."""
    return _SHOWING.repr(value)


def _number(value: object) -> object:
    """No text and no truth value is a number here, although pydantic would make one of it: Helm would not."""
    if isinstance(value, bool | str):
        raise ValueError(f"a number is expected, not {shown(value)}")
    return value


def _size(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"a size is expected, such as 512MiB or 2GB, not {value!r}")
    return value


Number = BeforeValidator(_number)
Size = Annotated[ByteSize, Field(gt=0, le=MAX_NUMBER), BeforeValidator(_size)]
# Ray takes no less.
StoreSize = Annotated[ByteSize, Field(ge=80_000_000, le=MAX_NUMBER), BeforeValidator(_size)]
Count = Annotated[int, Field(ge=1, le=MAX_NUMBER), Number]
Delay = Annotated[int, Field(ge=0, le=MAX_SECONDS), Number]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False), Number]
Cpus = Annotated[float, Field(gt=0, le=MAX_NUMBER, allow_inf_nan=False), Number]
Port = Annotated[int, Field(ge=1, le=65535), Number]
Flag = Annotated[bool, Field(strict=True)]
# A Ray node label's value, and so one of Kubernetes.
PoolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")]


def _path(value: object) -> object:
    if value == "":  # which is the working directory, to a path
        raise ValueError("a path is expected, not ''")
    return value


Text = Annotated[str, Field(min_length=1)]
FilePath = Annotated[Path, BeforeValidator(_path, json_schema_input_type=Text)]


def _switch(value: object) -> object:
    return (
        {True: "on", False: "off"}[value] if isinstance(value, bool) else value
    )  # as YAML reads a bare on and off


class Section(BaseModel):
    """Frozen; an unknown key is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelSection(Section):
    """What is served. `source`: alias, folder, GGUF file, hub id, or `scripted:FILE`.

    `chat_template`: a file or the text. `tool_format`: how the model writes tool calls; `auto` goes by its chat
    template. `weights` `dummy`: random ones, made from the model's configuration alone.
    """

    source: Text = "smollm2"
    revision: Text | None = None
    served_name: Text | None = None
    chat_template: Text | None = None
    tool_format: ToolFormatName = "auto"
    max_model_len: Annotated[int, Field(ge=2, le=MAX_NUMBER), Number] | None = (
        None  # a token of prompt and one of output
    )
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    quantize: Literal["none", "int8"] = "none"
    kv_dtype: Literal["auto", "float32", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    weights: Literal["checkpoint", "dummy"] = "checkpoint"


class AutoscaleSection(Section):
    """How many replicas there are, as their load asks.

    As many as leave `target_requests` to each, those that wait in its queue counted. More are started after
    `upscale_delay_s` of too many requests, fewer are left after `downscale_delay_s` of too few. One stays at
    least: requests do not wait in a gateway for the first replica.
    """

    min_replicas: Count
    max_replicas: Count
    target_requests: Count
    upscale_delay_s: Delay = 30
    downscale_delay_s: Delay = 600

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas is {self.min_replicas}, but max_replicas is {self.max_replicas}")
        return self


class ReplicaSection(Section):
    """What one replica may use and how it fills a step; sizes as `512MiB` or `2GB`.

    `cpus`: what Ray reserves for one replica. `threads`: compute threads of one replica. `tensor_parallel`: ranks
    that share one replica's model, memory, CPUs and threads, each with a GPU of its own where there are GPUs;
    `rank_placement`: all on one node, or on several where one has no room. A rank that is silent for
    `rank_timeout_s` is lost, and a replica that is in one step for longer than `step_timeout_s`. `executor` `fake`
    draws tokens without a model, in steps of `fake_step_ms`: it shows what everything around a model costs.
    `overlap`: the next step is planned while one runs; `auto` on a GPU. `pools`: on Kubernetes, nodes of these
    pools only; none named: anywhere. `autoscale` takes the place of `server.replicas`.
    """

    kv_memory: Size | None = None
    block_size: Count | None = None
    max_step_tokens: Count | None = None
    max_sequences: Count | None = None
    max_prefill_tokens: Count | None = None
    max_waiting_requests: Count = 4096
    cpus: Cpus | None = None
    threads: Count | None = None
    tensor_parallel: Count = 1
    rank_placement: Literal["strict_pack", "pack"] = "strict_pack"
    rank_timeout_s: Seconds = 60.0
    step_timeout_s: Seconds = 600.0
    executor: Literal["model", "fake"] = "model"
    fake_step_ms: Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False), Number] = 0.0
    overlap: Annotated[
        Literal["auto", "on", "off"],
        BeforeValidator(_switch, json_schema_input_type=Literal["auto", "on", "off"] | bool),
    ] = "auto"
    pools: tuple[PoolName, ...] = ()
    autoscale: AutoscaleSection | None = None


class GatewaySection(Section):
    """Limits on what clients may send, who may send it, what one gateway logs and reserves.

    `keys`: a file of API keys and their tenants. `cors_origins`: web pages of these origins may call.
    `request_log`: the form of each request's line in the log; `log_prompts` adds what was asked and
    answered. `one_loop`: all of a gateway runs on one event loop, see `bakehouse_cluster.app`. `pools`: as those
    of replicas.
    """

    max_body: Size = ByteSize(4 * 1024 * 1024)
    max_choices: Count = 16
    max_prompts: Count = 64
    max_stops: Count = 16
    max_stop_chars: Count = 256
    max_logprobs: Count = 20
    max_listed_tokens: Count = 1024
    max_schema: Size = ByteSize(64 * 1024)
    max_schema_depth: Count = 32
    max_tools: Count = 128
    max_queued_requests: Count = 1024
    max_queued_tokens: Count = 1_000_000
    keys: FilePath | None = None
    open_metrics: Flag = False
    cors_origins: tuple[str, ...] = ()
    ignore_unknown_fields: Flag = False
    keep_alive_s: Seconds = 5.0
    request_log: Annotated[LogForm, BeforeValidator(_switch, json_schema_input_type=LogForm | Literal[False])] = (
        "text"
    )
    log_prompts: Flag = False
    cpus: Cpus = 0.1
    one_loop: Flag = True
    pools: tuple[PoolName, ...] = ()


class MetricsSection(Section):
    """What is counted for whom. `vllm_names`: also as vLLM names it, so that Ray's "Serve LLM" dashboard fills."""

    vllm_names: Flag = False


class TracingSection(Section):
    """Whether the spans of requests are kept, and where.

    `sampling_ratio`: of the requests that come without a `traceparent`, whose own flag counts otherwise.
    `exporter`: files beside Serve's logs, or an OpenTelemetry collector. `endpoint`: where that is; None leaves it
    to OpenTelemetry's own variables, and by default to `http://localhost:4317`.
    """

    enabled: Flag = False
    sampling_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), Number] = 1.0
    exporter: Literal["files", "otlp"] = "files"
    endpoint: Annotated[str, Field(pattern=r"^https?://[^/@]+(/.*)?$")] | None = None

    @model_validator(mode="after")
    def _check_endpoint(self) -> Self:
        if self.endpoint is not None and self.exporter != "otlp":
            raise ValueError(
                f"endpoint is {self.endpoint!r}, but exporter is {self.exporter!r}; only otlp sends anything"
            )
        return self


class ServerSection(Section):
    """Where and how wide the server runs.

    `host`, `object_store` and `allow_unauthenticated` matter to a local server only. `grpc_port` None offers no
    gRPC. `ingress`: who listens, see `bakehouse_cluster.serve_environment`; on Kubernetes `proxy`, else HAProxy.
    `allow_unauthenticated`: listen beyond loopback although nobody is asked for a key.
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    grpc_port: Port | None = None
    ingress: Ingress = "direct"
    allow_unauthenticated: Flag = False
    replicas: Count = 1
    gateways: Count = 1
    drain_s: Seconds = 30.0
    object_store: StoreSize = ByteSize(128 * 1024 * 1024)
