#!/usr/bin/env bash
# Download or upload the files of a release, the index of published images among them: ci/release.sh get|put TAG DIRECTORY
# `get` creates the release if it does not exist. Requires the program gh, and GH_TOKEN.
set -euo pipefail
action=$1 tag=$2 directory=$3
mkdir -p "$directory"
case $action in
  get)
    # The section of the version in CHANGELOG.md.
    notes=$(awk -v version="${tag#v}" '/^## / { found = $2 == version || $2 == version "," } found && !/^## /' CHANGELOG.md)
    gh release view "$tag" > /dev/null || gh release create "$tag" --verify-tag --notes "$notes"
    if [ -n "$(gh release view "$tag" --json assets --jq '.assets[].name')" ]; then
      gh release download "$tag" --dir "$directory" --clobber
    fi
    ;;
  put) gh release upload "$tag" "$directory"/* --clobber ;;
  *)
    echo "expected get or put, not '$action'" >&2
    exit 2
    ;;
esac
