#!/bin/sh
# Four ranks on this machine, each with a quarter of its cores. Open MPI or MPICH.
set -e
cargo build --release -p kiln-examples --bin distributed
case $(mpirun --version) in
*HYDRA*) mpirun -n 4 target/release/distributed ;;
*) mpirun -n 4 --bind-to none --oversubscribe target/release/distributed ;;
esac
