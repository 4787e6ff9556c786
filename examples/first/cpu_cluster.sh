#!/bin/sh
# Slurm: sbatch cpu_cluster.sh. Without it, name the hosts: hororun -H node1:4,node2:4 python ...
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --time=10

. "${VENV:-$HOME/venv}/bin/activate" # has hororing and torch, and is on all nodes

hororun --timeline timeline.json python ddp_script.py # finds the nodes of the allocation
hororing stragglers timeline.json                     # which rank is late, and by how much
