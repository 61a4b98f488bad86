#!/usr/bin/env bash
# Push a checked image and list it in the index: ci/publish.sh NAME REPOSITORY INDEX
# SIGNING_KEY is a private key in PEM form that signs the entry; without it nothing is published.
set -euo pipefail
name=$1 repository=$2 index=$3
: "${SIGNING_KEY:?a private key in PEM form, which signs the image}"
key=$(mktemp)
trap 'rm -f "$key"' EXIT
printf '%s\n' "$SIGNING_KEY" > "$key"
sm120kit publish "$name" "$repository" --index "$index" --key "$key"
