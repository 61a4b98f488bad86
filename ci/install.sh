#!/usr/bin/env bash
# Install sm120kit of this checkout with everything that images need, on the PATH of the job's next steps. The job may have secrets, so
# only files that ci/requirements.txt lists by hash are installed; `nox -s lock` writes it.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -m venv .venv
.venv/bin/pip install --quiet --only-binary :all: --no-deps --require-hashes --requirement ci/requirements.txt
.venv/bin/pip install --quiet --no-deps --no-build-isolation .
.venv/bin/pip check
.venv/bin/sm120kit --help > /dev/null
if [ -n "${GITHUB_PATH:-}" ]; then echo "$PWD/.venv/bin" >> "$GITHUB_PATH"; fi
