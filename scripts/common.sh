# Shared by the scripts in this folder; sourced, not run.
# Sets up .venv, which holds everything, and leaves its bin first on PATH. With HSR_GPU=1 it is for
# GPUs: TensorFlow with its CUDA libraries, and Horovod with NCCL.

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${HSR_VENV:-$ROOT/.venv}"
CONSTRAINTS="$ROOT/scripts/constraints.txt"
# PyTorch's metadata and Petastorm's ask for different setuptools, so pip cannot choose it.
TORCH=2.13.0
TORCH_INDEX=https://download.pytorch.org/whl/cpu
BUILD_HOROVOD="$ROOT/horovod_spark_runner/commands/build_horovod.py"
OS_RELEASE="${OS_RELEASE:-/etc/os-release}"

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# The distribution and its release, such as "debian 12"; "el" for Red Hat's and those like it.
distribution() (
    # shellcheck disable=SC1090
    . "$OS_RELEASE" 2>/dev/null || true
    case "${ID:-}" in rhel | centos | rocky | almalinux | ol) ID=el ;; esac
    echo "${ID:-unknown} ${VERSION_ID:+${VERSION_ID%%.*}}"
)

# How to install java, python, a compiler, make or the headers of a Python version; for messages.
install_hint() { # WHAT [VERSION]
    local packages
    if command -v apt-get >/dev/null; then
        case "$1 $(distribution)" in
        "java debian 1"[3-9] | "java ubuntu 2"[4-9]) packages="openjdk-21-jre-headless" ;;
        java*) packages="openjdk-17-jre-headless" ;;
        python*) packages="python3 python3-venv python3-dev" ;;
        headers*) packages="python$2-dev" ;;
        compiler*) packages="g++ make" ;;
        make*) packages="make" ;;
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
        compiler*) packages="gcc-c++ make" ;;
        make*) packages="make" ;;
        esac
        echo "dnf install $packages"
    else echo "your system's package manager"; fi
}

find_python() {
    local candidate
    for candidate in ${HSR_PYTHON:-} python3.11 python3.12 python3.10 python3.13 python3; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
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
    command -v make >/dev/null ||
        fail "make is needed to build Horovod; install it with: $(install_hint make)"
    "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
        fail "the headers of $1 (Python.h) are needed to build Horovod; install them with: $(install_hint headers "$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')")"
}

# The package of TensorFlow to install; there is no build for CPUs alone on other machines.
tensorflow_package() {
    if [ -n "${HSR_GPU:-}" ]; then echo "tensorflow[and-cuda]"
    elif [ "$(uname -m)" = x86_64 ]; then echo tensorflow-cpu
    else echo tensorflow; fi
}

# What the environment must have been set up for, as the file .set-up in it says.
wanted_stamp() {
    {
        tensorflow_package
        echo "torch $TORCH"
        cat "$ROOT/setup.cfg" "$BUILD_HOROVOD" "$CONSTRAINTS"
    } | cksum
}

set_up() {
    local python wanted stamp="$VENV/.set-up"
    find_java
    wanted="$(wanted_stamp)"
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
        python="$(find_python)"
        find_compiler "$python"
        say "Setting up $VENV with $("$python" --version) (a few minutes on a new machine)"
        [ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV"
        install_packages
        printf '%s' "$wanted" >"$stamp"
    fi
    export PATH="$VENV/bin:$PATH"
    # Executors on this machine run the same Python; a chosen one elsewhere is none of ours.
    unset PYSPARK_PYTHON PYSPARK_DRIVER_PYTHON SPARK_HOME
}

install_packages() {
    local pip=("$VENV/bin/python" -m pip --disable-pip-version-check --quiet)
    local constraints=(--constraint "$CONSTRAINTS")
    "${pip[@]}" install --upgrade pip 2> >(grep -v '^WARNING: Location' >&2)
    say "Installing packages"
    PYTHONWARNINGS=ignore "${pip[@]}" install "${constraints[@]}" \
        --editable "$ROOT[dev]" "$(tensorflow_package)" \
        2> >(grep -v '^WARNING: Location' >&2)
    install_torch
    "$VENV/bin/python" "$BUILD_HOROVOD" ${HSR_GPU:+--gpu} >/dev/null
    # What torch's metadata say of setuptools is known.
    "${pip[@]}" check 2>&1 | grep -v '^torch .* has requirement setuptools' >&2 || true
}

# PyTorch without CUDA, which takes gigabytes, where such a build can be had; for GPUs with it.
install_torch() {
    local pip=("$VENV/bin/python" -m pip --disable-pip-version-check --quiet) index=()
    say "Installing PyTorch $TORCH"
    # Asked first: pip would try an index that does not answer for minutes.
    if "$VENV/bin/python" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=5)' \
        "$TORCH_INDEX/torch/" 2>/dev/null; then
        index=(--extra-index-url "$TORCH_INDEX")
    fi
    if [ -z "${HSR_GPU:-}" ] && "${pip[@]}" install "${index[@]}" --no-deps "torch==$TORCH+cpu" 2>/dev/null; then
        "${pip[@]}" install filelock fsspec jinja2 networkx sympy typing-extensions 2>/dev/null
        # What asks for PyTorch would bring another one, or another setuptools.
        "${pip[@]}" install --constraint "$CONSTRAINTS" --no-deps \
            lightning lightning-utilities pytorch-lightning torchmetrics \
            2> >(grep -v '^WARNING: Location' >&2)
    else
        # Whole, in a version whose metadata go with Petastorm's.
        "${pip[@]}" install --constraint "$CONSTRAINTS" --editable "$ROOT[torch,lightning]" \
            2> >(grep -v '^WARNING: Location' >&2)
    fi
}

# The tests that need no Spark, one real training and what else is in the arguments.
run_fast_tests() {
    run_tests tests/unit tests/test_layers.py tests/training/test_model.py \
        tests/mpi/test_training.py::test_a_run_gives_history_placement_timings_and_files "$@"
}

run_tests() {
    local lanes="${HSR_TEST_LANES:-3}"
    if [ "$lanes" -gt 1 ]; then
        # A file stays in one lane, for what its tests share; in the order of tests/order.py the long
        # ones come first, so that no lane has to wait for one at the end.
        set -- --numprocesses "$lanes" --dist loadfile --no-loadscope-reorder "$@"
    fi
    if [ -n "${HSR_TEST_END:-}" ]; then # what has failed by then is told, and no more is begun
        local left="$((HSR_TEST_END - $(date +%s)))"
        set -- --session-timeout "$((left > 60 ? left : 60))" "$@"
    fi
    say "Tests"
    (cd "$ROOT" && python -m pytest --durations=20 "$@")
}
