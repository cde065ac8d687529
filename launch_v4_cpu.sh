#!/usr/bin/env bash
# Summary: train v4 on the CPU, the configuration that always finishes
# Usage:   ./launch_v4_cpu.sh [trainer flags]      later flags win, e.g. --epochs 1 --bs 8
#          PAIRS=pairs.npz BANK=bank.npz ./launch_v4_cpu.sh
set -euo pipefail
cd "$(dirname "$0")" && . ./launch_env.sh

run_training v4_cpu --device cpu --precision fp32 --bs 32 --accum 16 "$@"                # never returns: exec
