#!/bin/bash
# Two ranks on each of two machines of a Slurm cluster: sbatch examples/distributed/start-slurm.sh
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=4
#SBATCH --time=00:10:00

# Open MPI's interface, or MPICH's; `srun --mpi=list` says which this cluster has.
case $(srun --mpi=list 2>&1) in
*pmix*) mpi=pmix ;;
*) mpi=pmi2 ;;
esac
export KILN_CACHE_DIR=${TMPDIR:-/tmp}/kiln-$USER
srun --mpi=$mpi --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" target/release/distributed
