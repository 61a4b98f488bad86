# Make /opt/cuda a CUDA home of NVIDIA's wheels, as compilers at run time want one; and put the entrypoint and the health check in their place.
#
# nvcc and FlashInfer look for libraries in lib64 and without versions, the wheels have them in lib and with. The driver's library
# comes with the GPU, and what is linked against it needs its name and its functions before: a stub, used by linkers only.
set -eu
wheels=$(echo /overlay/opt/venv/lib/python3*/site-packages/nvidia/cu13)
home=/toolkit/opt/cuda
mkdir -p "$home/lib" "$home/lib64/stubs" /toolkit/opt/sm120kit
for name in bin include nvvm; do
    ln -s "${wheels#/overlay}/$name" "$home/$name"
done
for file in "$wheels"/lib/lib*; do
    name=${file##*/}
    ln -s "${file#/overlay}" "$home/lib64/$name"
    case $name in
        *.so.13*) ln -s "${file#/overlay}" "$home/lib/$name" ;;
    esac
    case $name in
        *.so.*) ln -sf "$name" "$home/lib64/${name%%.so.*}.so" ;;
    esac
done
if command -v c++ > /dev/null; then  # without, nothing can be compiled at run time either, and the image's checks fail
    grep -oE '\bcu[A-Z][A-Za-z0-9_]*' "$wheels/include/cuda.h" | sort -u | sed 's/.*/int &(void) { return 34; }/' \
        | c++ -x c - -shared -fPIC -w -fno-builtin -Wl,-soname,libcuda.so.1 -o "$home/lib64/stubs/libcuda.so"
fi
cp /context/engine/healthy.py /context/engine/serve.py /context/engine/help.txt /toolkit/opt/sm120kit/
find /toolkit -exec touch --no-dereference --date="@${SOURCE_DATE_EPOCH}" {} +
