# Two targets of the same steps: `gpu` (the default) on SGLang's published CUDA image, `cpu` for a laptop.
#   docker build -t tokenring .
#   docker build -t tokenring:cpu --target cpu .
# pip's own settings pass through, e.g. --build-arg PIP_EXTRA_INDEX_URL=… for an index of CPU builds of torch.
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.20
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS cpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
WORKDIR /opt/tokenring
# Requirements before source, so that a change of source keeps the layer with the packages.
COPY pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY scripts/setup scripts/weight-cache scripts/
COPY scripts/support/set_up.py scripts/support/set_up.py
COPY app/__init__.py app/
RUN PIP_NO_CACHE_DIR=1 scripts/setup --profile cpu
COPY deploy/healthcheck.py deploy/
COPY app app
RUN .venv/bin/python -m compileall -q app \
    && useradd --uid 10001 --home-dir /data/cache --no-create-home tokenring \
    && install -d -o tokenring -g tokenring /data
ENV PATH=/opt/tokenring/.venv/bin:$PATH
# What is compiled or downloaded outlives the container: most compilers keep it under HOME or where SGLang tells them.
ENV HOME=/data/cache HF_HOME=/data/huggingface QUACK_CACHE_DIR=/data/cache/quack \
    SGLANG_CACHE_DIR=/data/cache/sglang SGLANG_JIT_CACHE_DIR=/data/cache/sglang/jit
ENV TOKENRING_HOST=0.0.0.0 TOKENRING_PORT=8000 TOKENRING_DATA_DIR=/data
USER tokenring
VOLUME /data
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["python", "deploy/healthcheck.py"]
ENTRYPOINT ["python", "-m", "app", "serve"]

FROM ${SGLANG_IMAGE} AS gpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
WORKDIR /opt/tokenring
COPY pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY scripts/setup scripts/weight-cache scripts/
COPY scripts/support/set_up.py scripts/support/set_up.py
COPY app/__init__.py app/
# The image has SGLang, torch and their kernels; only what is missing comes into .venv.
RUN PIP_NO_CACHE_DIR=1 scripts/setup --profile gpu --system-site-packages
COPY deploy/healthcheck.py deploy/
COPY app app
# FlashInfer writes kernels that it lacks into the package flashinfer_cubin, if that is there (flashinfer issue 2976).
RUN .venv/bin/python -m compileall -q app \
    && useradd --uid 10001 --home-dir /data/cache --no-create-home tokenring \
    && install -d -o tokenring -g tokenring /data \
    && cubins=$(.venv/bin/python -c 'import flashinfer_cubin as f; print(f.get_cubin_dir())' || true) \
    && if [ -n "$cubins" ]; then find "$cubins" -type d -exec chown tokenring {} +; fi
ENV PATH=/opt/tokenring/.venv/bin:$PATH
ENV HOME=/data/cache HF_HOME=/data/huggingface QUACK_CACHE_DIR=/data/cache/quack \
    SGLANG_CACHE_DIR=/data/cache/sglang SGLANG_JIT_CACHE_DIR=/data/cache/sglang/jit
ENV SGLANG_WEIGHT_CACHE_SOCKET_TEMPLATE=/data/weight_cache_{device_uuid}.sock \
    SGLANG_WEIGHT_CACHE_READY_TEMPLATE=/data/weight_cache_{device_uuid}.ready
ENV TOKENRING_HOST=0.0.0.0 TOKENRING_PORT=8000 TOKENRING_DATA_DIR=/data TOKENRING_TP=0
USER tokenring
VOLUME /data
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["python", "deploy/healthcheck.py"]
ENTRYPOINT ["python", "-m", "app", "serve"]
