#!/usr/bin/env bash
# The GPUs of this machine or container, as Spark's resource discovery wants them, in one line:
#
#   {"name": "gpu", "addresses": ["0", "1"]}
#
# Name it in spark.worker.resource.gpu.discoveryScript (standalone) or
# spark.executor.resource.gpu.discoveryScript (YARN, Kubernetes); see conf/.
#
# An address is what CUDA_VISIBLE_DEVICES takes: nvidia-smi's index of a GPU, or its UUID if
# HSR_GPU_ADDRESSES=uuid; always the UUID of a MIG device, which has no index. A GPU in MIG mode is
# given out by its MIG devices only.
#
# Only what may be used is listed. CUDA_VISIBLE_DEVICES (indices, UUIDs or their beginnings) limits
# it, as do the UUIDs, "none" and "void" of NVIDIA_VISIBLE_DEVICES; indices in the latter are those
# of the host, which the container runtime has already applied.
#
# What is wrong is said on standard error, with exit code 1 and an empty list.
case "${1:-}" in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;; esac
set -uo pipefail
export LC_ALL=C

addresses=() # what is given out
gpu_uuids=() # of the address's GPU, and
own_uuids=() # of the address itself: the MIG device's, where it is one
indices=()   # of the address's GPU

print_addresses() {
    local list="" address
    for address in "$@"; do list+="${list:+, }\"$address\""; done
    printf '{"name": "gpu", "addresses": [%s]}\n' "$list"
}

fail() {
    printf 'discover_gpus: %s (on %s)\n' "$*" "${HOSTNAME:-this host}" >&2
    print_addresses
    exit 1
}

note() { printf 'discover_gpus: %s\n' "$*" >&2; }

# A driver in trouble makes nvidia-smi hang, and Spark would wait with it.
ask() {
    if command -v timeout >/dev/null; then timeout -k 5 30 "$@" 2>&1; else "$@" 2>&1; fi
}

add() { # INDEX GPU_UUID OWN_UUID ADDRESS
    indices+=("$1") gpu_uuids+=("$2") own_uuids+=("$3") addresses+=("$4")
}

# Fills the lists from "nvidia-smi -L".
list_devices() {
    local listing status modes line index="" uuid="" mig_mode has_mig=""
    listing="$(ask nvidia-smi -L)"
    status=$?
    case "$listing" in "No devices"*) return ;; esac
    [ $status -ne 124 ] || fail "nvidia-smi -L did not answer within 30 seconds; look at the driver (dmesg)"
    [ $status -eq 0 ] || fail "nvidia-smi -L failed with exit code $status: ${listing:-it said nothing}"
    # Drivers from before MIG do not know the field; then no GPU is in that mode.
    modes="$(ask nvidia-smi --query-gpu=index,mig.mode.current --format=csv,noheader)" || modes=""

    local gpu='^GPU ([0-9]+): .*\(UUID: (GPU-[0-9A-Za-z-]+)\)[[:space:]]*$'
    local mig='^[[:space:]]+MIG .*\(UUID: (MIG-[0-9A-Za-z/-]+)\)[[:space:]]*$'
    while IFS= read -r line; do
        if [[ "$line" =~ $gpu ]]; then
            local found=("${BASH_REMATCH[@]}") # end_gpu matches, too
            end_gpu
            index="${found[1]}" uuid="${found[2]}" has_mig=""
            mig_mode='(^|'$'\n'')[[:space:]]*'"$index"',[[:space:]]*Enabled'
        elif [[ -n "$index" && "$line" =~ $mig ]]; then
            has_mig=yes
            add "$index" "$uuid" "${BASH_REMATCH[1]}" "${BASH_REMATCH[1]}"
        elif [[ "$line" =~ [^[:space:]] ]]; then
            note "a line of nvidia-smi -L was not understood: $line"
        fi
    done <<<"$listing"
    end_gpu
}

# Adds the GPU read last, if it is given out as a whole; uses list_devices' variables.
end_gpu() {
    [ -n "$index" ] && [ -z "$has_mig" ] || return 0
    if [[ "$modes" =~ $mig_mode ]]; then
        note "GPU $index is in MIG mode but has no MIG device: nothing can run on it"
        return 0
    fi
    if [ "${HSR_GPU_ADDRESSES:-index}" = uuid ]; then
        add "$index" "$uuid" "$uuid" "$uuid"
    else
        add "$index" "$uuid" "$uuid" "$index"
    fi
}

# Marks in "kept" what ENTRY means; fails if there is no such device.
keep() { # VARIABLE ENTRY
    local i found=""
    for i in "${!addresses[@]}"; do
        # By index, by the beginning of a UUID, or by the GPU of MIG devices.
        if [[ "$2" =~ ^[0-9]+$ && "$((10#$2))" = "${indices[i]}" ]] ||
            [[ "$2" = GPU-* && "${gpu_uuids[i]}" = "$2"* ]] ||
            [[ "$2" = MIG-* && "${own_uuids[i]}" = "$2" ]]; then
            [ "${found:-${gpu_uuids[i]}}" = "${gpu_uuids[i]}" ] ||
                fail "$1=${!1} names $2, which is the beginning of several UUIDs"
            kept[i]=yes found="${gpu_uuids[i]}"
        fi
    done
    [ -n "$found" ] || fail "$1=${!1} names $2, but the devices here are: ${own_uuids[*]:-none}"
}

# Leaves in the lists what the comma-separated devices in VARIABLE name.
limit_to() { # VARIABLE ENTRY ...
    local variable="$1" entry i kept=()
    shift
    for entry in "$@"; do keep "$variable" "$entry"; done
    for i in "${!addresses[@]}"; do
        [ -n "${kept[i]:-}" ] || unset "addresses[i]" "indices[i]" "gpu_uuids[i]" "own_uuids[i]"
    done
}

apply_cuda_visible_devices() {
    [ -n "${CUDA_VISIBLE_DEVICES+set}" ] || return 0
    local entries=()
    IFS=, read -ra entries <<<"${CUDA_VISIBLE_DEVICES//[[:space:]]/}"
    # CUDA reads up to the first entry that is no device; -1 and NoDevFiles are used to say "none".
    local entry wanted=()
    for entry in ${entries[@]+"${entries[@]}"}; do
        case "$entry" in -1 | NoDevFiles | none | void) break ;; esac
        wanted+=("$entry")
    done
    limit_to CUDA_VISIBLE_DEVICES ${wanted[@]+"${wanted[@]}"}
}

apply_nvidia_visible_devices() {
    local entries=() entry wanted=()
    case "${NVIDIA_VISIBLE_DEVICES:-all}" in all) return 0 ;; esac
    IFS=, read -ra entries <<<"${NVIDIA_VISIBLE_DEVICES//[[:space:]]/}"
    for entry in ${entries[@]+"${entries[@]}"}; do
        case "$entry" in
        none | void) ;;
        GPU-* | MIG-*) wanted+=("$entry") ;;
        *) return 0 ;; # indices, or a path of the container runtime's own
        esac
    done
    limit_to NVIDIA_VISIBLE_DEVICES ${wanted[@]+"${wanted[@]}"}
}

case "${HSR_GPU_ADDRESSES:-index}" in
index | uuid) ;;
*) fail "HSR_GPU_ADDRESSES must be index or uuid, got '$HSR_GPU_ADDRESSES'" ;;
esac
command -v nvidia-smi >/dev/null ||
    fail "nvidia-smi was not found on PATH=$PATH; install NVIDIA's driver, or give the container its GPUs (docker run --gpus, or nvidia.com/gpu in Kubernetes)"
list_devices
apply_nvidia_visible_devices
apply_cuda_visible_devices
print_addresses ${addresses[@]+"${addresses[@]}"}
