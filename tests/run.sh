#!/usr/bin/env bash
# Summary: the one test command: installs what it needs, lints, runs every test
# Usage:   tests/run.sh [pytest arguments]      e.g. -k memory
set -euo pipefail
cd "$(dirname "$0")/.." && . ./launch_env.sh

ensure_venv requirements.txt requirements-test.txt
set_environment
.venv/bin/ruff check .
git ls-files -z '*.sh' .ci/run | xargs -0 .venv/bin/shellcheck -x

# two halves side by side: most of a fault's time is waiting
pytest() { .venv/bin/python -m pytest -q --durations=3 "$@" || [ $? -eq 5 ]; }          # 5: -k left this half nothing to do
faults=$(mktemp)
trap 'rm -f "$faults"' EXIT
pytest tests/test_faults.py "$@" >"$faults" 2>&1 &
half=$!
status=0
pytest tests --ignore=tests/test_faults.py "$@" || status=1
wait "$half" || status=1
cat "$faults"
exit "$status"
