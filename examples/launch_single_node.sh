#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One machine: a single command; Lightning starts one process per device.
#
#     examples/launch_single_node.sh                                  # tiny, on the CPU
#     examples/launch_single_node.sh configs/llama3_8b_bf16.yaml      # a node with eight GPUs
#
# Options after the file are passed on, such as --trainer.max_steps=10. Paths are relative to this folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

config=${1:-configs/cpu_tiny.yaml}
export CUDA_DEVICE_MAX_CONNECTIONS=1 # queues tensor-parallel communication before the kernels that follow it
exec lightning-mcore fit --config "$config" "${@:2}"
