"""One typed, frozen configuration tree, read from YAML and overridden by flags.

The tree is what a user writes (`config_sections` has its keys); `replica_settings` and `gateway_settings` turn it
into what the parts are told. Nothing else in the project reads a configuration file.
"""

from collections.abc import Mapping, Sequence
from math import floor
from pathlib import Path
from typing import Self, TypeGuard, get_args

from bakehouse_replica.core.errors import ConfigError
from bakehouse_replica.core.types import ModelSource
from bakehouse_replica.settings import ReplicaSettings
from bakehouse_replica.source import name_of
from bakehouse_router.settings import GatewaySettings
from pydantic import BaseModel, ValidationError, model_validator

from bakehouse_cluster import plain_yaml
from bakehouse_cluster.config_sections import (
    GatewaySection,
    MetricsSection,
    ModelSection,
    ReplicaSection,
    Section,
    ServerSection,
    TracingSection,
    shown,
)

# A replica with less of a CPU than this would not answer Serve's health checks in time.
MIN_CPUS = 0.05
# Wrong keys that one error names.
MAX_PROBLEMS = 10


class Config(Section):
    """The whole tree."""

    model: ModelSection = ModelSection()
    replica: ReplicaSection = ReplicaSection()
    gateway: GatewaySection = GatewaySection()
    server: ServerSection = ServerSection()
    metrics: MetricsSection = MetricsSection()
    tracing: TracingSection = TracingSection()

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.replica.autoscale is not None and "replicas" in self.server.model_fields_set:
            raise ValueError(
                f"server.replicas: it is {self.server.replicas}, but replica.autoscale says how many there are; "
                f"leave out one of the two"
            )
        return self

    @property
    def source(self) -> ModelSource:
        """Where the model comes from."""
        return ModelSource(model=self.model.source, revision=self.model.revision, weights=self.model.weights)

    @property
    def served_name(self) -> str:
        """What clients call the model."""
        return self.model.served_name or name_of(self.source)

    @property
    def n_replicas(self) -> int:
        """How many there are from the start on."""
        return self.server.replicas if self.replica.autoscale is None else self.replica.autoscale.min_replicas

    @property
    def max_replicas(self) -> int:
        """How many there may be at once."""
        return self.server.replicas if self.replica.autoscale is None else self.replica.autoscale.max_replicas

    def shared_out(self, n_cpus: int) -> Self:
        """This configuration for one machine, whose `n_cpus` are shared out among all replicas that there may be:
        `replica.cpus` and `replica.threads` are filled in, and there are no pools.

        Raises `ConfigError` where not all fit.
        """
        n_replicas = self.max_replicas
        named = "server.replicas" if self.replica.autoscale is None else "replica.autoscale.max_replicas"
        share = floor(100 * (n_cpus - self.server.gateways * self.gateway.cpus) / n_replicas) / 100
        needed = MIN_CPUS * self.replica.tensor_parallel
        if self.replica.cpus is None and share < needed:
            raise ConfigError(
                f"{named}: {n_replicas} replicas leave {max(share, 0):.2f} CPUs to each, of {n_cpus}; "
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
                "pools": (),
            }
        )
        gateway = self.gateway.model_copy(update={"pools": ()})
        return self.model_copy(update={"replica": replica, "gateway": gateway})

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
            step_timeout_s=self.replica.step_timeout_s,
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
            request_log=self.gateway.request_log,
            logs_prompts=self.gateway.log_prompts,
            traces=self.tracing.enabled,
        )


def load_config(path: Path | None, overrides: Mapping[str, object]) -> Config:
    """The configuration in the YAML file at `path`, changed by `overrides` (dotted key → value, None: keep).

    Raises `ConfigError` whose message begins with the dotted path of the wrong key.
    """
    tree = {} if path is None else read_tree(path)
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
        problems = [_describe(dict(problem)) for problem in error.errors()[:MAX_PROBLEMS]]
        n_more = error.error_count() - len(problems)
        raise ConfigError("; ".join([*problems, *([f"and {n_more} more"] if n_more else [])])) from error


def _describe(problem: Mapping[str, object]) -> str:
    location = problem["loc"]
    assert isinstance(location, tuple), "pydantic gives the path as a tuple"
    dotted = ".".join(str(part) for part in location)
    if problem["type"] == "extra_forbidden":
        return f"{dotted}: unknown key; known here: {', '.join(_model_at(location[:-1]).model_fields)}"
    message = str(problem["msg"])
    if problem["type"] == "value_error":  # ours, of several keys
        message = message.removeprefix("Value error, ")
        return f"{dotted}: {message}" if dotted else message
    if str(problem["type"]).startswith("byte_size"):
        message = "a size is expected, such as 512MiB or 2GB"
    return f"{dotted or 'configuration'}: {message[:1].lower()}{message[1:]}, not {shown(problem['input'])}"


def _model_at(location: Sequence[object]) -> type[BaseModel]:
    """The part of the tree at a path of keys."""
    model: type[BaseModel] = Config
    for key in location:
        annotation = model.model_fields[str(key)].annotation
        model = next(part for part in (annotation, *get_args(annotation)) if _is_model(part))
    return model


def _is_model(annotation: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def read_tree(path: Path) -> dict[str, object]:
    """The plain values of the YAML file at `path`; raises `ConfigError` where it is no mapping of sections."""
    try:
        tree = plain_yaml.load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except ValueError as error:  # of the encoding, too
        raise ConfigError(f"--config {path}: not YAML: {error}") from error
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
