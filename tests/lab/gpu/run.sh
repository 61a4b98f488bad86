#!/bin/sh
# Run limits.cu and modules.cu on a Hopper GPU: run.sh DIRECTORY, which gets programs and receipts. nvcc and sm12x-lab are on PATH.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
nvcc -std=c++17 -gencode arch=compute_120a,code=compute_120a "$here/limits.cu" -lcuda -o "$1/limits"
python3 "$here/modules.py" --build "$1/libmodules.so"
sm12x-lab run --receipt "$1/limits-nvidia-h100.json" --overwrite -- python3 "$here/limits.py" "$1/limits"
sm12x-lab run --receipt "$1/modules-nvidia-h100.json" --overwrite -- \
  python3 "$here/modules.py" "$1/libmodules.so" both=1200 code=900 hopper=-209 sm120=1200 || [ $? = 11 ] # hopper is refused
