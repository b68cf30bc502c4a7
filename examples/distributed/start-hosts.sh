#!/bin/sh
# Two ranks on each of the machines that the arguments name: the program is at the same path on all of them, and ssh
# needs no password.
set -e
test $# -gt 0 || { echo "usage: $0 MACHINE.." >&2; exit 2; }
hosts=$(mktemp)
trap 'rm -f "$hosts"' EXIT
case $(mpirun --version) in
*HYDRA*)
    for host; do echo "$host:2"; done >"$hosts"
    mpirun -n $((2 * $#)) -f "$hosts" "$PWD/target/release/distributed"
    ;;
*)
    for host; do echo "$host slots=2"; done >"$hosts"
    mpirun -n $((2 * $#)) --hostfile "$hosts" --bind-to none "$PWD/target/release/distributed"
    ;;
esac
