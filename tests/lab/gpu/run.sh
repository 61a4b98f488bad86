#!/bin/sh
# Run limits.cu, modules.cu, races.cu and graphs.cu on a Hopper GPU: run.sh DIRECTORY, which gets programs and receipts. nvcc and sm12x-lab are on PATH,
# python3 has torch, Triton and the laboratory.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
nvcc -std=c++17 -gencode arch=compute_120a,code=compute_120a "$here/limits.cu" -lcuda -o "$1/limits"
python3 "$here/modules.py" --build "$1/libmodules.so"
sm12x-lab run --receipt "$1/limits.json" --overwrite -- python3 "$here/limits.py" "$1/limits"
sm12x-lab run --receipt "$1/modules.json" --overwrite -- \
  python3 "$here/modules.py" "$1/libmodules.so" both=1200 code=900 hopper=-209 sm120=1200 || [ $? = 11 ] # hopper is refused
for kernel in 0 1 2 3 4 5; do
  nvcc -std=c++17 -lineinfo -gencode arch=compute_120a,code=compute_120a -DKERNEL=$kernel "$here/races.cu" -o "$1/races-$kernel"
done
PYTHONPATH=$here:${PYTHONPATH:-} python3 "$here/races.py" "$1" "$1/races.json"
sm12x-lab run --perturb 1,8 -- "$1/races-1" 3 || [ $? = 1 ] # a stage released before it is read
nvcc -std=c++17 -gencode arch=compute_120a,code=compute_120a "$here/graphs.cu" -lcuda -o "$1/graphs"
sm12x-lab run --receipt "$1/graphs.json" --overwrite -- "$1/graphs"
