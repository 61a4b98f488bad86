#!/usr/bin/env bash
# Build sdist and wheel of sm120kit and sm12x-lab in dist/: ci/distributions.sh vX.Y.Z. Uses the build backend that ci/install.sh installs.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1#v}
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
rm -rf dist
for source in . src/sm12x_lab; do python -m build --no-isolation --outdir dist "$source"; done
expected=
for name in sm120kit sm12x_lab; do expected+=" ./$name-$version-py3-none-any.whl ./$name-$version.tar.gz"; done
if [ " $(cd dist && LC_ALL=C && echo ./*)" != "$expected" ]; then
  echo "expected sdists and wheels of $version, not:" dist/* >&2
  exit 1
fi
