#!/usr/bin/env bash
# Summary: seven short runs of the real trainer, each without one suspect (or, at the end, with loader workers): which die, and what that means
# Usage:   ./test_segfault.sh [trainer flags]      for all seven, e.g. --device mps
#          PAIRS=pairs.npz BANK=bank.npz ./test_segfault.sh
#          STEPS=100 LIMIT=3600 ./test_segfault.sh      optimizer steps of a run [10], and the seconds after which it counts as hung [600]
# Exit codes: 0 all pass; 1 one did not; 2 nothing could be tested
set -uo pipefail
cd "$(dirname "$0")" && . ./launch_env.sh

case ${1:-} in -h | --help) sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p;}' "$(basename "$0")"; exit 0 ;; esac
for n in "${STEPS:=10}" "${LIMIT:=600}"; do case $n in *[!0-9]* | 0) abort "STEPS and LIMIT: $n is no number above 0" ;; esac; done
ensure_venv requirements.txt
set_environment
choose_data
case $PAIRS in /*) source=$PAIRS ;; *) source=$PWD/$PAIRS ;; esac
case $BANK in /*) bank=$BANK ;; *) bank=$PWD/$BANK ;; esac
mkdir -p runs
folder=$(mktemp -d runs/test_segfault.XXXXXX) || abort "runs: can't be written"

# -----------------------------------------------------------------------------
# one run: a child with its own log and folder, ended when it takes too long

child=""
end_child() {                                        # the launched process, and what it started
  local pid=$child
  [ -n "$pid" ] && kill -TERM "$pid" 2>/dev/null || return 0
  for _ in 1 2 3 4 5 6 7 8 9 10; do kill -0 "$pid" 2>/dev/null || return 0; sleep 1; done
  pkill -KILL -P "$pid"
  kill -KILL "$pid" 2>/dev/null
}
trap 'end_child; echo; abort "interrupted; what there is: $folder"' INT TERM HUP

names="" failed="" refused=""
isolate() {                                          # NAME DATA FLAGS...: results in $names, $failed, $refused and the table
  local name=$1 data=$2 status started=$SECONDS result=""
  local slug=${name// /_}
  shift 2
  (
    export PAIRS=$data BANK=$bank MAX_RESTARTS=0          # a restart would hide the crash
    [ "$slug" != single_thread ] || export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
    run_training "${folder#runs/}/$slug" "$@" --log-dir none
  ) >"$folder/$slug.log" 2>&1 </dev/null &
  child=$!
  while kill -0 "$child" 2>/dev/null; do
    [ $((SECONDS - started)) -lt "$LIMIT" ] || { result=hung; end_child; break; }
    sleep 0.2
  done
  { wait "$child"; } 2>/dev/null
  status=$? child=""
  [ -n "$result" ] || result=$(judge "$status" "$folder/$slug/events.jsonl")
  printf '%-16s | %-16s | %5s s' "$name" "$result" $((SECONDS - started))
  names="$names$slug "
  if [ "$result" != ok ]; then
    failed="$failed$slug "
    [ "$result" != "exit 2" ] || refused="$refused$slug "
    printf ' | %s' "$(explain "$slug")"
  fi
  echo
}

judge() {                                            # STATUS EVENTS -> ok, or how it ended
  local died
  died=$(sed -n 's/.*"search worker died: \([A-Za-z0-9 ]*\).*/search \1/p' "$2" 2>/dev/null | head -n 1)
  if [ "$1" -gt 128 ]; then
    echo "SIG$(kill -l $(($1 - 128)))"
  elif [ "$1" -ne 0 ]; then
    echo "exit $1"
  elif [ -n "$died" ]; then                          # the trainer outlives its search worker, but this is what we look for
    echo "$died"
  elif grep -qs '"status": "done"' "$2"; then
    echo ok
  else
    echo incomplete                                  # exit 0 from the middle of a run
  fi
}

explain() {                                          # the post-mortem's verdict, and the run's own last line
  local verdict=""
  [ ! -e check_crash_cause.py ] || [ ! -d "$folder/$1" ] || verdict=$(.venv/bin/python check_crash_cause.py --post-mortem "$folder/$1" --json 2>/dev/null |
    .venv/bin/python -c 'import json, sys; print(json.load(sys.stdin)["verdict"] + ": ")' 2>/dev/null)
  echo "$verdict$(tr '\r' '\n' <"$folder/$1.log" | grep -Ev '^[[:space:]]*$|^(verdict|confidence|evidence|not [a-z_]+|saved|fix|next):' | tail -n 1 | cut -c 1-160)"
}

# -----------------------------------------------------------------------------
# the runs: what the launchers do, over the first pairs, with mining from the first epoch on

echo "each run is the real trainer with one thing changed; logs in $folder"
tiny=$PWD/$folder/pairs_100.npz pairs=$PWD/$folder/pairs_2048.npz
for n in 100 2048; do
  .venv/bin/python make_tiny_pairs.py --from "$source" --n $n --out "$folder/pairs_$n.npz" >"$folder/pairs_$n.log" 2>&1 ||
    { tail -n 1 "$folder/pairs_$n.log" >&2; tiny=$source pairs=$source; }      # the trainer then says what it thinks of the file
done
set -- ${demo_flags[@]+"${demo_flags[@]}"} --device cpu --precision fp32 --search faiss --bs 32 --accum 16 --epochs "$STEPS" --max-steps "$STEPS" --eval-queries 100 --mine-schedule '1-:8@r10-100' "$@"

isolate "tiny data" "$tiny" "$@"
isolate "small batch" "$pairs" "$@" --bs 4
isolate "single thread" "$pairs" "$@" --threads 1
isolate "no accumulation" "$pairs" "$@" --accum 1
isolate "no mining" "$pairs" "$@" --no-mining
isolate "no memory bank" "$pairs" "$@" --memory-bank-size 0
isolate "workers" "$pairs" "$@" --workers 2

# -----------------------------------------------------------------------------
# what the pattern means

advice() {
  case $1 in
    tiny_data) echo "the size of the data, or a row after the first 100 pairs: ./monitor_training_memory.sh, and try other parts of the file" ;;
    small_batch) echo "the size of a batch, so memory or a kernel for large matrices: --bs 4 --accum 128 is the same training" ;;
    single_thread) echo "threads, so an OpenMP or BLAS race: OMP_NUM_THREADS=1 ./launch_v4_cpu.sh, then mend the installation" ;;
    no_accumulation) echo "gradient accumulation: --bs 512 --accum 1 is the same training; on MPS ./launch_v4_mps_no_accum.sh" ;;
    no_mining) echo "the search for hard negatives (FAISS): --search torch, or --no-mining; then reinstall faiss-cpu" ;;
    no_memory_bank) echo "the memory bank: --memory-bank-size 0, or a smaller one" ;;
  esac
}

echo
suspects=${names% workers }                   # the runs that leave something out
cured=""
for slug in $suspects; do case " $failed" in *" $slug "*) ;; *) cured="$cured$slug " ;; esac; done
if [ -z "$failed" ]; then
  echo "all pass: the crash needs full-scale training. Run ./launch_v4_cpu.sh; if that dies, its last lines name the cause."
  echo "          beside it: ./monitor_training_memory.sh PID tells whether memory is the reason"
  rm -rf "$folder"
  exit 0
elif [ "$refused" = "$names" ]; then
  echo "all were refused with exit code 2: that is no crash, but input or a setting that the lines above name; mend it, then run this again"
elif [ "$failed" = "$names" ]; then
  echo "all fail: the basic training loop or the installation, and none of the suspects: .venv/bin/python check_crash_cause.py"
elif [ "$failed" = "workers " ]; then
  echo "only workers fail: the loader processes; use --workers 0, which is the default"
elif [ "$(echo "$cured" | wc -w)" -le 2 ]; then
  for slug in $cured; do echo "only without it there is no crash: $(advice "$slug")"; done
else
  echo "some fail: ${failed% }. Run this again: if others fail then, it is a race or bad hardware (try OMP_NUM_THREADS=1); if the same, see their logs"
fi
echo "kept: $folder (a log and a run folder each)"
exit 1
