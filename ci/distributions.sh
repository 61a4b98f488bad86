#!/usr/bin/env bash
# Build sdist and wheel of sm120kit in dist/: ci/distributions.sh vX.Y.Z. Uses the build backend that ci/install.sh installs.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1#v}
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
rm -rf dist
python -m build --no-isolation --outdir dist
if [ "$(cd dist && echo ./*)" != "./sm120kit-$version-py3-none-any.whl ./sm120kit-$version.tar.gz" ]; then
  echo "expected sdist and wheel of $version, not:" dist/* >&2
  exit 1
fi
