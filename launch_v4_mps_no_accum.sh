#!/usr/bin/env bash
# Summary: the diagnostic run on Apple MPS: no gradient accumulation, no mining, 5 epochs; if this dies too, use the CPU
# Usage:   ./launch_v4_mps_no_accum.sh [trainer flags]      later flags win
set -euo pipefail
cd "$(dirname "$0")" && . ./launch_env.sh

run_training v4_mps_no_accum --device mps --precision fp32 --bs 16 --accum 1 --epochs 5 --no-mining "$@"     # never returns: exec
