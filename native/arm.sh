#!/usr/bin/env bash
# Cross-builds the native module for AArch64 and runs tests over it on emulated processors. From any folder, on Debian:
#   native/arm.sh [pytest arguments]
# Needs what `pip install .` needs, the project itself, cmake, ninja, nanobind and pytest in the current environment, Debian's
# cross compiler and emulator (installed here when this is run by root), and the network for AArch64 packages, which go to
# build/arm and nowhere else.
set -euo pipefail

root="$(cd "$(dirname "$0")/.." && pwd)"
build="$root/build/arm"
system="$build/system"
python="$(command -v python || command -v python3)"
mkdir -p "$build"

needed=()
command -v aarch64-linux-gnu-g++ >/dev/null || needed+=(g++-aarch64-linux-gnu)
command -v qemu-aarch64-static >/dev/null || needed+=(qemu-user-static)
test -x /usr/bin/python3 || needed+=(python3-minimal)
if [ "${#needed[@]}" -gt 0 ]; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "test-arm needs Debian's ${needed[*]}: as root, apt-get install ${needed[*]}, then try again."
        exit 1
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${needed[@]}"
fi

# Debian's Python for AArch64, unpacked beside the host's; apt keeps its lists and its state in the build folder.
if [ ! -e "$system/complete" ]; then
    apt="$build/apt"
    rm -rf "$system" "$apt"
    mkdir -p "$system" "$apt/lists/partial" "$apt/cache/archives/partial"
    touch "$apt/status"
    printf '%s\n' 'APT::Architecture "arm64";' 'APT::Architectures { "arm64"; };' "APT::Sandbox::User \"$(id -un)\";" \
        "Dir::State \"$apt\";" "Dir::State::status \"$apt/status\";" "Dir::Cache \"$apt/cache\";" >"$apt/apt.conf"
    apt-get -c "$apt/apt.conf" update -qq
    apt-get -c "$apt/apt.conf" install -qq -y --no-install-recommends --download-only python3 libpython3-dev libstdc++6
    for package in "$apt"/cache/archives/*.deb; do dpkg-deb -x "$package" "$system"; done
    touch "$system/complete"
fi
version="$(basename "$(echo "$system"/usr/include/python3.*)")"

# What the project and its tests depend on, but the packages whose size is that of all others many times over.
packages="$build/packages"
if [ ! -e "$packages/complete" ]; then
    rm -rf "$packages"
    "$python" - "$root/pyproject.toml" >"$build/requirements.txt" <<'END'
import sys
try:
    import tomllib
except ImportError:
    from pip._vendor import tomli as tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
print("\n".join(line for line in wanted if not line.startswith(("torch", "transformers", "triton"))))
END
    "$python" -m pip install --quiet --target "$packages" --implementation cp --python-version "${version#python}" \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
        --only-binary=:all: -r "$build/requirements.txt"
    touch "$packages/complete"
fi

# CMake asks an interpreter of the same version that this machine can run: Debian's own.
nanobind="$("$python" -c 'import nanobind, os; print(os.path.dirname(os.path.dirname(nanobind.__file__)))')"
PYTHONPATH="$nanobind" cmake -S "$root" -B "$build/native" -G Ninja -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
    -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_CXX_FLAGS="-idirafter $system/usr/include" \
    -DPython_EXECUTABLE=/usr/bin/python3 -DPython_INCLUDE_DIR="$system/usr/include/$version"
cmake --build "$build/native"

package="$build/package"
rm -rf "$package" && mkdir -p "$package/nano_vllm"
for entry in "$root"/src/nano_vllm/*; do
    case "$entry" in *.so) ;; *) ln -s "$entry" "$package/nano_vllm/" ;; esac
done
cp "$build"/native/_native*.so "$package/nano_vllm/_native.so"

emulated() {  # processor, arguments of Python
    PYTHONPATH="$package:$packages" PYTHONDONTWRITEBYTECODE=1 \
        qemu-aarch64-static -cpu "$1" -L "$system" "$system/usr/bin/$version" "${@:2}"
}

export OPENBLAS_NUM_THREADS=1
cd "$root"
# Two tests start a Python of their own, which the emulator cannot, or under a limit that it does not keep.
emulated max -m pytest -p no:cacheprovider -q -rs --timeout 3600 \
    --deselect tests/native/test_session.py::test_threads_that_cannot_start_are_told \
    --deselect tests/native/test_benchmarks.py::test_the_script_checks_by_name tests/native "$@"

# The same hashes here, on the instruction sets of this machine, on a processor with sdot and on one of the first ARMv8.
model="$("$python" -c 'from nano_vllm.sources.catalog import fetch; print(fetch("smollm2"))')"
"$python" -m tests.native.bits "$model" >"$build/bits.txt"
for cpu in max cortex-a53; do
    emulated "$cpu" -m tests.native.bits "$model" | diff "$build/bits.txt" -
    echo "qemu's $cpu: the bits of this machine"
done
