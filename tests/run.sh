#!/usr/bin/env bash
# Summary: the one test command: installs what it needs, lints, runs every test
# Usage:   tests/run.sh [pytest arguments]      e.g. -k memory
set -euo pipefail
cd "$(dirname "$0")/.." && . ./launch_env.sh

ensure_venv requirements.txt requirements-test.txt
set_environment
.venv/bin/ruff check .
git ls-files -z '*.sh' .ci/run | xargs -0 .venv/bin/shellcheck -x
exec .venv/bin/python -m pytest tests -q --durations=5 "$@"
