#!/usr/bin/env bash
# Summary: the suite against the documented way of doing the same, side by side, as one table of ratios
# Usage:   bench/run.sh [SECTION...] [flags]      all sections: step start memory search evidence growth rivals quality
#          bench/run.sh --quick                   tiny sizes: does the benchmark itself work?
#          bench/run.sh quality --quality pairs.npz bank.npz
# Wants a machine with nothing else to do; --help says what each section measures and what it needs.
set -euo pipefail
cd "$(dirname "$0")/.." && . ./launch_env.sh

ensure_venv requirements.txt
set_environment
export BENCH_CALLER="$caller_folder"                     # paths among the flags are relative to where the user stands
exec .venv/bin/python bench/bench.py "$@"
