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
COPY scripts/setup scripts/setup
COPY scripts/support/set_up.py scripts/support/set_up.py
COPY app/__init__.py app/
RUN PIP_NO_CACHE_DIR=1 scripts/setup --profile cpu
COPY app app
RUN .venv/bin/python -m compileall -q app \
    && useradd --uid 10001 --create-home tokenring \
    && install -d -o tokenring -g tokenring /data
ENV PATH=/opt/tokenring/.venv/bin:$PATH HF_HOME=/data/huggingface
USER tokenring
VOLUME /data
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD \
    ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
ENTRYPOINT ["python", "-m", "app", "serve", "--host", "0.0.0.0", "--port", "8000", "--data-dir", "/data"]

FROM ${SGLANG_IMAGE} AS gpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
WORKDIR /opt/tokenring
COPY pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY scripts/setup scripts/setup
COPY scripts/support/set_up.py scripts/support/set_up.py
COPY app/__init__.py app/
# The image has SGLang, torch and their kernels; only what is missing comes into .venv.
RUN PIP_NO_CACHE_DIR=1 scripts/setup --profile gpu --system-site-packages
COPY app app
RUN .venv/bin/python -m compileall -q app \
    && useradd --uid 10001 --create-home tokenring \
    && install -d -o tokenring -g tokenring /data
ENV PATH=/opt/tokenring/.venv/bin:$PATH HF_HOME=/data/huggingface TOKENRING_TP=0
USER tokenring
VOLUME /data
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD \
    ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
ENTRYPOINT ["python", "-m", "app", "serve", "--host", "0.0.0.0", "--port", "8000", "--data-dir", "/data"]
