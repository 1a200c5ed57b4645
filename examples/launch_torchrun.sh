#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Several machines with torchrun: run the same command on each, with its own NODE_RANK.
#
#     NNODES=2 NODE_RANK=0 MASTER_ADDR=first-machine DEVICES=8 examples/launch_torchrun.sh configs/qwen3_30b_a3b.yaml
#     NNODES=2 NODE_RANK=1 MASTER_ADDR=first-machine DEVICES=8 examples/launch_torchrun.sh configs/qwen3_30b_a3b.yaml
#
# To try it on one machine, as two "machines" with one CPU rank each, set NNODES=2 DEVICES=1, with NODE_RANK=0 in one
# shell and NODE_RANK=1 in another.
# All machines need a shared filesystem. Paths are relative to this folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

nodes=${NNODES:-1}
devices=${DEVICES:-2} # processes per machine, one per GPU
config=${1:-configs/cpu_tiny.yaml}
export CUDA_DEVICE_MAX_CONNECTIONS=1 # queues tensor-parallel communication before the kernels that follow it
exec torchrun \
    --nnodes "$nodes" --node-rank "${NODE_RANK:-0}" --nproc-per-node "$devices" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \
    -m lightning_mcore.cli fit --config "$config" \
    --trainer.num_nodes="$nodes" --trainer.devices="$devices" "${@:2}"
