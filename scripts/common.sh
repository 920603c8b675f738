# Shared by the scripts in this folder; sourced, not run.
# With HSR_GPU=1 .venv is for GPUs: TensorFlow with its CUDA libraries, and Horovod with NCCL.

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$(realpath -m -s "${HSR_VENV:-$ROOT/.venv}")"
LOCKS="$ROOT/scripts/locks"
OS_RELEASE="${OS_RELEASE:-/etc/os-release}"

# A script's --help is the comment at its head, unless it has a program that answers.
[ -n "${OWN_HELP:-}" ] || case "${1:-}" in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;; esac

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# The distribution and its release, such as "debian 12"; "el" for Red Hat's and those like it.
distribution() (
    # shellcheck disable=SC1090
    . "$OS_RELEASE" 2>/dev/null || true
    case "${ID:-}" in rhel | centos | rocky | almalinux | ol) ID=el ;; esac
    echo "${ID:-unknown} ${VERSION_ID:+${VERSION_ID%%.*}}"
)

# How to install java, python, a compiler or the headers of a Python version; for messages.
install_hint() { # WHAT [VERSION]
    local packages
    if command -v apt-get >/dev/null; then
        case "$1 $(distribution)" in
        "java debian 1"[3-9] | "java ubuntu 2"[4-9]) packages="openjdk-21-jre-headless" ;;
        java*) packages="openjdk-17-jre-headless" ;;
        python*) packages="python3 python3-venv python3-dev" ;;
        headers*) packages="python$2-dev" ;;
        compiler*) packages="g++" ;;
        esac
        echo "apt-get install $packages"
    elif command -v dnf >/dev/null; then
        case "$1 $(distribution)" in
        java*) packages="java-21-openjdk-headless" ;;
        "python el "[89]) packages="python3.11 python3.11-devel" ;;
        "python fedora"*) packages="python3.12 python3.12-devel" ;;
        python*) packages="python3 python3-devel" ;;
        "headers el 10") packages="python3-devel" ;;
        headers*) packages="python$2-devel" ;;
        compiler*) packages="gcc-c++" ;;
        esac
        echo "dnf install $packages"
    else echo "your system's package manager"; fi
}

find_python() {
    local candidate candidates=(python3.11 python3.12 python3.10 python3.13 python3)
    [ -z "${HSR_PYTHON:-}" ] || candidates=("$HSR_PYTHON")
    for candidate in "${candidates[@]}"; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    [ -z "${HSR_PYTHON:-}" ] || fail "HSR_PYTHON=$HSR_PYTHON is no Python 3.10 to 3.13 with venv that runs"
    fail "Python 3.10 to 3.13 with venv is needed, and none was found on PATH; install one with: $(install_hint python), or name it in HSR_PYTHON"
}

find_java() {
    local java="java" version spark
    if [ -n "${JAVA_HOME:-}" ]; then
        java="$JAVA_HOME/bin/java"
        [ -x "$java" ] || fail "JAVA_HOME is $JAVA_HOME, but there is no program $java; set JAVA_HOME to the folder of a Java (17 or newer) that holds bin/java, or unset it"
    fi
    version="$("$java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1)" || true
    [ -n "$version" ] || fail "Java is needed and was not found (looked for '$java'); install it with: $(install_hint java)"
    [ "$version" -ge 17 ] || fail "Java 17 or newer is needed, but '$java' is Java $version; install it with: $(install_hint java), and set JAVA_HOME"
    # Java 23 refuses, and 24 has no longer, what the Hadoop in Spark before 4.2 starts with.
    if [ "$version" -ge 23 ] && spark="$("$VENV/bin/python" -c 'import importlib.metadata as m; print(*m.version("pyspark").split(".")[:2])' 2>/dev/null)"; then
        # shellcheck disable=SC2086
        set -- $spark
        [ "$(($1 * 1000 + $2))" -ge 4002 ] ||
            fail "Spark $1.$2 in $VENV does not start on Java $version ('$java'); set JAVA_HOME to a Java 17 to 22 (install it with: $(install_hint java)), or install Spark 4.2 or newer"
    fi
}

find_compiler() {
    command -v c++ >/dev/null || command -v g++ >/dev/null ||
        fail "a C++ compiler is needed to build Horovod; install it with: $(install_hint compiler)"
    "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
        fail "the headers of $1 (Python.h) are needed to build Horovod; install them with: $(install_hint headers "$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')")"
}

# Sets .venv up for the demo or the tests, and leaves its bin first on PATH.
set_up() { # demo|tests
    local environment=("$ROOT/scripts/environment.py" "$1" --venv "$VENV" --locks "$LOCKS" ${HSR_GPU:+--gpu})
    local python="$VENV/bin/python"
    # Executors on this machine run the same Python; a chosen one elsewhere is none of ours. Nor are
    # packages in other places, such as Spark's own.
    unset PYSPARK_PYTHON PYSPARK_DRIVER_PYTHON SPARK_HOME PYTHONPATH PYTHONHOME
    find_java
    [ -z "${HSR_PYTHON:-}" ] || python="$(find_python)"
    if ! { [ -x "$python" ] && "$python" "${environment[@]}" --check; } 2>/dev/null; then
        python="$(find_python)"
        find_compiler "$python"
        say "Setting up $VENV with $("$python" --version) (a few minutes on a new machine)"
        "$python" "${environment[@]}"
    fi
    export PATH="$VENV/bin:$PATH"
}

# The tests that need no Spark, one real training and what else is in the arguments.
run_fast_tests() {
    run_tests --tier core tests/unit tests/test_layers.py tests/training/test_model.py \
        tests/mpi/test_training.py::test_a_run_gives_history_placement_timings_and_files "$@"
}

run_tests() {
    local lanes="${HSR_TEST_LANES:-3}"
    if [ "$lanes" -gt 1 ]; then
        # A file stays in one lane, for what its tests share; tests/tiers.py has the long ones first.
        set -- --numprocesses "$lanes" --dist loadfile --no-loadscope-reorder "$@"
    fi
    say "Tests"
    (cd "$ROOT" && python -m pytest --durations=20 "$@")
}
