# An image that serves: docker build -t warmturn .   See docs/deploy.md.
#
# TORCH_INDEX names an index with torch's builds for what the image shall run on: CPU, CUDA of some version. Without one
# the plain build is taken, which on Linux x86-64 is CUDA's, serves on a CPU too, and is several GB.
# EXTRAS names extras of pyproject.toml, PACKAGES packages of Debian, separated by spaces.

FROM python:3.11-slim-bookworm AS dependencies

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/pip \
 && python3 -m venv --without-pip /opt/venv
WORKDIR /build

ARG TORCH=2.13.0
ARG TORCH_INDEX=
COPY constraints.txt ./
RUN /opt/pip/bin/pip --python /opt/venv/bin/python install -c constraints.txt \
    ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "torch==$TORCH"

ARG EXTRAS="postgres otel"
COPY pyproject.toml ./
RUN python3 -c "import sys, tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
      print(*p['dependencies'], *(r for e in sys.argv[1:] for r in p['optional-dependencies'][e]), sep='\n')" \
    $EXTRAS > requirements.txt \
 && /opt/pip/bin/pip --python /opt/venv/bin/python install -c constraints.txt -r requirements.txt


FROM dependencies AS build

# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
COPY README.md LICENSE ./
COPY cache cache
COPY scheduler scheduler
COPY server server
RUN /opt/pip/bin/pip --python /opt/venv/bin/python install --no-deps --root /opt/own .
COPY deploy/kernels.py ./
RUN PYTHONPATH=/build XDG_CACHE_HOME=/opt/cache /opt/venv/bin/python kernels.py


FROM python:3.11-slim-bookworm

LABEL org.opencontainers.image.title="warmturn" \
      org.opencontainers.image.description="Text generation over HTTP with one persistent KV cache per session" \
      org.opencontainers.image.licenses="Apache-2.0"

# tini is process 1: it passes signals on from the first moment, and buries orphans.
ARG PACKAGES=
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends tini $PACKAGES \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 warmturn \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /data --shell /usr/sbin/nologin warmturn \
 && install -d -o warmturn -g warmturn -m 0700 /data \
 && install -d -o warmturn -g warmturn /models

# Each of these is a layer, the largest and the least often changed first. Triton, which only torch's CUDA builds bring,
# compiles for the GPU that it finds, and wants a C compiler for that.
COPY --from=dependencies /opt/venv /opt/venv
# hadolint ignore=DL3008
RUN if [ -d /opt/venv/lib/python3.11/site-packages/triton ]; then \
      apt-get update \
      && apt-get install -y --no-install-recommends gcc libc6-dev \
      && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=build --chown=10001:10001 /opt/cache /opt/cache
COPY --from=build /opt/own/opt/venv /opt/venv

# All that is written goes to /data and /models, but for sockets in /tmp. What Triton compiles must lie where files may be
# executed, which /tmp often forbids.
ENV PATH=/opt/venv/bin:$PATH \
    XDG_CACHE_HOME=/opt/cache \
    TILE_CACHE_DIR=/data/tiles \
    TRITON_CACHE_DIR=/data/triton \
    TORCHINDUCTOR_CACHE_DIR=/data/layers \
    HF_HOME=/models \
    WARMTURN_DATA_DIR=/data \
    WARMTURN_HOST=0.0.0.0 \
    WARMTURN_PORT=8000

USER 10001:10001
WORKDIR /data
VOLUME ["/data", "/models"]
EXPOSE 8000
STOPSIGNAL SIGTERM

# Not before the model is there: until start-period has passed, failures do not count.
HEALTHCHECK --start-period=30m --interval=10s --timeout=5s --retries=3 \
  CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(f'http://127.0.0.1:{os.environ[\"WARMTURN_PORT\"]}/health', timeout=4)"]

ENTRYPOINT ["tini", "--", "warmturn"]
CMD ["serve"]
