#!/usr/bin/env bash
# Push a checked image and list it in the index: ci/publish.sh NAME REPOSITORY INDEX
# SIGNING_KEY, if set, is a private key in PEM form that signs the entry. Without it, a job with an identity signs by that.
set -euo pipefail
name=$1 repository=$2 index=$3
options=(--index "$index")
if [ -n "${SIGNING_KEY:-}" ]; then
  key=$(mktemp)
  trap 'rm -f "$key"' EXIT
  printf '%s\n' "$SIGNING_KEY" > "$key"
  options+=(--key "$key")
elif [ -n "${ACTIONS_ID_TOKEN_REQUEST_URL:-}" ]; then
  options+=(--keyless)
fi
sm120kit publish "$name" "$repository" "${options[@]}"
