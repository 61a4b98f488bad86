#!/usr/bin/env bash
# Build and verify an image: ci/image.sh RECIPE BASE [option of `sm120kit image`]...
# BASE is NAME@sha256:... or the id of a local image. The last line of stdout is the image's name.
set -euo pipefail
recipe=$1 base=$2
shift 2
image=$(sm120kit image "$recipe" --base "$base" "$@")
sm120kit verify image "$image"
