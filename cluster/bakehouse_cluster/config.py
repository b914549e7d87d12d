"""One typed, frozen configuration tree, read from YAML and overridden by flags.

The tree is what a user writes; `replica_settings` and `gateway_settings` turn it into what the parts are told.
Nothing else in the project reads a configuration file.
"""

from collections.abc import Mapping
from math import floor
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from bakehouse_replica.core.errors import ConfigError
from bakehouse_replica.core.types import ModelSource
from bakehouse_replica.settings import ReplicaSettings
from bakehouse_replica.source import name_of
from bakehouse_router.settings import GatewaySettings, ToolFormatName
from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationError

from bakehouse_cluster.serve_environment import Ingress

Size = Annotated[ByteSize, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
# A replica with less of a CPU than this would not answer Serve's health checks in time.
MIN_CPUS = 0.05
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Cpus = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _switch(value: object) -> object:
    return (
        {True: "on", False: "off"}[value] if isinstance(value, bool) else value
    )  # as YAML reads a bare on and off


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelSection(_Section):
    """What is served. `source`: alias, folder, GGUF file, hub id, or `scripted:FILE`.

    `chat_template`: a file or the text. `tool_format`: how the model writes tool calls; `auto` goes by its chat
    template. `weights` `dummy`: random ones, made from the model's configuration alone.
    """

    source: Annotated[str, Field(min_length=1)] = "smollm2"
    revision: str | None = None
    served_name: str | None = None
    chat_template: str | None = None
    tool_format: ToolFormatName = "auto"
    max_model_len: Annotated[int, Field(ge=2)] | None = None  # a token of prompt and one of output
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    quantize: Literal["none", "int8"] = "none"
    kv_dtype: Literal["auto", "float32", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    weights: Literal["checkpoint", "dummy"] = "checkpoint"


class ReplicaSection(_Section):
    """What one replica may use and how it fills a step; sizes as `512MiB` or `2GB`.

    `cpus`: what Ray reserves for one replica. `threads`: compute threads of one replica. `tensor_parallel`: ranks
    that share one replica's model, memory, CPUs and threads, each with a GPU of its own where there are GPUs;
    `rank_placement`: all on one node, or on several where one has no room. A rank that is silent for
    `rank_timeout_s` is lost. `executor` `fake` draws tokens without a model, in steps of `fake_step_ms`: it shows
    what everything around a model costs. `overlap`: the next step is planned while one runs; `auto` on a GPU.
    """

    kv_memory: Size | None = None
    block_size: Count | None = None
    max_step_tokens: Count = 512
    max_sequences: Count = 64
    max_prefill_tokens: Count = 256
    max_waiting_requests: Count = 4096
    cpus: Cpus | None = None
    threads: Count | None = None
    tensor_parallel: Count = 1
    rank_placement: Literal["strict_pack", "pack"] = "strict_pack"
    rank_timeout_s: Seconds = 60.0
    executor: Literal["model", "fake"] = "model"
    fake_step_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    overlap: Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)] = "auto"


class GatewaySection(_Section):
    """Limits on what clients may send, who may send it, and what one gateway reserves.

    `keys`: a file of API keys and their tenants. `cors_origins`: web pages of these origins may call. `one_loop`:
    all of a gateway runs on one event loop, see `bakehouse_cluster.app`.
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
    keys: Path | None = None
    open_metrics: bool = False
    cors_origins: tuple[str, ...] = ()
    ignore_unknown_fields: bool = False
    keep_alive_s: Seconds = 5.0
    cpus: Cpus = 0.1
    one_loop: bool = True


class ServerSection(_Section):
    """Where and how wide the server runs.

    `host`, the ports, `ingress`, `object_store` and `allow_unauthenticated` matter to a local server only.
    `grpc_port` None offers no gRPC. `ingress`: who listens, see `bakehouse_cluster.serve_environment`.
    `allow_unauthenticated`: listen beyond loopback although nobody is asked for a key.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    grpc_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    ingress: Ingress = "direct"
    allow_unauthenticated: bool = False
    replicas: Count = 1
    gateways: Count = 1
    drain_s: Seconds = 30.0
    object_store: Annotated[ByteSize, Field(ge=80_000_000)] = ByteSize(128 * 1024 * 1024)  # Ray takes no less


class MetricsSection(_Section):
    """What is counted for whom. `vllm_names`: also as vLLM names it, so that Ray's "Serve LLM" dashboard fills."""

    vllm_names: bool = False


class Config(_Section):
    """The whole tree."""

    model: ModelSection = ModelSection()
    replica: ReplicaSection = ReplicaSection()
    gateway: GatewaySection = GatewaySection()
    server: ServerSection = ServerSection()
    metrics: MetricsSection = MetricsSection()

    @property
    def source(self) -> ModelSource:
        """Where the model comes from."""
        return ModelSource(model=self.model.source, revision=self.model.revision, weights=self.model.weights)

    @property
    def served_name(self) -> str:
        """What clients call the model."""
        return self.model.served_name or name_of(self.source)

    def shared_out(self, n_cpus: int) -> Self:
        """This configuration with `replica.cpus` and `replica.threads` filled in, so that all fit on `n_cpus`.

        Raises `ConfigError` where they cannot.
        """
        n_replicas = self.server.replicas
        share = floor(100 * (n_cpus - self.server.gateways * self.gateway.cpus) / n_replicas) / 100
        needed = MIN_CPUS * self.replica.tensor_parallel
        if self.replica.cpus is None and share < needed:
            raise ConfigError(
                f"server.replicas: {n_replicas} replicas leave {max(share, 0):.2f} CPUs to each, of {n_cpus}; "
                f"each needs {needed:g}"
            )
        n_reserved = round(n_replicas * (self.replica.cpus or share) + self.server.gateways * self.gateway.cpus, 4)
        if n_reserved > n_cpus:  # Ray would wait for ever for more
            raise ConfigError(
                f"replica.cpus and gateway.cpus reserve {n_reserved:g} CPUs; this machine has {n_cpus}"
            )
        replica = self.replica.model_copy(
            update={
                "cpus": self.replica.cpus or share,
                "threads": self.replica.threads or max(1, n_cpus // n_replicas),
            }
        )
        return self.model_copy(update={"replica": replica})

    def replica_settings(self, hash_key: bytes) -> ReplicaSettings:
        """What each replica is told; `hash_key` is one secret for all of them."""
        return ReplicaSettings(
            source=self.source,
            served_name=self.model.served_name,
            device=self.model.device,
            dtype=self.model.dtype,
            quantize=self.model.quantize,
            kv_dtype=self.model.kv_dtype,
            max_model_len=self.model.max_model_len,
            kv_memory_bytes=self.replica.kv_memory,
            block_size=self.replica.block_size,
            max_step_tokens=self.replica.max_step_tokens,
            max_sequences=self.replica.max_sequences,
            max_prefill_tokens=self.replica.max_prefill_tokens,
            max_waiting_requests=self.replica.max_waiting_requests,
            n_threads=self.replica.threads,
            tensor_parallel=self.replica.tensor_parallel,
            rank_timeout_s=self.replica.rank_timeout_s,
            executor=self.replica.executor,
            fake_step_s=self.replica.fake_step_ms / 1000,
            overlap=self.replica.overlap,
            vllm_names=self.metrics.vllm_names,
            hash_key=hash_key,
        )

    def gateway_settings(self) -> GatewaySettings:
        """What each gateway is told; reads the chat template's file where one is named."""
        return GatewaySettings(
            source=self.source,
            served_name=self.model.served_name,
            chat_template=_template_text(self.model.chat_template),
            tool_format=self.model.tool_format,
            max_body_bytes=self.gateway.max_body,
            max_choices=self.gateway.max_choices,
            max_prompts=self.gateway.max_prompts,
            max_stops=self.gateway.max_stops,
            max_stop_chars=self.gateway.max_stop_chars,
            max_logprobs=self.gateway.max_logprobs,
            max_listed_tokens=self.gateway.max_listed_tokens,
            max_schema_bytes=self.gateway.max_schema,
            max_schema_depth=self.gateway.max_schema_depth,
            max_tools=self.gateway.max_tools,
            max_queued_requests=self.gateway.max_queued_requests,
            max_queued_tokens=self.gateway.max_queued_tokens,
            keys_path=self.gateway.keys,
            opens_metrics=self.gateway.open_metrics,
            cors_origins=self.gateway.cors_origins,
            ignores_unknown_fields=self.gateway.ignore_unknown_fields,
            keep_alive_s=self.gateway.keep_alive_s,
        )


def load_config(path: Path | None, overrides: Mapping[str, object]) -> Config:
    """The configuration in the YAML file at `path`, changed by `overrides` (dotted key → value, None: keep).

    Raises `ConfigError` whose message begins with the dotted path of the wrong key.
    """
    tree = {} if path is None else _read(path)
    for dotted, value in overrides.items():
        if value is not None:
            section, key = dotted.split(".")
            part = tree.setdefault(section, {})
            if isinstance(part, dict):  # otherwise validation names the section
                part[key] = value
    return parse_config(tree)


def parse_config(tree: object) -> Config:
    """The configuration in a tree of plain values; raises `ConfigError` as `load_config` does."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("; ".join(_describe(dict(problem)) for problem in error.errors())) from error


def _describe(problem: Mapping[str, object]) -> str:
    location = problem["loc"]
    assert isinstance(location, tuple), "pydantic gives the path as a tuple"
    dotted = ".".join(str(part) for part in location) or "configuration"
    if problem["type"] == "extra_forbidden":
        section = Config.model_fields.get(str(location[0])) if len(location) > 1 else None
        model = section.annotation if section is not None else Config
        assert isinstance(model, type), "each section is a model"
        assert issubclass(model, BaseModel), "each section is a model"
        return f"{dotted}: unknown key; known here: {', '.join(model.model_fields)}"
    message = str(problem["msg"])
    if str(problem["type"]).startswith("byte_size"):
        message = "a size is expected, such as 512MiB or 2GB"
    return f"{dotted}: {message[:1].lower()}{message[1:]}, not {problem['input']!r}"


def _read(path: Path) -> dict[str, object]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"--config {path}: a mapping of sections is expected, not {type(tree).__name__}")
    return tree


def _template_text(template: str | None) -> str | None:
    """A template's text: Jinja always has a brace, a sensible file name never."""
    if template is None or "{" in template:
        return template
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template: cannot read the file {template!r}: {error}") from error
