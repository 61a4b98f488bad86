#!/usr/bin/env bash
# Build the documentation site. A broken link fails.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -m venv .venv
.venv/bin/pip install --quiet nox
.venv/bin/nox -s docs
