#!/bin/sh
# For the preStop hook of an executor's container, before it is taken away: asks its ranks to save
# and end, and waits for them. Kubernetes signals process 1 alone, which is Spark's JVM.
# Needs nothing but a shell and /proc.
case "${1:-}" in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;; esac

ranks() {
    for entry in /proc/[0-9]*; do
        name=
        read -r name 2>/dev/null <"$entry/comm" || continue
        [ "$name" = horovod-rank ] && echo "${entry#/proc/}"
    done
}

for pid in $(ranks); do
    kill -TERM "$pid" 2>/dev/null
done
while [ -n "$(ranks)" ]; do
    sleep 0.2
done
