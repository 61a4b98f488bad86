#!/usr/bin/env bash
# Build, check and tag an image: ci/image.sh RECIPE [option of `sm120kit build`]...
# The last line of stdout is the image's name.
set -euo pipefail
sm120kit build "$@"
