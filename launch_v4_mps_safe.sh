#!/usr/bin/env bash
# Summary: train v4 on Apple MPS with little gradient accumulation (32 accumulated passes died silently there)
# Usage:   ./launch_v4_mps_safe.sh [trainer flags]      later flags win
set -euo pipefail
cd "$(dirname "$0")" && . ./launch_env.sh

run_training v4_mps_safe --device mps --precision fp32 --bs 24 --accum 4 "$@"            # never returns: exec
