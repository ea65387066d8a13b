# One file, a target per service:  gateway conversation router relay safety usage replica replica-stub replica-cuda ops
#
#   common ──> gateway, conversation, usage, ops    and the packages of that extra
#          ──> router, relay, safety, replica-stub  nothing more
#          ──> replica                              torch for the CPU, and the native kernels, compiled elsewhere
#          ──> replica-cuda                         torch with CUDA, and flash-attn, compiled elsewhere
#
# Build arguments: PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_NO_INDEX as pip knows them; wheels laid into deploy/wheels
# come first. CUDA_IMAGE: where the CUDA compiler comes from.
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu22.04

# --- what is copied in; holds no system of its own ---------------------------------------------------------
FROM scratch AS recipe
COPY pyproject.toml constraints.txt deploy/requirements.py deploy/install.sh /
COPY deploy/wheels /wheels

FROM scratch AS code
COPY services/__init__.py /app/services/
COPY shared /app/shared
COPY deploy/__init__.py deploy/start.py deploy/health.py /app/deploy/

# --- what every image has ----------------------------------------------------------------------------------
FROM python:3.11-slim-bookworm AS common
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_INDEX
ENV PYTHONPATH=/app PYTHONUNBUFFERED=1 LC_ALL=C.UTF-8 CHORUS_HTTP_HOST=0.0.0.0 CHORUS_HTTP_PORT=8080
# A user per service, so that in a shared volume each reads only what is his. compose.yaml names the first two by number.
RUN id=10001; for name in nats valkey gateway conversation router replica relay safety usage fleet ops; do \
        groupadd --gid $id $name && useradd --uid $id --gid $id --no-create-home --home-dir /tmp --shell /bin/false $name \
        && id=$((id + 1)) || exit 1; \
    done
RUN --mount=type=bind,from=recipe,target=/recipe sh /recipe/install.sh
WORKDIR /app
STOPSIGNAL SIGTERM
EXPOSE 8080
HEALTHCHECK --interval=5s --timeout=4s --start-period=120s --retries=3 CMD ["python", "-S", "/app/deploy/health.py"]
ENTRYPOINT ["python", "-m", "deploy.start"]

# --- doors -------------------------------------------------------------------------------------------------
FROM common AS gateway
RUN --mount=type=bind,from=recipe,target=/recipe sh /recipe/install.sh gateway
COPY --from=code / /
COPY services/gateway services/gateway
RUN python -m compileall -q /app
USER gateway
CMD ["gateway"]

FROM common AS relay
COPY --from=code / /
COPY services/relay services/relay
RUN python -m compileall -q /app
USER relay
CMD ["relay"]

# --- behind the doors --------------------------------------------------------------------------------------
FROM common AS conversation
RUN --mount=type=bind,from=recipe,target=/recipe sh /recipe/install.sh conversation
COPY --from=code / /
COPY services/conversation services/conversation
RUN python -m compileall -q /app
USER conversation
CMD ["conversation"]

FROM common AS router
COPY --from=code / /
COPY services/router services/router
RUN python -m compileall -q /app
USER router
CMD ["router"]

FROM common AS safety
COPY --from=code / /
COPY services/safety services/safety
RUN python -m compileall -q /app
USER safety
CMD ["safety"]

FROM common AS usage
RUN --mount=type=bind,from=recipe,target=/recipe sh /recipe/install.sh usage
COPY --from=code / /
COPY services/usage services/usage
RUN python -m compileall -q /app
USER usage
CMD ["usage"]

# --- replicas ----------------------------------------------------------------------------------------------
FROM common AS replica-stub
COPY --from=code / /
COPY services/replica services/replica
RUN python -m compileall -q /app
USER replica
CMD ["replica"]

# The kernels for every kind of processor; the replica picks the one that its machine can run.
FROM python:3.11-bookworm AS kernels
WORKDIR /app
ENV PYTHONPATH=/app
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_INDEX
RUN --mount=type=bind,from=recipe,target=/recipe \
    pip install --no-cache-dir --root-user-action=ignore --find-links /recipe/wheels -c /recipe/constraints.txt numpy msgspec
COPY --from=code / /
COPY services/replica services/replica
RUN python -m services.replica.model.native

FROM common AS replica
RUN --mount=type=bind,from=recipe,target=/recipe sh /recipe/install.sh replica
COPY --from=code / /
COPY services/replica services/replica
COPY --from=kernels /app/services/replica/model/native/built services/replica/model/native/built
RUN python -m compileall -q /app
USER replica
CMD ["replica"]

# Compiling flash-attn takes an hour or so; a wheel of the release in constraints.txt, laid into deploy/wheels, saves it.
# Build arguments: MAX_JOBS, files compiled at once (9 GB of memory each); FLASH_ATTN_CUDA_ARCHS, for which GPUs
# (80: A100 and its like, 90: H100, 100: B200, 120: RTX 50). The toolkit's major release must be that of torch's own.
FROM ${CUDA_IMAGE} AS cuda
FROM python:3.11-bookworm AS flash
ARG PIP_INDEX_URL
ARG PIP_NO_INDEX
ARG MAX_JOBS=4
ARG FLASH_ATTN_CUDA_ARCHS="80;90;100;120"
COPY --from=cuda /usr/local/cuda /usr/local/cuda
ENV CUDA_HOME=/usr/local/cuda
RUN --mount=type=bind,from=recipe,target=/recipe \
    pip install --no-cache-dir --root-user-action=ignore --find-links /recipe/wheels -c /recipe/constraints.txt \
        torch setuptools wheel ninja packaging psutil \
    && python -c "import torch; assert torch.version.cuda, 'the torch in deploy/wheels knows no CUDA: take it out'" \
    && pip wheel --no-deps --no-build-isolation --find-links /recipe/wheels -c /recipe/constraints.txt \
        --wheel-dir /flash flash-attn

FROM common AS replica-cuda
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
# The ordinary index only: the other one holds torch without CUDA.
RUN --mount=type=bind,from=recipe,target=/recipe PIP_EXTRA_INDEX_URL= sh /recipe/install.sh replica
RUN --mount=type=bind,from=flash,source=/flash,target=/flash \
    --mount=type=bind,from=recipe,target=/recipe \
    PIP_EXTRA_INDEX_URL= pip install --no-cache-dir --root-user-action=ignore --find-links /recipe/wheels \
        -c /recipe/constraints.txt einops /flash/*.whl \
    && python -c "import torch, flash_attn; assert torch.version.cuda, 'torch knows no CUDA'"
COPY --from=code / /
COPY services/replica services/replica
RUN python -m compileall -q /app
USER replica
CMD ["replica"]

# --- the operator's command, and the steps before and after the services -----------------------------------
FROM common AS ops
RUN --mount=type=bind,from=recipe,target=/recipe sh /recipe/install.sh usage
COPY --from=code / /
COPY services/conversation/__init__.py services/conversation/key_store.py services/conversation/
COPY ops ops
COPY deploy/*.py deploy/
RUN python -m compileall -q /app
HEALTHCHECK NONE
USER ops
CMD ["ops"]
