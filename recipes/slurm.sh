#!/bin/bash
# A recipe on several nodes under Slurm; see docs/scale.md.  Rehearsed on CPUs with
# stand-ins for srun and scontrol; not yet run under Slurm.
#
#   sbatch --nodes 4 recipes/slurm.sh recipes/llama_3.1_70b_to_8b.yaml [--flag value ...]
#
# The checkout, its .venv, the models and the output directory lie in a folder that all nodes share.
#SBATCH --job-name=isogloss
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# SIGTERM to the steps ten minutes before the end: the ranks save and end, and the same command goes on from there
# (with --resume PATH it would go back to PATH)
#SBATCH --signal=TERM@600
#SBATCH --requeue
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export ISOGLOSS_TOKEN=$(head -c 32 /dev/urandom | base64)  # by which ranks know one another
GPUS=${SLURM_GPUS_ON_NODE:-8}

# Which network NCCL takes; see docs/scale.md before you uncomment a line.
#export NCCL_SOCKET_IFNAME=ib0
#export NCCL_IB_HCA=mlx5
#export NCCL_DEBUG=INFO

# One launcher on each node, which starts a rank for each GPU.  torchrun in place of DeepSpeed's own launcher: Slurm has
# started a task on every node already, so nothing needs ssh.
srun --kill-on-bad-exit=1 .venv/bin/torchrun \
    --nnodes "$SLURM_NNODES" --nproc_per_node "$GPUS" \
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$MASTER_ADDR:$MASTER_PORT" \
    distill.py --config "$@"
