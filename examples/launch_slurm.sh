#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A SLURM job with one task per GPU; each task reads its rank from SLURM's variables.
#
#     cd examples && sbatch launch_slurm.sh configs/qwen3_30b_a3b.yaml
#
# A few minutes before the time limit, SLURM sends the signal below. The run finishes its step and saves
# (PreemptionCheckpoint in the YAML file), and Lightning requeues the job. All nodes need a shared filesystem.
#SBATCH --job-name=lightning-mcore
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=SIGUSR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "$SLURM_SUBMIT_DIR" # SLURM runs a copy of this script in its own folder

config=${1:?give the file of the run, such as configs/qwen3_30b_a3b.yaml}
export CUDA_DEVICE_MAX_CONNECTIONS=1 # queues tensor-parallel communication before the kernels that follow it
srun --kill-on-bad-exit=1 lightning-mcore fit --config "$config" \
    --trainer.num_nodes="$SLURM_NNODES" --trainer.devices="$SLURM_NTASKS_PER_NODE" "${@:2}"
