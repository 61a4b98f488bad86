#!/usr/bin/env bash
# The index of published images, and what lies beside it, as files of a release: ci/release.sh get|put TAG DIRECTORY
# `get` makes the release when it is not there yet. Needs the program gh, and GH_TOKEN.
set -euo pipefail
what=$1 tag=$2 directory=$3
mkdir -p "$directory"
case $what in
  get)
    gh release view "$tag" > /dev/null || gh release create "$tag" --verify-tag --generate-notes
    if [ -n "$(gh release view "$tag" --json assets --jq '.assets[].name')" ]; then
      gh release download "$tag" --dir "$directory" --clobber
    fi
    ;;
  put) gh release upload "$tag" "$directory"/* --clobber ;;
  *)
    echo "get or put, not '$what'" >&2
    exit 2
    ;;
esac
