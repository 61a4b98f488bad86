#!/usr/bin/env bash
# Push a checked image and list it in the index: ci/publish.sh NAME REPOSITORY INDEX
# SIGNING_KEY, if set, is a private key in PEM form that signs the entry.
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
