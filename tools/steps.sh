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
# The packages are installed without bytecode. Python keeps what it compiles of them, so that not each
# rank of each test compiles torch anew.
unset PYTHONDONTWRITEBYTECODE
all_started=$SECONDS

# The steps in the background, by name: process group, and file of the output. A step that has ended
# makes the file OUTPUT.ended, because its process number may then belong to another process.
declare -A beside_pid=() beside_log=()
beside_last=
cpu_file=$(mktemp)

end_all() {
  local name
  for name in "${!beside_pid[@]}"; do
    [[ -e ${beside_log[$name]}.ended ]] || kill -- "-${beside_pid[$name]}" 2>/dev/null || true
  done
  rm -f "$cpu_file"
  for name in "${!beside_log[@]}"; do rm -f "${beside_log[$name]}" "${beside_log[$name]}.ended"; done
}
trap end_all EXIT

# CPU seconds (user and system) of all commands of a shell that have ended so far.
cpu_seconds() {
  awk -v ticks="$(getconf CLK_TCK)" '{ printf "%d", ($16 + $17) / ticks }' "/proc/$1/stat"
}

# step NAME COMMAND...
step() {
  local name=$1 started=$SECONDS status=0
  shift
  printf '\n==> %s\n' "$name"
  # A subshell instead of `if`, so that `set -e` works inside functions that are steps.
  set +e
  (
    set -e
    trap 'cpu_seconds "$BASHPID" >"$cpu_file"' EXIT
    "$@"
  )
  status=$?
  set -e
  if ((status != 0)); then
    printf '\n==> FAILED: %s (exit %d, after %d s)\n' "$name" "$status" "$((SECONDS - started))" >&2
    exit "$status"
  fi
  printf '==> ok: %s (%d s, %d CPU s)\n' "$name" "$((SECONDS - started))" "$(cat "$cpu_file")"
}

# beside NAME COMMAND...: a step in the background, at low priority. It begins when the background
# step before it has ended. `joined NAME` waits for it and prints its output.
beside() {
  local name=$1 before=$beside_last
  shift
  beside_log[$name]=$(mktemp)
  printf '\n==> %s: in the background\n' "$name"
  set -m # a process group of its own, so that it can be killed as a whole if a step fails
  (
    set -e
    trap 'touch "${beside_log[$name]}.ended"' EXIT
    renice -n 10 "$BASHPID" >/dev/null
    while [[ -n $before && ! -e $before ]]; do sleep 1; done
    started=$SECONDS shell=$BASHPID
    "$@"
    printf '==> ok: %s (%d s in the background, %d CPU s)\n' "$name" "$((SECONDS - started))" \
      "$(cpu_seconds "$shell")"
  ) >"${beside_log[$name]}" 2>&1 </dev/null &
  beside_pid[$name]=$!
  beside_last=${beside_log[$name]}.ended
  set +m
}

joined() {
  local name=$1 status=0
  wait "${beside_pid[$name]}" || status=$?
  unset "beside_pid[$name]"
  printf '\n==> %s\n' "$name"
  cat "${beside_log[$name]}"
  if ((status != 0)); then
    printf '\n==> FAILED: %s (exit %d)\n' "$name" "$status" >&2
    exit "$status"
  fi
}

all_done() {
  printf '\n==> %s: all steps ok (%d s, %d CPU s)\n' "$1" "$((SECONDS - all_started))" \
    "$(cpu_seconds $$)"
}

# configure_and_build PRESET TARGET...
configure_and_build() {
  local preset=$1
  shift
  cmake --preset "$preset"
  cmake --build --preset "$preset" --target "$@"
}

# Builds the Python package in build/$1 and installs it into .venv. Other arguments go to pip, whose
# output goes to build/$1.log.
install_python_package() {
  local name=$1
  shift
  mkdir -p "build/$name"
  if ! .venv/bin/python -m pip install --verbose --no-build-isolation --no-deps --force-reinstall \
    --config-settings="build-dir=build/$name" "$@" . 2>&1 |
    tools/progress "build/$name" "build/$name.log"; then
    tail -n 60 "build/$name.log" >&2
    return 1
  fi
}

# Uses the flags of the tests' build, so that most objects come from the compiler cache.
install_dev_package() {
  install_python_package python-dev --config-settings=cmake.build-type=Dev \
    --config-settings=cmake.args=--preset=test \
    --config-settings=cmake.define.TILESTONE_TEST_BINDING=ON
}
