# Sourced by the tools that run several steps. Prints each step's name, time and result.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The compiler cache is inside the tree by default. `make clean` keeps it.
export CCACHE_DIR="${CCACHE_DIR:-$PWD/.ccache}"
# Builds of one configuration share objects, even from different folders.
export CCACHE_NOHASHDIR=1 CCACHE_BASEDIR="${CCACHE_BASEDIR:-$PWD}"
# Shared objects need the same compiler name; CMake and scikit-build have different defaults.
export CC="${CC:-cc}" CXX="${CXX:-c++}"
# Needed to cache precompiled headers. It is safe, because no source uses __TIME__ or __DATE__.
export CCACHE_SLOPPINESS=pch_defines,time_macros
export CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
export CTEST_PARALLEL_LEVEL="${CTEST_PARALLEL_LEVEL:-$(nproc)}"
all_started=$SECONDS

# CPU seconds (user and system) of all commands that have ended so far.
cpu_seconds() { awk -v ticks="$(getconf CLK_TCK)" '{ printf "%d", ($16 + $17) / ticks }' /proc/$$/stat; }

# step NAME COMMAND...
step() {
  local name=$1 started=$SECONDS status=0 cpu_started
  cpu_started=$(cpu_seconds)
  shift
  printf '\n==> %s\n' "$name"
  # A subshell instead of `if`, so that `set -e` works inside functions that are steps.
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

# beside NAME COMMAND...: starts a step in the background at low priority. `joined` waits for it and
# prints its output.
beside() {
  beside_name=$1 beside_started=$SECONDS
  shift
  beside_log=$(mktemp)
  trap 'kill -- "-$beside_pid" 2>/dev/null || true; rm -f "$beside_log"' EXIT
  set -m # a process group of its own, so that it can be killed as a whole if a step fails
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

# Builds the Python package in build/$1 and installs it into .venv. Other arguments go to pip.
install_python_package() {
  local name=$1
  shift
  .venv/bin/python -m pip install --quiet --no-build-isolation --no-deps --force-reinstall \
    --config-settings="build-dir=build/$name" "$@" .
}

# Uses the flags of the tests' build, so that most objects come from the compiler cache.
install_dev_package() {
  install_python_package python-dev --config-settings=cmake.build-type=Dev \
    --config-settings=cmake.args=--preset=test
}
