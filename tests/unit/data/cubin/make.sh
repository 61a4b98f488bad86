#!/bin/sh
# Writes the fixtures beside it. CUDA 13.0.88; PTXAS_12_8 is ptxas of CUDA 12.8.93.
set -eu
cd "$(dirname "$0")"
a='-gencode arch=compute_120a,code=sm_120a'
f='-gencode arch=compute_120f,code=[sm_120f,compute_120f]'
nvcc -arch=sm_120a -cubin -o sm_120a.cubin kernels.cu
nvcc -arch=sm_120f -cubin -o sm_120f.cubin kernels.cu
nvcc $a $f --compress-mode=none -fatbin -o plain.fatbin kernels.cu
nvcc $a -Xfatbin=-compress-all --compress-mode=speed -fatbin -o lz4.fatbin kernels.cu
nvcc -arch=sm_120a -dc -o relocatable.o kernels.cu
nvcc $a -gencode arch=compute_121a,code=sm_121a -Xfatbin=-compress-all --compress-mode=size \
  -Xcompiler -fPIC -shared -cudart none -Xlinker -s -o zstd.so kernels.cu
scratch=$(mktemp -d)
nvcc -arch=sm_120a -dc -cubin -o "$scratch/caller.cubin" caller.cu
nvcc -arch=sm_120a -dc -cubin -o "$scratch/callee.cubin" callee.cu
nvlink -arch=sm_120a -o linked.cubin "$scratch/caller.cubin" "$scratch/callee.cubin"
for arch in 90a 120a; do
  nvcc -arch=compute_$arch -ptx -o "$scratch/kernels.ptx" kernels.cu
  sed -i 's/^\.version .*/.version 8.7/' "$scratch/kernels.ptx"
  "$PTXAS_12_8" -arch=sm_$arch -o cuda_12.sm_$arch.cubin "$scratch/kernels.ptx"
done
rm -r "$scratch"
