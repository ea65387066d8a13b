#!/usr/bin/env bash
# `tests/compose/wheels.sh DIR`: every wheel that the images install, for builds that reach no index.
set -euo pipefail
cd "$(dirname "$0")/../.."
pip() { .venv/bin/python -m pip --quiet --disable-pip-version-check "$@"; }
for extra in "" gateway conversation usage replica; do
    # shellcheck disable=SC2046 # one requirement a word
    pip download --dest "$1" -c constraints.txt $(.venv/bin/python deploy/requirements.py pyproject.toml $extra)
done
pip download --dest "$1" --no-deps async-timeout # asked for by redis before Python 3.11.3, which Debian's is
