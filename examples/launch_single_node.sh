#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One machine: one command, and Lightning starts a process for each device.
#
#     examples/launch_single_node.sh                                  # tiny, on the CPU
#     examples/launch_single_node.sh configs/llama3_8b_bf16.yaml      # a node with eight GPUs
#
# Options after the file are passed on, such as --trainer.max_steps=10. Paths are relative to this folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

config=${1:-configs/cpu_tiny.yaml}
export CUDA_DEVICE_MAX_CONNECTIONS=1 # tensor-parallel communication is queued before the kernels behind it
exec lightning-mcore fit --config "$config" "${@:2}"
