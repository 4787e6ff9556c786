#!/bin/bash
# LSF: hororun takes the hosts and slots from the allocation and reaches them by ssh.
#
#   bsub < lsf.sh
#BSUB -J train
#BSUB -n 8
#BSUB -R "span[ptile=4]"
#BSUB -W 8:00
#BSUB -o train-%J.log
set -eu

source "$HOME/venv/bin/activate"
export OMP_NUM_THREADS=8
hororun python train.py
