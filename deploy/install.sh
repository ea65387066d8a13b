#!/bin/sh
# In the build: install what the project, or an extra of it, needs. Wheels laid into deploy/wheels are used first.
set -eu
cd "$(dirname "$0")"
python requirements.py pyproject.toml "$@" > /tmp/requirements.txt
if [ -s /tmp/requirements.txt ]; then
    pip install --no-cache-dir --root-user-action=ignore --disable-pip-version-check \
        --find-links wheels -c constraints.txt -r /tmp/requirements.txt
fi
rm /tmp/requirements.txt
