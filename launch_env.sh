# shellcheck shell=bash
# Summary: what every shell script of the suite shares: the virtual environment, thread and OpenMP settings, the data, the start
# Usage:   . ./launch_env.sh      from a script that has changed to the suite's folder

caller_folder=${OLDPWD:-$PWD}                 # where the user stands: PAIRS= and BANK= are relative to it
abort() { echo "$(basename "$0"): $*" >&2; exit 2; }

# ensure_venv FILE...: .venv with the packages of these requirements files; installs only when one of them has changed
ensure_venv() {
  local file wanted missing=""
  for file in "$@"; do
    cmp -s "$file" ".venv/.installed-$(basename "$file")" || missing=yes
  done
  [ -z "$missing" ] && return 0
  if [ ! -x .venv/bin/python ]; then
    for wanted in "${PYTHON:-}" python3.12 python3.11 python3.13 python3; do
      [ -n "$wanted" ] && "$wanted" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
      wanted=""
    done
    [ -n "$wanted" ] || abort "needs Python 3.11 or newer; set PYTHON= to one"
    echo "set-up: making .venv with $("$wanted" --version)"
    "$wanted" -m venv .venv || abort "could not make .venv with $wanted; does it have the venv module?"
  fi
  for file in "$@"; do
    echo "set-up: installing $file"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$file" 2>.venv/pip.log ||
      { tail -n 5 .venv/pip.log >&2; abort "could not install $file; the messages above say why, then start this again"; }
    cp "$file" ".venv/.installed-$(basename "$file")"
  done
}

# performance_cores: the fast cores of an Apple chip, or what this process may use on Linux
performance_cores() {
  sysctl -n hw.perflevel0.physicalcpu 2>/dev/null || nproc 2>/dev/null || sysctl -n hw.physicalcpu 2>/dev/null || echo 1
}

set_environment() {
  local cores
  cores=$(performance_cores)
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$cores}"
  export MKL_NUM_THREADS="${MKL_NUM_THREADS:-$cores}"
  export OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-$cores}"
  export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-3000}"             # libgomp: with its long spin, two trainers on two cores stand still
  export KMP_DUPLICATE_LIB_OK=TRUE PYTHONUNBUFFERED=1
  if [ "$(ulimit -n)" != unlimited ] && [ "$(ulimit -n)" -lt 4096 ]; then
    ulimit -n 4096 2>/dev/null || echo "set-up: the descriptor limit stays at $(ulimit -n); --workers may need more" >&2
  fi
}

# choose_data: PAIRS and BANK from the environment, or the documented files, or demo data that is made once
choose_data() {
  demo_flags=()
  if [ -n "${PAIRS:-}${BANK:-}" ]; then
    [ -n "${PAIRS:-}" ] && [ -n "${BANK:-}" ] || abort "set both PAIRS= and BANK=, or neither"
    case $PAIRS in /*) ;; *) PAIRS=$caller_folder/$PAIRS ;; esac
    case $BANK in /*) ;; *) BANK=$caller_folder/$BANK ;; esac
    return
  fi
  PAIRS=artifacts/twotower/pairs_v4_synth.npz
  BANK=artifacts/wikipedia_500k_corrected_vectors.npz
  if [ ! -e "$PAIRS" ] && [ ! -e "$BANK" ]; then
    PAIRS=artifacts/demo/pairs.npz
    BANK=artifacts/demo/bank.npz
    demo_flags=(--epochs 6 --hidden-dim 128 --mine-schedule "1-3:none;4-:8@r10-100")
    echo "data: no artifacts/ files and no PAIRS= BANK=, so this trains on synthetic demo data"
    [ -e "$PAIRS" ] && [ -e "$BANK" ] || .venv/bin/python make_tiny_pairs.py --out artifacts/demo
  fi
}

# run_training NAME FLAGS...: become the trainer's supervisor; later flags win, so a launcher's caller has the last word. Never returns.
run_training() {
  local name=$1
  shift
  ensure_venv requirements.txt
  set_environment
  choose_data
  # demo flags come first: what a launcher or its caller says is stronger (and bash 3.2 has no empty "${array[@]}" under set -u)
  exec .venv/bin/python check_crash_cause.py --supervise -- \
    .venv/bin/python train_twotower_v4.py --pairs "$PAIRS" --bank "$BANK" --out "runs/$name" ${demo_flags[@]+"${demo_flags[@]}"} "$@"
}
