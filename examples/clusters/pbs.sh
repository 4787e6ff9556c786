#!/bin/bash
# PBS: hororun takes the hosts and slots from $PBS_NODEFILE and reaches them by ssh.
#
#   qsub pbs.sh
#PBS -N train
#PBS -l select=2:ncpus=32:mpiprocs=4
#PBS -l walltime=08:00:00
#PBS -j oe
set -eu

cd "$PBS_O_WORKDIR"
source "$HOME/venv/bin/activate"
export OMP_NUM_THREADS=8
hororun python train.py
