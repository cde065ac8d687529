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
export LC_ALL=C                                                  # numbers with a point, whatever the user's language

usage() { sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p;}' "$(basename "$0")"; }
from_caller() { case $1 in /*) echo "$1" ;; *) echo "$caller_folder/$1" ;; esac; }

# -----------------------------------------------------------------------------
# measure: kilobytes; the tree is found anew each time, for a run starts and ends processes

list_tree() {                                                    # -> "RSS PID PID ...", or nothing when the first one has ended
  ps -A -o pid=,ppid=,stat=,rss= | awk -v root="$pid" '
    $3 !~ /^Z/ { parent[$1] = $2; rss[$1] = $4 }                 # a zombie has ended; only its parent does not know yet
    END {
      if (!(root in rss)) exit
      tree[root]
      do { found = 0; for (p in parent) if (!(p in tree) && parent[p] in tree) { tree[p]; found = 1 } } while (found)
      for (p in tree) { sum += rss[p]; pids = pids " " p }
      print sum pids
    }'
}

private_of() {                                                   # PID... -> kilobytes
  case $measure in
    anonymous) awk -v pids="$*" 'BEGIN { n = split(pids, pid)
      for (i = 1; i <= n; i++) while ((getline < ("/proc/" pid[i] "/status")) > 0) if (/^(RssAnon|VmSwap):/) sum += $2
      print sum + 0 }' ;;
    footprint) printf -- '-p %s ' "$@" | xargs footprint -f bytes 2>/dev/null | awk '/phys_footprint:/ { sum += $2 } END { print int(sum / 1024) }' ;;
  esac
}

# the kernel's limits on this process: its control group and those above it, of version 2 or 1
list_cgroups() {
  local kind path base
  while IFS=: read -r _ kind path; do
    case $kind in "") base=/sys/fs/cgroup ;; memory | memory,* | *,memory*) base=/sys/fs/cgroup/memory ;; *) continue ;; esac
    while [ -n "$path" ] && [ "$path" != / ]; do echo "$base$path"; path=${path%/*}; done
    echo "$base"
  done
}

measure_machine() {                                              # -> "LIMIT AVAILABLE"
  if [ -r /proc/meminfo ]; then
    list_cgroups 2>/dev/null <"/proc/$pid/cgroup" | awk '
      function read_sum(file, keys,   line, part, sum) {         # an empty key: the file is one number
        while ((getline line < file) > 0) { split(line, part); if (keys == "") sum = part[1]; else if (line ~ keys) sum += part[2] }
        close(file); return sum
      }
      BEGIN { limit = read_sum("/proc/meminfo", "^MemTotal:"); available = read_sum("/proc/meminfo", "^MemAvailable:") }
      {
        v1 = read_sum($0 "/memory.limit_in_bytes", ""); own = v1 != "" ? v1 : read_sum($0 "/memory.max", "")
        if (own == "" || own == "max" || own / 1024 >= limit) next
        used = read_sum($0 (v1 != "" ? "/memory.usage_in_bytes" : "/memory.current"), "")
        files = read_sum($0 "/memory.stat", v1 != "" ? "^total_(in)?active_file" : "^(in)?active_file")    # these can be given back
        limit = own / 1024; if ((own - used + files) / 1024 < available) available = (own - used + files) / 1024
      }
      END { printf "%.0f %.0f\n", limit, (available > 0 ? available : 0) }'
  else
    { sysctl -n hw.memsize; vm_stat; } | awk 'NR == 1 { limit = $1 / 1024 } /page size of/ { page = $8 }
      /^Pages (free|inactive|speculative|purgeable)/ { pages += $NF } END { printf "%.0f %.0f\n", limit, pages * page / 1024 }'
  fi
}

clock() { if [ -r /proc/uptime ]; then read -r now _ </proc/uptime; else now=$(date +%s); fi; }

# -----------------------------------------------------------------------------
# verdict: FILE -> what it means, as text and exit code. The first third is the start-up and not judged. After it, or in a later
# part that left all before it behind, memory grows without bound when each quarter is clearly above the one before: three
# rises, so neither a step, nor a warm-up that levels off, nor a peak that falls back. Levels are medians; noise is a MAD.

verdict() {
  awk -F '\t' '
    function median(values, from, to,   i, j, n, v, s) {
      for (i = from; i <= to; i++) { v = values[i]; for (j = n++; j > 0 && s[j] > v; j--) s[j + 1] = s[j]; s[j + 1] = v }
      return (s[int((n + 1) / 2)] + s[int(n / 2) + 1]) / 2
    }
    function is_rising(first,   n, q, i, from, to, at, off, noise, above) {          # sets level[1..4] and slope, in MB a second
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
    NR == 1 { for (i = 1; i <= NF; i++) column[$i] = i; next }
    NF >= 8 && $column["private_mb"] ~ /^[0-9.]+$/ {
      all++; time[all] = $column["seconds"]; used[all] = $column["private_mb"]; rss[all] = $column["rss_mb"]
      free = $column["available_mb"]; limit = $column["limit_mb"]; if (all == 1 || free < least) least = free
    }
    END {
      thin = int(all / 1200) + 1                                 # a long record: every so many samples tell as much
      for (i = 1; i <= all; i += thin) { seconds[++rows] = time[i]; private[rows] = used[i]; resident[rows] = rss[i] }
      where = sprintf("least memory available %.0f of %.0f MB", least, limit)
      is_close = all && least < 0.05 * limit
      started = rows - int(rows * 2 / 3) + 1
      for (share = 2 / 3; rows >= 20 && share > 0.1 && !rising; share /= 2) { first = rows - int(rows * share) + 1; rising = is_rising(first) }
      growing = rising && rise > 10 && rise > 0.1 * level[1]     # less than that may be a memory bank that fills
      if (growing) {
        printf "verdict: growing without bound: %+.1f MB per minute, from %.0f to %.0f MB private in the last %s\n", 60 * slope, level[1], level[4], lasting(seconds[rows] - seconds[first])
        printf "         at this rate it hits the limit of %.0f MB in %s; %s\n", limit, lasting(free / slope), where
        if (seconds[rows] - seconds[1] < 600) print "         watched for less than 10 minutes: what fills up once looks the same, so watch longer to be sure"
      } else if (is_close) {
        printf "verdict: close to the limit: %s; the run itself has %.0f MB private\n", where, used[all]
        print "         the system may kill it: a smaller --memory-bank-size, --bs or --workers needs less"
      } else if (rows < 20)
        printf "verdict: too few samples to tell: %d, needs 20\n", rows
      else {
        low = high = private[started]
        for (i = started; i <= rows; i++) { if (private[i] < low) low = private[i]; if (private[i] > high) high = private[i] }
        printf "verdict: stable, so not memory: %.0f to %.0f MB private in the last %s; %s\n", low, high, lasting(seconds[rows] - seconds[started]), where
        if (rising) printf "         it rose steadily by %.0f MB (%+.1f MB per minute): too little to tell a leak from what fills up once, so watch longer\n", rise, 60 * slope
        if (resident[rows] - resident[1] > 50 + 2 * (private[rows] - private[1])) print "         RSS rose, by mapped files: the system takes those pages back when it needs them"
        print "         if the run died, ask what ended it: python check_crash_cause.py --post-mortem RUN"
      }
      exit growing || is_close
    }' "$1"
}

# -----------------------------------------------------------------------------
# main

case ${1:-} in
  -h | --help) usage; exit 0 ;;
  --replay)
    [ $# -eq 2 ] || abort "--replay needs one file, as in --replay logs/memory_123_20251021_161447.tsv"
    file=$(from_caller "$2")
    [ -f "$file" ] && [ -r "$file" ] || abort "$2: no such file"
    case $(head -n 1 "$file") in *seconds*private_mb*rss_mb*available_mb*limit_mb*) ;; *) abort "$2: not a record of this monitor: its first line names no columns" ;; esac
    verdict "$file"; exit ;;
  "") abort "give the PID of a run, as in: ./launch_v4_cpu.sh & ./monitor_training_memory.sh \$!" ;;
  *[!0-9]*) abort "$1: not a PID (--help tells more)" ;;
esac
pid=$1 interval=${2:-2}
[ $# -le 3 ] || abort "too many arguments (--help tells more)"
echo "$interval" | grep -Eq '^[0-9]*\.?[0-9]+$' && [ -n "$(echo "$interval" | tr -d '0.')" ] || abort "$interval: not a number of seconds"
[ -n "$(list_tree)" ] || abort "$pid: no such process"
tsv=$(from_caller "${3:-$PWD/logs/memory_${pid}_$(date +%Y%m%d_%H%M%S).tsv}")
mkdir -p "$(dirname "$tsv")" 2>/dev/null
printf 'time\tseconds\tprocesses\tprivate_mb\trss_mb\tshare_percent\tavailable_mb\tlimit_mb\n' 2>/dev/null >"$tsv" || abort "$tsv: can't be written"

measure=rss
command -v footprint >/dev/null && measure=footprint
grep -qs '^RssAnon:' /proc/self/status && measure=anonymous
[ $measure != rss ] || echo "this system tells no private memory, so RSS stands in for it: mapped files count, and may look like a leak"
echo "process $pid and its children, every $interval s until it ends or Ctrl-C | $tsv"

stopped="" sleeper=""
trap 'stopped=yes; [ -z "$sleeper" ] || kill "$sleeper" 2>/dev/null' INT TERM HUP
clock && begin=$now
while [ -z "$stopped" ]; do
  tree=$(list_tree)
  [ -n "$tree" ] || { echo "process $pid has ended"; break; }
  # shellcheck disable=SC2086  # words on purpose
  set -- $tree
  resident=$1 && shift
  private=$resident
  [ $measure = rss ] || private=$(private_of "$@")
  # shellcheck disable=SC2046  # two words on purpose
  set -- $# $(measure_machine)
  clock
  awk -v stamp="$(date +%Y-%m-%dT%H:%M:%S)" -v s="$now" -v begin="$begin" -v n="$1" -v private="$private" -v rss="$resident" -v limit="$2" -v free="$3" 'BEGIN {
    printf "%s\t%.2f\t%d\t%.1f\t%.1f\t%.2f\t%.0f\t%.0f\n", stamp, s - begin, n, private / 1024, rss / 1024, 100 * private / limit, free / 1024, limit / 1024
  }' | tee -a "$tsv" | awk -F '\t' '{
    printf "%s | private %.0f MB | RSS %.0f MB | %.1f%% of %.0f MB | available %.0f MB | %d processes\n", substr($1, 12), $4, $5, $6, $8, $7, $3
  }'
  sleep "$interval" & sleeper=$!
  wait "$sleeper" 2>/dev/null
done
verdict "$tsv"
