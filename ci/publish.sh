#!/usr/bin/env bash
# Push an image that passed its checks, list it, and ask whether everything listed can be had: ci/publish.sh NAME REPOSITORY INDEX
# SIGNING_KEY, when it is set, is a private key in PEM form; what is listed is signed with it.
set -euo pipefail
name=$1 repository=$2 index=$3
options=(--index "$index")
if [ -n "${SIGNING_KEY:-}" ]; then
  key=$(mktemp)
  trap 'rm -f "$key"' EXIT
  printf '%s\n' "$SIGNING_KEY" > "$key"
  options+=(--key "$key")
fi
sm120kit publish "$name" "$repository" "${options[@]}"
sm120kit pull --check --index "$index"
