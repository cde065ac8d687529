#!/usr/bin/env bash
# Summary: memory of a run and all of its processes, a line each interval, and a verdict: growing, close to the limit, or stable
# Usage:   ./monitor_training_memory.sh PID [SECONDS] [FILE.tsv]      until it ends or Ctrl-C; [2] [logs/memory_PID_DATE_TIME.tsv]
#          ./launch_v4_cpu.sh & ./monitor_training_memory.sh $!
#          ./monitor_training_memory.sh --replay FILE.tsv             the verdict of such a file again
#
# Judged is private memory (Linux: anonymous pages, resident or swapped; macOS: the footprint). Mapped files count in RSS,
# where a healthy run over a mapped bank looks like a leak. The macOS commands were never run on a Mac.
# Exit codes: 0 stable, or too few samples to tell; 1 growing or close to the limit; 2 bad arguments
set -uo pipefail
cd "$(dirname "$0")" && . ./launch_env.sh
export LC_ALL=C                                                  # a decimal point, whatever the user's language

from_caller() { case $1 in /*) echo "$1" ;; *) echo "$caller_folder/$1" ;; esac; }

# -----------------------------------------------------------------------------
# measure: in kilobytes; the tree is found anew each time, for a run starts and ends processes

list_tree() {                                                    # PID -> "RSS PID PID ...", or nothing when it has ended
  ps -A -o pid=,ppid=,stat=,rss= | awk -v root="$1" '
    $3 !~ /^Z/ { parent[$1] = $2; rss[$1] = $4 }                 # a zombie has ended; only its parent does not know yet
    END {
      if (!(root in rss)) exit
      tree[root]
      do { found = 0; for (p in parent) if (!(p in tree) && parent[p] in tree) { tree[p]; found = 1 } } while (found)
      for (p in tree) { sum += rss[p]; pids = pids " " p }
      print sum pids
    }'
}

measure_private() {                                              # RSS PID... -> kilobytes; where only RSS is known, that
  local rss=$1
  shift
  case $measure in
    anonymous) awk -v pids="$*" 'BEGIN {
      n = split(pids, pid)
      for (i = 1; i <= n; i++) while ((getline < ("/proc/" pid[i] "/status")) > 0) if (/^(RssAnon|VmSwap):/) sum += $2
      print sum + 0 }' ;;
    footprint) printf -- '-p %s ' "$@" | xargs footprint -f bytes 2>/dev/null | awk '/phys_footprint:/ { sum += $2 } END { printf "%.0f\n", sum / 1024 }' ;;
    rss) echo "$rss" ;;
  esac
}

list_cgroups() {                                                 # /proc/PID/cgroup -> its control group and those above it, of version 2 or 1
  local kind path base
  while IFS=: read -r _ kind path; do
    case ,$kind, in ,,) base=/sys/fs/cgroup ;; *,memory,*) base=/sys/fs/cgroup/memory ;; *) continue ;; esac
    while [ -n "${path%/}" ]; do echo "$base$path"; path=${path%/*}; done
    echo "$base"
  done
}

measure_machine() {                                              # PID -> "LIMIT AVAILABLE" of the machine, or of a control group with less
  if [ ! -r /proc/meminfo ]; then
    { sysctl -n hw.memsize; vm_stat; } | awk '
      NR == 1 { limit = $1 / 1024 }  /page size of/ { page = $8 }  /^Pages (free|inactive|speculative|purgeable)/ { pages += $NF }
      END { printf "%.0f %.0f\n", limit, pages * page / 1024 }'
    return
  fi
  list_cgroups 2>/dev/null <"/proc/$1/cgroup" | awk '
    function read_sum(file, keys,   line, word, sum) {           # of the lines that match; without keys, the one number of a file
      while ((getline line < file) > 0) { split(line, word); if (keys == "") sum = word[1]; else if (line ~ keys) sum += word[2] }
      close(file)
      return sum
    }
    BEGIN { limit = read_sum("/proc/meminfo", "^MemTotal:"); available = read_sum("/proc/meminfo", "^MemAvailable:") }
    {
      old = read_sum($0 "/memory.limit_in_bytes"); own = old != "" ? old : read_sum($0 "/memory.max")
      if (own == "" || own == "max" || own / 1024 >= limit) next
      files = read_sum($0 "/memory.stat", old != "" ? "^total_(in)?active_file" : "^(in)?active_file")   # what can be given back
      free = (own - read_sum($0 (old != "" ? "/memory.usage_in_bytes" : "/memory.current")) + files) / 1024
      limit = own / 1024
      if (free < available) available = free > 0 ? free : 0
    }
    END { printf "%.0f %.0f\n", limit, available }'
}

# -----------------------------------------------------------------------------
# verdict: FILE -> what it means, as text and exit code. The first third is the start-up and not judged. After it, or in a later
# part that left all before it behind, memory rises steadily when each quarter is clearly above the one before: three rises,
# so neither a step, nor a warm-up that levels off, nor a peak that falls back. Levels are medians; noise is by the MAD.

verdict() {
  awk -F '\t' '
    function median(values, from, to,   i, j, n, v, s) {
      for (i = from; i <= to; i++) { v = values[i]; for (j = n++; j > 0 && s[j] > v; j--) s[j + 1] = s[j]; s[j + 1] = v }
      return (s[int((n + 1) / 2)] + s[int(n / 2) + 1]) / 2
    }
    function is_rising(first,   n, q, i, from, to, at, off, noise, above) {     # sets level[1..4], rise, and slope in MB a second
      n = rows - first + 1
      if (n < 12) return 0
      for (q = 1; q <= 4; q++) {
        from = first + int((q - 1) * n / 4); to = first + int(q * n / 4) - 1
        level[q] = median(private, from, to); at[q] = median(seconds, from, to)
      }
      rise = level[4] - level[1]
      if (at[4] <= at[1] || rise < 5 || rise < 0.01 * level[1]) return 0
      slope = rise / (at[4] - at[1])
      for (i = first; i <= rows; i++) { off[i] = private[i] - level[1] - slope * (seconds[i] - at[1]); if (off[i] < 0) off[i] = -off[i] }
      noise = 1.5 * median(off, first, rows)
      if (rise < (first > started ? 4 : 1) * noise || rise < 10 * noise / sqrt(n)) return 0
      for (q = 2; q <= 4; q++) if (level[q] - level[q - 1] < 0.12 * rise) return 0
      for (i = started; i < first; i++) above += private[i] > level[4]
      return above <= 0.02 * (first - started)
    }
    function lasting(s) {
      if (s < 120) return sprintf("%.0f seconds", s)
      return s < 7200 ? sprintf("%.0f minutes", s / 60) : s < 172800 ? sprintf("%.0f hours", s / 3600) : sprintf("%.0f days", s / 86400)
    }
    function say(text) { print (said++ ? "         " : "verdict: ") text }
    NR == 1 { for (i = 1; i <= NF; i++) column[$i] = i; next }
    NF >= 8 && $column["private_mb"] ~ /^[0-9.]+$/ {
      all++; time[all] = $column["seconds"]; used[all] = $column["private_mb"]; rss[all] = $column["rss_mb"]
      free = $column["available_mb"]; limit = $column["limit_mb"]; if (all == 1 || free < least) least = free
    }
    END {
      thin = int(all / 1200) + 1                                 # of a long record every so many samples tell as much
      for (i = 1; i <= all; i += thin) { seconds[++rows] = time[i]; private[rows] = used[i]; resident[rows] = rss[i] }
      started = rows - int(rows * 2 / 3) + 1
      for (share = 2 / 3; rows >= 20 && share > 0.1 && !rising; share /= 2) { first = rows - int(rows * share) + 1; rising = is_rising(first) }
      growing = rising && (rise > 64 || rise > 10 && rise > 0.1 * level[1])     # less may be a memory bank that fills
      is_close = all && least < 0.05 * limit
      where = sprintf("least memory available %.0f of %.0f MB", least, limit)
      rate = sprintf("%+.1f MB per minute", 60 * slope)
      if (growing) {
        say(sprintf("growing without bound: %s, from %.0f to %.0f MB private in the last %s", rate, level[1], level[4], lasting(seconds[rows] - seconds[first])))
        say(sprintf("at this rate it hits the limit of %.0f MB in %s; %s", limit, lasting(free / slope), where))
        if (seconds[rows] - seconds[1] < 600) say("watched for less than 10 minutes: what fills up once looks the same, so watch longer to be sure")
      } else if (is_close) {
        say(sprintf("close to the limit: %s; the run itself has %.0f MB private", where, used[all]))
        say("the system may kill it: a smaller --memory-bank-size, --bs or --workers needs less")
      } else if (rows < 20) {
        say(sprintf("too few samples to tell: %d, needs 20", rows))
      } else {
        say(sprintf("stable, so not memory: about %.0f MB private in the last %s; %s", median(private, started, rows), lasting(seconds[rows] - seconds[started]), where))
        if (rising) say(sprintf("it rose steadily by %.0f MB (%s): too little to tell a leak from what fills up once, so watch longer", rise, rate))
        if (resident[rows] - resident[1] > 50 + 2 * (private[rows] - private[1])) say("RSS rose, by mapped files: the system takes those pages back when it needs them")
        say("if the run died, ask what ended it: python check_crash_cause.py --post-mortem RUN")
      }
      exit growing || is_close
    }' "$1"
}

# -----------------------------------------------------------------------------
# main

watch() {                                                        # PID SECONDS TSV: until the process ends or a signal comes
  local pid=$1 interval=$2 tsv=$3 tree begin="" stopped="" sleeper=""
  trap 'stopped=yes; [ -z "$sleeper" ] || kill "$sleeper" 2>/dev/null' INT TERM HUP
  while [ -z "$stopped" ]; do
    tree=$(list_tree "$pid")
    [ -n "$tree" ] || { echo "process $pid has ended"; return; }
    # shellcheck disable=SC2046,SC2086  # words on purpose: stamp, clock, private, limit, available, RSS, PIDs
    set -- "$(date +%Y-%m-%dT%H:%M:%S)" "$(cut -d ' ' -f 1 /proc/uptime 2>/dev/null || date +%s)" "$(measure_private $tree)" $(measure_machine "$pid") $tree
    begin=${begin:-$2}
    [ $# -ge 7 ] && [ "$3" != 0 ] && echo "$# $*" | awk -v begin="$begin" '{                 # no private memory at all: it just ended
      printf "%s\t%.2f\t%d\t%.1f\t%.1f\t%.2f\t%.0f\t%.0f\n", $2, $3 - begin, $1 - 6, $4 / 1024, $7 / 1024, 100 * $4 / $5, $6 / 1024, $5 / 1024
    }' | tee -a "$tsv" | awk -F '\t' '{
      printf "%s | private %.0f MB | RSS %.0f MB | %.1f%% of %.0f MB | available %.0f MB | processes %d\n", substr($1, 12), $4, $5, $6, $8, $7, $3
    }'
    sleep "$interval" & sleeper=$!
    wait "$sleeper" 2>/dev/null
  done
}

main() {                                                         # read whole before it runs: an update of this file does not disturb a long watch
  local file tsv
  case ${1:-} in
    -h | --help) sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p;}' "$(basename "$0")"; exit 0 ;;
    --replay)
      [ $# -eq 2 ] || abort "--replay needs one file, as in --replay logs/memory_123_20251021_161447.tsv"
      file=$(from_caller "$2")
      [ -f "$file" ] && [ -r "$file" ] || abort "$2: no such file"
      case $(head -n 1 "$file") in *seconds*private_mb*rss_mb*available_mb*limit_mb*) ;; *) abort "$2: not a record of this monitor, its first line names no columns" ;; esac
      verdict "$file"; exit ;;
    "") abort "give the PID of a run, as in: ./launch_v4_cpu.sh & ./monitor_training_memory.sh \$!" ;;
    *[!0-9]*) abort "$1: not a PID (--help tells more)" ;;
  esac
  [ $# -le 3 ] || abort "too many arguments (--help tells more)"
  set -- "$1" "${2:-2}" "${3:-}"
  echo "$2" | grep -Eq '^[0-9]*\.?[0-9]+$' && [ -n "${2//[0.]/}" ] || abort "$2: not a number of seconds"
  [ -n "$(list_tree "$1")" ] || abort "$1: no such process"
  tsv=$(from_caller "${3:-$PWD/logs/memory_$1_$(date +%Y%m%d_%H%M%S).tsv}")
  mkdir -p "$(dirname "$tsv")" 2>/dev/null
  printf 'time\tseconds\tprocesses\tprivate_mb\trss_mb\tshare_percent\tavailable_mb\tlimit_mb\n' 2>/dev/null >"$tsv" || abort "$tsv: can't be written"

  measure=rss
  command -v footprint >/dev/null && measure=footprint
  grep -qs '^RssAnon:' /proc/self/status && measure=anonymous
  [ $measure != rss ] || echo "this system tells no private memory, so RSS stands in for it: mapped files count, and may look like a leak"
  echo "process $1 and its children, every $2 s until it ends or Ctrl-C | $tsv"
  watch "$1" "$2" "$tsv"
  verdict "$tsv"
}

main "$@"; exit
