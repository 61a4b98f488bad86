#!/usr/bin/env bash
# Hand a checked image with its records from the job that built it to the one that publishes it: ci/hand_over.sh pack NAME DIRECTORY, then
# ci/hand_over.sh unpack DIRECTORY, which prints NAME. Nothing of the image is run. What is unpacked may be hostile: files with other names
# than the state directory has are not read, links are refused, and `sm120kit publish` compares all layers with their digests.
set -euo pipefail
state=${SM120KIT_STATE:-$HOME/.local/state/sm120kit}
case $1 in
  pack)
    name=$2 directory=$3
    mkdir -p "$directory"
    tar --create --zstd --file "$directory/state.tar.zst" --exclude context --directory "$state" sm120kit-state.lock oci images
    printf '%s\n' "$name" > "$directory/name.txt"
    ;;
  unpack)
    directory=$2
    name=$(head -c 200 "$directory/name.txt")
    if ! [[ $name =~ ^sm120kit/[a-z0-9]+:[A-Za-z0-9._-]+$ ]]; then
      echo "not the name of an image: $name" >&2
      exit 1
    fi
    mkdir -p "$state/oci" "$state/images"
    tar --extract --zstd --file "$directory/state.tar.zst" --directory "$state" --no-same-owner sm120kit-state.lock oci images
    links=$(find "$state/sm120kit-state.lock" "$state/oci" "$state/images" ! -type f ! -type d)
    if [ -n "$links" ]; then
      echo "not a file or directory: $links" >&2
      exit 1
    fi
    printf '%s\n' "$name"
    ;;
  *)
    echo "expected pack or unpack, not '$1'" >&2
    exit 2
    ;;
esac
