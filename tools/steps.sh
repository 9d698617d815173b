# Sourced by the tools that run several steps: names each, times it, and says which one failed.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Nothing is cached outside the tree unless the caller wants it. `make clean` leaves the cache.
export CCACHE_DIR="${CCACHE_DIR:-$PWD/.ccache}"
# Builds of one configuration share objects, whatever folder they are made in.
export CCACHE_NOHASHDIR=1 CCACHE_BASEDIR="${CCACHE_BASEDIR:-$PWD}"
# That includes the compiler's name, for which CMake and scikit-build have defaults of their own.
export CC="${CC:-cc}" CXX="${CXX:-c++}"
# Precompiled headers are not cached otherwise. No source asks for the time.
export CCACHE_SLOPPINESS=pch_defines,time_macros
export CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
export CTEST_PARALLEL_LEVEL="${CTEST_PARALLEL_LEVEL:-$(nproc)}"
all_started=$SECONDS

# Processor seconds, user and system, of all commands that have ended so far.
cpu_seconds() { awk -v ticks="$(getconf CLK_TCK)" '{ printf "%d", ($16 + $17) / ticks }' /proc/$$/stat; }

# step NAME COMMAND...
step() {
  local name=$1 started=$SECONDS status=0 cpu_started
  cpu_started=$(cpu_seconds)
  shift
  printf '\n==> %s\n' "$name"
  # A subshell, and not `if`, so that `set -e` holds inside functions that are steps.
  set +e
  (set -e; "$@")
  status=$?
  set -e
  if ((status != 0)); then
    printf '\n==> FAILED: %s (exit %d, after %d s)\n' "$name" "$status" "$((SECONDS - started))" >&2
    exit "$status"
  fi
  printf '==> ok: %s (%d s, %d CPU s)\n' "$name" "$((SECONDS - started))" \
    "$(($(cpu_seconds) - cpu_started))"
}

# beside NAME COMMAND...: begins a step that has what the steps after it leave of the processors.
# `joined` waits for it and prints its output.
beside() {
  beside_name=$1 beside_started=$SECONDS
  shift
  beside_log=$(mktemp)
  trap 'kill -- "-$beside_pid" 2>/dev/null || true; rm -f "$beside_log"' EXIT
  set -m # a group of its own, so that all of it ends where a step fails
  (
    set -e
    renice -n 10 "$BASHPID" >/dev/null
    "$@"
  ) >"$beside_log" 2>&1 </dev/null &
  beside_pid=$!
  set +m
  printf '\n==> %s: begun\n' "$beside_name"
}

joined() {
  local status=0
  wait "$beside_pid" || status=$?
  printf '\n==> %s\n' "$beside_name"
  cat "$beside_log"
  rm -f "$beside_log"
  trap - EXIT
  if ((status != 0)); then
    printf '\n==> FAILED: %s (exit %d)\n' "$beside_name" "$status" >&2
    exit "$status"
  fi
  printf '==> ok: %s (%d s, beside others)\n' "$beside_name" "$((SECONDS - beside_started))"
}

all_done() {
  printf '\n==> %s: all steps ok (%d s, %d CPU s)\n' "$1" "$((SECONDS - all_started))" \
    "$(cpu_seconds)"
}

# configure_and_build PRESET TARGET...
configure_and_build() {
  local preset=$1
  shift
  cmake --preset "$preset"
  cmake --build --preset "$preset" --target "$@"
}

# The Python package, built in build/$1 and installed into .venv. Other arguments go to pip.
install_python_package() {
  local name=$1
  shift
  .venv/bin/python -m pip install --quiet --no-build-isolation --no-deps --force-reinstall \
    --config-settings="build-dir=build/$name" "$@" .
}

# As the build of the tests is made, so that most objects come out of the compiler cache.
install_dev_package() {
  install_python_package python-dev --config-settings=cmake.build-type=Dev \
    --config-settings=cmake.args=--preset=test
}
