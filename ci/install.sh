#!/usr/bin/env bash
# The tool of this checkout with everything that images need, on the PATH of this job's next steps.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -m venv .venv
.venv/bin/pip install --quiet '.[cuda,torch,docker]'
.venv/bin/sm120kit --help > /dev/null
if [ -n "${GITHUB_PATH:-}" ]; then echo "$PWD/.venv/bin" >> "$GITHUB_PATH"; fi
