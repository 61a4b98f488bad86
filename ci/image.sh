#!/usr/bin/env bash
# Build and verify an image: ci/image.sh RECIPE [option of `sm120kit image`]...
# The last line of stdout is the image's name.
set -euo pipefail
image=$(sm120kit image "$@")
sm120kit verify image "$image"
