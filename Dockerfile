# epruntime with its C++ kernels, run by a user without rights. Two variants, which differ in the build of torch:
#
#   docker build --target cpu --build-arg TORCH_INDEX_URL=INDEX -t epruntime:cpu .   INDEX: where the CPU builds are
#   docker build --target cuda -t epruntime:cuda .
#
#   docker run --rm --shm-size 1g --stop-timeout 40 -v /models:/models:ro -e EPRUNTIME_API_KEY \
#       -p 8000:8000 -p 50051:50051 epruntime:cpu serve /models/NAME --host 0.0.0.0
#
# docs/launching.md says what was tried of this and what was not. Stages: build (compiler) -> runtime -> cpu, cuda.

# Any Debian 12 or newer; the interpreter is the system's own, and the same in both stages.
ARG BASE=debian:bookworm-slim

# ---- build: the virtual environment /opt/epruntime, whole; what only building needs stays behind here.
FROM ${BASE} AS build

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/epruntime/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src

# As in the Makefile: which torch, and the index that has the build for this variant (empty: the normal index, whose
# torch is the CUDA build).
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX_URL=
COPY requirements/constraints.txt requirements/
RUN python3 -m venv /opt/epruntime \
    && pip install --constraint requirements/constraints.txt setuptools wheel \
    && pip install --constraint requirements/constraints.txt \
        ${TORCH_INDEX_URL:+--no-deps --index-url "$TORCH_INDEX_URL"} "$TORCH"

# The dependencies by themselves: this layer is made again only when they change, not with every line of the sources.
ARG EXTRAS=serve,ray,cli
COPY pyproject.toml setup.py README.md LICENSE ./
COPY epruntime/version.py epruntime/
RUN EPRUNTIME_SKIP_EXTENSION=1 pip install --constraint requirements/constraints.txt --no-build-isolation \
        ".[$EXTRAS]" \
    && pip uninstall --yes epruntime

# The kernels are built for the torch above, hence no build isolation. A wheel without them is not wanted here.
COPY csrc csrc
COPY epruntime epruntime
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && pip install --no-deps /wheels/epruntime-*.whl \
    && cd / && python -c "from epruntime.ops import extension as e; assert e.load() is not None, e.why_absent()"
COPY launch/*.py /opt/epruntime/launch/

# ---- runtime: Python, the environment, a user. No compiler, no headers, no package index.
FROM ${BASE} AS runtime

# tini: as process 1 it hands signals on (a SIGTERM drains the server) and buries what Ray leaves behind.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home --shell /bin/bash epruntime
COPY --from=build /opt/epruntime /opt/epruntime
# Login shells, which some operators start Ray in, set PATH anew: the commands are also where every PATH leads.
RUN ln -s /opt/epruntime/bin/epruntime /opt/epruntime/bin/ray /opt/epruntime/bin/torchrun /usr/local/bin/ \
    && ln -s /opt/epruntime/bin/python /usr/local/bin/python
ENV PATH=/opt/epruntime/bin:$PATH PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0
USER 1000:1000
WORKDIR /home/epruntime

# HTTP and gRPC. `serve` listens on loopback unless told --host 0.0.0.0.
EXPOSE 8000 50051
# The health service needs no access token. With TLS or another port: docker run --health-cmd "epruntime health ...".
HEALTHCHECK --interval=15s --timeout=10s --retries=3 --start-period=30m CMD ["epruntime", "health", "--timeout", "5", "--retries", "0"]
ENTRYPOINT ["/usr/bin/tini", "--", "epruntime"]
CMD ["--help"]

# ---- cpu
FROM runtime AS cpu
RUN python -c "import sys, torch; v = torch.version.cuda; sys.exit(v and f'torch is the build for CUDA {v}, gigabytes larger than needed here: set TORCH_INDEX_URL to the index of the CPU builds')"

# ---- cuda: torch brings CUDA's libraries, the host's driver comes in by the NVIDIA container toolkit (--gpus all).
# epruntime itself does not compute on GPUs yet.
FROM runtime AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN python -c "import sys, torch; sys.exit(not torch.version.cuda and f'torch {torch.__version__} was built without CUDA: leave TORCH_INDEX_URL empty, or name the index of a CUDA build')"
