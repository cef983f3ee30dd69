#!/usr/bin/env bash
# Builds the native module with sanitizers in a folder of its own and runs tests/native over it. From any folder:
#   native/sanitize.sh [address,undefined|thread] [pytest arguments]
# Needs what `pip install .` needs, cmake, ninja, nanobind and pytest in the current environment.
set -euo pipefail

root="$(cd "$(dirname "$0")/.." && pwd)"
kind="${1:-address,undefined}"
shift || true
build="$root/build/sanitize-${kind//,/-}"
python="$(command -v python || command -v python3)"

cmake -S "$root" -B "$build" -G Ninja -DPython_EXECUTABLE="$python" -DNANO_SANITIZE="$kind"
cmake --build "$build"

# A package of links to the sources and this module, so that neither an installed nor a hand-built one is found first.
package="$build/package"
rm -rf "$package" && mkdir -p "$package/nano_vllm"
for entry in "$root"/src/nano_vllm/*; do
    case "$entry" in *.so) ;; *) ln -s "$entry" "$package/nano_vllm/" ;; esac
done
cp "$build"/_native*.so "$package/nano_vllm/"

# The sanitizer must be loaded before Python, which was built without it. Python frees little at its end: leaks are not
# looked for.
case "$kind" in
    thread) runtime="$(${CXX:-c++} -print-file-name=libtsan.so)" ;;
    *) runtime="$(${CXX:-c++} -print-file-name=libasan.so) $(${CXX:-c++} -print-file-name=libstdc++.so)" ;;
esac
cd "$root"
# It limits its address space to less than a sanitizer itself needs.
without=(--deselect tests/native/test_session.py::test_threads_that_cannot_start_are_told)
LD_PRELOAD="$runtime" ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=1" UBSAN_OPTIONS="print_stacktrace=1" \
    TSAN_OPTIONS="report_signal_unsafe=0:die_after_fork=0:exitcode=66" PYTHONPATH="$package" OPENBLAS_NUM_THREADS=1 \
    "$python" -m pytest -p no:cacheprovider -q tests/native "${without[@]}" "$@"
