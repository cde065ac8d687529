#!/usr/bin/env python3
"""Why did it die? Isolates a native crash stage by stage, explains a dead run, and is the parent of every launched one.

    python check_crash_cause.py                                 the reproducer: each stage in a process of its own, then one verdict
    python check_crash_cause.py --post-mortem runs/v4_cpu       why this run ended; --json for programs
    python check_crash_cause.py --env                           machine, versions, limits and OpenMP runtimes, ready to paste
    python check_crash_cause.py --bundle runs/v4_cpu            one archive for a bug report: no vectors, no home paths
    python check_crash_cause.py --supervise -- COMMAND...       run it, keep the evidence, explain a bad end, go on where that helps

Standard library only: it works where torch does not. Exit codes: alone 0 all is well, 1 a cause was found; --supervise that of the
command (128 + n for signal n); 2 something the user can mend.
"""
import argparse
import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import importlib.metadata
import importlib.util
import io
import json
import mmap
import os
import platform
import pty
import re
import resource
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import termios
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
LINUX = sys.platform.startswith("linux")
TOO_FULL = 2 ** 20                                           # bytes: with less than this free, a write of ours can fail
SETTINGS = re.compile(r"(OMP|KMP|MKL|OPENBLAS|PYTORCH|TORCH|CUDA|VECLIB|NUMEXPR)_\w+|PYTHONUNBUFFERED|LD_PRELOAD|MALLOC_\w+|TMPDIR")


# -----------------------------------------------------------------------------
# machine: what can be read about a process and its surroundings without root

def read(path):
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def oom_kills(pid="self"):
    """{file: kills by the kernel for want of memory}: of the machine, and of the process's own control group."""
    files = ["/proc/vmstat"]
    for line in read(f"/proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            files.append(f"/sys/fs/cgroup/memory{path.rstrip('/')}/memory.oom_control")
        elif not controllers:
            files += [f"/sys/fs/cgroup{path.rstrip('/')}/memory.events", "/sys/fs/cgroup/memory.events"][:1 if path == "/" else 2]
    return read_counters(files)


def read_counters(files):
    found = {file: re.search(r"^oom_kill (\d+)", read(file), re.M) for file in files}
    return {file: int(m[1]) for file, m in found.items() if m}


def limits_of(pid):
    """{name: (soft, hard)} of a process, None = unlimited; its own ones count, for it may have changed them."""
    names = {"Max cpu time": "cpu", "Max file size": "fsize", "Max address space": "as", "Max open files": "nofile", "Max processes": "nproc",
             "Max stack size": "stack", "Max data size": "data", "Max core file size": "core"}
    rows = re.findall(r"^(Max [a-z ]+?)\s+(\d+|unlimited)\s+(\d+|unlimited)", read(f"/proc/{pid}/limits"), re.M)
    if rows:
        return {names[n]: [None if v == "unlimited" else int(v) for v in (soft, hard)] for n, soft, hard in rows if n in names}
    return {n: [None if v == resource.RLIM_INFINITY else v for v in resource.getrlimit(getattr(resource, f"RLIMIT_{n.upper()}"))]
            for n in names.values() if hasattr(resource, f"RLIMIT_{n.upper()}")}


def mapped_files(pid):
    if LINUX:
        return sorted(set(re.findall(r" (/\S.*)$", read(f"/proc/{pid}/maps"), re.M)))
    with contextlib.suppress(OSError, subprocess.SubprocessError):       # macOS: text and data files, a slow way to ask
        out = subprocess.run(["lsof", "-p", str(pid), "-Fn"], capture_output=True, text=True, timeout=10).stdout
        return sorted({line[1:] for line in out.splitlines() if line.startswith("n/")})
    return []


@functools.cache
def is_llvm_openmp(path):
    """LLVM's and Intel's OpenMP runtimes refuse a second one of their kind; GNU's libgomp does not. By content: names lie."""
    name = os.path.basename(path)
    if not re.search(r"\.(so|dylib)\b", name):
        return False
    try:
        if not 0 < os.path.getsize(path) < 2 ** 24:
            return False
        with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as m:
            return m.find(b"KMP_DUPLICATE_LIB_OK") >= 0 and m.find(b"__kmpc_fork_call") >= 0
    except (OSError, ValueError):
        return bool(re.match(r"libi?omp\d?[.-]", name))


def describe_process(pid):
    stat = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if not stat:
        return None
    parts = read(f"/proc/{pid}/syscall").split()
    futex = {"x86_64": "202", "aarch64": "98"}.get(platform.machine())
    return {"pid": pid, "parent": int(stat[1]), "state": stat[0], "threads": int(stat[17]), "cpu": (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK"),
            "command": read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()[:300],
            "waits": "futex" if parts[:1] == [futex] or "futex" in read(f"/proc/{pid}/wchan") else read(f"/proc/{pid}/wchan").strip()}


def process_tree(pid):
    """The process and all below it, parents first."""
    found = [p] if (p := describe_process(pid)) else []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in read(task).split():
            found += process_tree(int(child))
    return found


def disk_space(path):
    """[free bytes, all bytes] of the file system that path is on."""
    s = os.statvfs(path)
    return [s.f_bavail * s.f_frsize, s.f_blocks * s.f_frsize]


def sizes_of(paths):
    return {str(p): os.path.getsize(p) for p in paths if os.path.isfile(p)}


def short_path(text):
    """For eyes and reports: no home folder, and so no name of a user."""
    home = str(Path.home())
    return re.sub(r"/(?:home|Users)/[^/\s\"':]+", "~", re.sub(re.escape(home) + r"(?=[/\s\"':]|$)", "~", text) if len(home) > 1 else text)


# -----------------------------------------------------------------------------
# facts: all that is known about one attempt at a run, from what it and its parent wrote

@dataclasses.dataclass
class Facts:
    folder: Path
    attempt: dict = dataclasses.field(default_factory=dict)  # evidence.json: what only the parent could know
    status: object = None                                    # ("exit", 1), ("signal", "SIGSEGV"), or None: nobody saw it
    stderr: object = None                                    # text, or None: lost
    stderr_file: str = "stderr"
    parent_file: str = "evidence.json"
    events: list = dataclasses.field(default_factory=list)   # of this attempt
    beat: dict = dataclasses.field(default_factory=dict)     # its newest heartbeat
    fault: str = ""                                          # what faulthandler wrote for it
    config: dict = dataclasses.field(default_factory=dict)
    running: int = 0                                         # the process that holds the folder now
    reports: list = dataclasses.field(default_factory=list)  # macOS: (name, text) of crash reports about it

    @property
    def end(self):
        return next((e for e in reversed(self.events) if e["event"] == "end"), {})

    @property
    def signal(self):
        return self.status[1] if self.status and self.status[0] == "signal" else None

    @property
    def code(self):
        return self.status[1] if self.status and self.status[0] == "exit" else None

    @property
    def guards(self):
        return [e for e in self.events if e["event"] == "guard" and "non-finite" in e.get("what", "")]

    @property
    def frames(self):
        """faulthandler's frames of the thread that died, innermost first."""
        fatal = self.fault[max(0, self.fault.rfind("Fatal Python error")):]
        block = re.search(r"^Current thread[^\n]*\n((?:  [^\n]*\n?)*)", fatal, re.M)
        return re.findall(r'File "([^"]+)", line (\d+) in (\S+)', block[1]) if block else []

    def kills(self):
        """Kills by the kernel since the start, {file: (before, after)}."""
        before, after = self.attempt.get("oom_start", {}), self.attempt.get("oom_end") or (read_counters(self.attempt.get("oom_start", {})))
        return {file: (before[file], after[file]) for file in before if file in after}

    def shrunk(self):
        """[(file, bytes at the start, bytes at the end)] of inputs that lost some."""
        before = dict(self.attempt.get("inputs", {}))
        for name in ("pairs", "bank"):
            if self.config.get(name) and self.config.get(f"{name}_bytes"):
                path = Path(self.config[name])
                before.setdefault(str(path if path.is_absolute() else Path(self.attempt.get("cwd", ".")) / path), self.config[f"{name}_bytes"])
        after = self.attempt.get("inputs_end") or {}
        pairs = [(p, size, after.get(p, os.path.getsize(p) if os.path.isfile(p) else size)) for p, size in before.items()]
        return [x for x in pairs if x[2] < x[1]]

    def full(self, *names):
        """[(what, path, lowest free bytes, all bytes)] of file systems that were full, or are now if nobody watched."""
        seen = self.attempt.get("disk") or {"run": [str(self.folder), *disk_space(self.folder if self.folder.is_dir() else ".")]}
        return [(name, path, free, total) for name, (path, free, total) in seen.items() if free < min(TOO_FULL, total / 20) and (not names or name in names)]

    def saved(self):
        saves = [e for e in read_events(self.folder) if e["event"] == "checkpoint"]
        return saves[-1] if saves and any((self.folder / "checkpoints").glob("last*.pt")) else None


def read_events(folder, since=0.0):
    events = []
    for line in read(folder / "events.jsonl").splitlines():
        with contextlib.suppress(ValueError):                # the last line can be cut short by a full disk
            e = json.loads(line)
            if isinstance(e, dict) and "event" in e and e.get("t", 0) >= since:
                events.append(e)
    return events


def read_beats(folder, since=0.0):
    """The heartbeat ring, oldest first."""
    rows = re.findall(r"^(\d+\.\d+) pid (\d+) epoch (\d+) step (\d+) (\S+)", read(folder / "crash" / "heartbeat"), re.M)
    beats = [{"t": float(t), "pid": int(pid), "epoch": int(epoch), "step": int(step), "phase": phase} for t, pid, epoch, step, phase in rows]
    return sorted((b for b in beats if b["t"] >= since), key=lambda b: b["t"])


def lock_holder(folder):
    try:
        with open(folder / "lock", "rb") as f:
            try:
                fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(f.read(20) or b"0") or -1
    except (OSError, ValueError):
        pass
    return 0


def read_attempts(folder):
    """[(evidence, its folder)] by when each was last written; a run's folder, or the folder of one attempt."""
    places = [p for p in ([folder] if (folder / "evidence.json").exists() else (folder / "crash").glob("attempt-*")) if p.is_dir()]
    found = []
    for place in places:
        try:
            data = json.loads(read(place / "evidence.json"))
        except ValueError:
            data = {}
        stderr = place / "stderr"
        found.append((data.get("updated") or (stderr.stat().st_mtime if stderr.exists() else 0), place.name, data, place))
    return [(data, place) for _, _, data, place in sorted(found, key=lambda x: x[:2])]


def read_facts(folder):
    """What is left of the last attempt at the run in this folder."""
    folder = Path(folder)
    facts = Facts(folder)
    attempts = read_attempts(folder)
    facts.attempt, place = attempts[-1] if attempts else ({}, None)
    if facts.attempt.get("run"):
        facts.folder = folder = Path(facts.attempt["run"]) if not (folder / "events.jsonl").exists() else folder
    facts.running, everything = lock_holder(folder), read_events(folder)
    start = next((e for e in reversed(everything) if e["event"] == "start"), {})
    last_word = facts.attempt.get("updated", 0) or (max((p.stat().st_mtime for p in place.iterdir()), default=0) if place else 0)
    if start.get("t", 0) > last_word + 1 and start.get("pid") != facts.attempt.get("pid"):
        facts.attempt, place = {}, None                      # a later attempt, without a supervisor: the older evidence is about another one
    since = facts.attempt.get("started", start.get("t", 0.0))
    facts.events = [e for e in everything if e.get("t", 0) >= since]
    facts.beat = (read_beats(folder, since) or [{}])[-1]
    if place:
        facts.parent_file = f"crash/{place.name}/evidence.json"
        facts.status = tuple(facts.attempt["exit"]) if facts.attempt.get("exit") else None
        if (place / "stderr").exists():
            facts.stderr = read(place / "stderr.old") + read(place / "stderr")
            facts.stderr_file = f"crash/{place.name}/stderr"
        facts.reports = [(p.name, read(p)) for p in sorted(place.glob("*.ips"))]
    facts.fault = read_fault(folder, since, facts.attempt.get("pid") or start.get("pid"))
    for line in read(folder / "config.yaml").splitlines():
        with contextlib.suppress(ValueError):
            facts.config[line.partition(": ")[0]] = json.loads(line.partition(": ")[2])
    if facts.code in (132, 134, 135, 136, 137, 139, 152, 153):           # a shell in between reported its child's signal
        facts.status = ("signal", signal.Signals(facts.code - 128).name)
    return facts


def read_fault(folder, since, pid):
    """The part of faulthandler's log that this attempt wrote: the process says its number when it opens the file."""
    parts = re.split(r"^(?=pid \d+ started )", read(folder / "crash" / "faulthandler.log"), flags=re.M)
    head = re.match(r"pid (\d+) started ([\d.]+)", parts[-1])
    mine = head and (int(head[1]) == pid or float(head[2]) >= since)
    return parts[-1] if mine or not head else ""


# -----------------------------------------------------------------------------
# causes: for each verdict what it means, what to do, and whether going on can help

RESUME, AGAIN, STAGES = "{resume}", "{command}", "python check_crash_cause.py"
# key: (one line, what to do, next command, resuming can help)
CAUSES = {
    "ok": ("the run is done", "nothing", "", False),
    "incomplete": ("the process ended by itself in mid-run, without an error", "go on with it; look for a call of exit in code that was added", RESUME, True),
    "openmp_duplicate": ("two OpenMP runtimes were started in one process, and the second one aborted it",
                         "keep FAISS in its own process (--search faiss does), and one OpenMP runtime in the environment", STAGES, False),
    "openmp_masked": ("two OpenMP runtimes are in one process; KMP_DUPLICATE_LIB_OK hides it, at the risk of crashes and wrong results",
                      "keep FAISS in its own process, and one OpenMP runtime in the environment; then unset the variable", STAGES, False),
    "segfault": ("native code touched memory that is not its own", "isolate that component; then upgrade it, or avoid it", STAGES, True),
    "stack_overflow": ("a recursion without an end used up the stack", "find the recursion in the repeating frames", RESUME, False),
    "abort": ("native code gave up (SIGABRT)", "get a core dump, and rerun that component alone", "ulimit -c unlimited && {resume}", True),
    "heap_corruption": ("the allocator found its own records damaged: some native code wrote where it must not",
                        "isolate the component; upgrade the library", STAGES, True),
    "native_out_of_memory": ("native code got no memory, and nobody caught that", "use less memory: smaller --memory-bank-size, --bs, --bank-negatives",
                             RESUME, True),
    "oom_killed": ("the kernel killed it, because memory ran out", "smaller --memory-bank-size and --bs, uncompressed NPZ files that can be mapped; "
                   "or more memory", RESUME, True),
    "killed_externally": ("killed from outside (SIGKILL), by a person or a program", "find who: a job scheduler, a script, a person", RESUME, True),
    "cpu_limit": ("the CPU time limit ended it", "raise the limit (ulimit -t), or ask the scheduler for more time", RESUME, False),
    "allocation_refused": ("an allocation was refused", "raise the limit (ulimit -v), or use less: smaller --bs, --memory-bank-size, --bank-negatives",
                           RESUME, False),
    "stopped": ("stopped by a signal", "nothing is lost; go on when you like", RESUME, False),
    "input_file_shrank": ("an input file became shorter while it was mapped", "restore the file as it was at the start, then go on", RESUME, False),
    "disk_full": ("the disk is full", "free some space, then go on", "df -h {run}", False),
    "file_size_limit": ("a file grew to the file size limit", "raise it, then go on", "ulimit -f unlimited && {resume}", False),
    "too_many_open_files": ("too many open files", "raise the limit, or use fewer --workers", "ulimit -n 4096 && {resume}", False),
    "worker_killed": ("a loader worker was killed", "do without workers", "{resume} --workers 0", True),
    "worker_segfault": ("a loader worker crashed in native code", "do without workers", "{resume} --workers 0", True),
    "shared_memory_full": ("shared memory is full", "fewer --workers, or a larger /dev/shm (docker run --shm-size=1g)", "{resume} --workers 0", False),
    "fork_deadlock": ("a forked child waits forever for a thread that does not exist in it", "start children with spawn, or do without: --workers 0",
                      "{resume} --workers 0", True),
    "hang": ("it stood still", "look at the line that the stack names", RESUME, True),
    "thread_limit": ("the system refused another thread", "fewer threads, or a higher limit (ulimit -u)", "OMP_NUM_THREADS=1 {resume}", False),
    "illegal_instruction": ("an instruction that this CPU does not have", "install a build for this CPU", "python check_crash_cause.py --env", False),
    "diverged": ("the numbers diverged: the loss or the gradient was not finite", "lower --lr; mend or drop the rows that are named",
                 "{resume} --lr {lower_lr:g}", False),
    "corrupt_input": ("an input file was refused", "mend the file, or make it again", AGAIN, False),
    "log_reader_died": ("the program that read its output is gone", "log to a file; do not pipe a long run into a program that can end", RESUME, False),
    "python_error": ("a Python error", "see the line that is quoted", RESUME, False),
    "unknown": ("not established", "run it under a launcher, which keeps the exit status and the messages", AGAIN, True),
}


@dataclasses.dataclass
class Verdict:
    key: str
    confidence: str
    evidence: list                                           # [(fact, file)]
    detail: str = ""                                         # instead of the cause's own line


# text of a Python error (exit code, traceback) -> key; the first that matches decides. True = look above the last traceback
# too, for a worker's line can stand far above; "children" = do so if the last traceback is about a child process
ERROR_TEXTS = [
    ("shared_memory_full", False, r"unable to (?:write to|resize|stretch|allocate shared memory\(shm\) for) file </?torch_|insufficient shared memory|"
                                  r"unable to open shared memory object.*No space left|Couldn't allocate shared memory"),
    ("too_many_open_files", "children", r"Too many open files|received \d+ items of ancdata|\[Errno 2[34]\]"),
    ("worker_killed", True, r"DataLoader worker \(pid \d+\) is killed by signal: (?:Killed|Terminated|Hangup|Interrupt)\b"),
    ("cpu_limit", True, r"DataLoader worker \(pid \d+\) is killed by signal: CPU time limit.*"),
    ("file_size_limit", True, r"DataLoader worker \(pid \d+\) is killed by signal: File size limit.*"),
    ("worker_segfault", True, r"DataLoader worker \(pid \d+\) is killed by signal: .*|Unexpected (?:segmentation fault|floating-point exception) encountered in worker"),
    ("worker_killed", True, r"DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly.*"),
    ("disk_full", False, r"No space left on device|\[Errno 28\]|Disk quota exceeded|\[Errno 122\]"),
    ("file_size_limit", False, r"File too large|\[Errno 27\]"),
    ("thread_limit", False, r"Thread creation failed|can't start new thread|pthread_create failed|OMP: Error #34|Resource temporarily unavailable"),
    ("allocation_refused", False, r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|Unable to allocate .* for an array|^(?:\S*\.)?_?(?:Array)?MemoryError\b.*|"
                                  r"std::bad_alloc|[Cc]annot allocate memory|failed to map segment|(?:CUDA|MPS backend) out of memory|Failed to allocate"),
]
# message before SIGABRT -> key; it must stand at the end, where the process died
ABORT_TEXTS = [
    ("openmp_duplicate", r"OMP: Error #15.*"),
    ("thread_limit", r"OMP: Error #34.*|Thread creation failed.*"),
    ("native_out_of_memory", r".*std::bad_alloc.*|libc\+\+abi.*Unable to allocate.*"),
    ("heap_corruption", r"free\(\): .*|malloc\(\): .*|realloc\(\): .*|malloc_consolidate\(\).*|munmap_chunk\(\).*|corrupted (?:size|double-linked).*|"
                        r"double free or corruption.*|tcache_thread_shutdown\(\).*|malloc: \*\*\* error for object.*|pointer being freed was not allocated|"
                        r"Incorrect checksum for freed object.*|\*\*\* stack smashing detected.*|sysmalloc: Assertion.*|Fatal glibc error: malloc.*|mimalloc: error.*"),
    ("abort", r"terminate called.*|libc\+\+abi(?:\.dylib)?: .*|LLVM ERROR: .*|.*Assertion .* failed.*|OMP: Error #\d+.*|.*failed assertion.*|Check failed.*"),
]
DATA_PHASES = ("load", "encode", "search", "mine", "evaluate")


def last_traceback(text):
    """From the last chain of tracebacks on, without source lines; without any traceback, the last lines."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    while len(starts) > 1 and any("above exception" in line for line in lines[max(0, starts[-1] - 3):starts[-1]]):
        starts.pop()
    return [line for line in lines[starts[-1]:] if not line.startswith("  ")] if starts else lines[-6:]


def quote(line):
    return line.strip()[:300]


def find_text(facts, pattern, whole):
    """(line, file) where a pattern stands: in stderr, or in the error that the run itself recorded."""
    end, everything = last_traceback(facts.stderr or ""), (facts.stderr or "").splitlines()
    for line in [*reversed(end), *(reversed(everything) if whole else [])]:
        if re.search(pattern, line):
            return quote(line), facts.stderr_file
    error = facts.end.get("error", "")
    return (quote(error.splitlines()[0]), "events.jsonl") if error and re.search(pattern, error) else None


# -----------------------------------------------------------------------------
# rules: each looks at the facts and gives a verdict or passes; the first that speaks is right

def rule_running(f):
    if not f.running:
        return None
    age = time.time() - f.beat["t"] if f.beat else 0
    if age > 600:
        return Verdict("hang", "probable", [(f"process {f.running} holds the folder and has had no heartbeat for {age:.0f} s", "lock, crash/heartbeat")])
    return Verdict("unknown", "unknown", [(f"process {f.running} holds the folder", "lock")], "the run has not ended: it is training now")


def rule_hang(f):
    h = f.attempt.get("hang")
    if not h:
        return None
    quiet = (f"no heartbeat for {h['silent']:.0f} s in phase {h['phase']}", "crash/heartbeat")
    people = {p["pid"]: p for p in h["processes"]}
    for p in h["processes"]:
        parent = people.get(p["parent"])
        if parent and p["threads"] == 1 and p["waits"] in ("futex", "", "0") and p["command"] == parent["command"] and p["state"] in "SD":
            return Verdict("fork_deadlock", "certain" if parent["threads"] > 1 and p["waits"] == "futex" else "probable",
                           [quiet, (f"process {p['pid']}, forked from {parent['pid']} ({parent['threads']} threads), has one thread, which waits"
                                    f"{' on a futex' * (p['waits'] == 'futex')}", "evidence.json")])
    for key, _, pattern in ERROR_TEXTS[:3]:                  # an error in a worker's own thread ends nothing: the trainer waits for its batch
        if h["phase"] == "load" and (hit := find_text(f, pattern, True)):
            return Verdict(key, "certain", [hit, quiet], f"{CAUSES[key][0]}: {hit[0]}; the trainer waited in vain")
    where = stuck_line(h["stacks"])
    return Verdict("hang", "certain", [quiet] + ([(f"the stack stands in {where}", "crash/faulthandler.log")] if where else []),
                   f"it stood still{' in ' + where if where else ''}, for {h['silent']:.0f} s")


def stuck_line(stacks):
    """The innermost line of the thread that trains."""
    blocks = re.findall(r"(?:Current thread|Thread) [^\n]*\n((?:  [^\n]*\n?)+)", stacks)
    blocks.sort(key=lambda b: "train_twotower_v4" not in b)
    line = re.search(r'File "([^"]+)", line (\d+) in (\S+)', blocks[0]) if blocks else None
    return f"{os.path.basename(line[1])} line {line[2]} ({line[3]})" if line else ""


def rule_finished(f):
    if f.code != 0 and not (f.status is None and f.end.get("status") == "done"):
        return None
    if f.end.get("status") == "done" or f.attempt.get("asks_only"):
        runtimes, flag = f.attempt.get("openmp", []), f.attempt.get("environment", {}).get("KMP_DUPLICATE_LIB_OK", "")
        if len(runtimes) > 1:                                # without the flag at the start, a module has set it (threadpoolctl does), or one of them sleeps
            sure = "certain" if flag.lower() in ("true", "1", "yes", "on") else "probable"
            return Verdict("openmp_masked", sure, [(f"mapped: {', '.join(runtimes)}", "evidence.json"), (f"KMP_DUPLICATE_LIB_OK={flag}", "evidence.json")])
        return Verdict("ok", "certain", [("the end event says done", "events.jsonl")] + [("exit code 0", "evidence.json")] * (f.code == 0))
    return Verdict("incomplete", "certain" if f.attempt.get("run") else "probable",
                   [("exit code 0", "evidence.json"), (f"the end event says {f.end['error']}" if f.end.get("error") else "no end event", "events.jsonl")])


def memory_gone(f):
    """The counters that say the kernel killed for want of memory. Only our own control group's is decisive: the machine's counts for all."""
    risen = [(file, a, b) for file, (a, b) in f.kills().items() if b > a]
    group = [file for file in f.kills() if "cgroup" in file]
    if not risen or group and not any("cgroup" in file for file, _, _ in risen):
        return None
    sudden = f.attempt.get("oom_last", {}).get("/proc/vmstat", 1 << 60) < f.kills().get("/proc/vmstat", (0, 0))[1]
    return "certain" if group or sudden else "probable", [(f"oom_kill rose from {a} to {b}", file) for file, a, b in risen]


def rule_memory(f):
    worker = find_text(f, r"is killed by signal: Killed", True)
    gone = memory_gone(f) if f.signal == "SIGKILL" or worker or f.status is None and f.attempt.get("started") else None
    if not gone or f.status is None and (f.end or "Fatal" in f.fault):
        return None
    return Verdict("oom_killed", gone[0], [worker if worker and f.signal != "SIGKILL" else ("SIGKILL", "evidence.json")] * bool(f.status) + gone[1])


def rule_kill(f):
    limit = f.attempt.get("limits", {}).get("cpu", [None, None])
    used = max(f.attempt.get("cpu_seconds", 0), 0)
    if f.signal == "SIGXCPU":
        return Verdict("cpu_limit", "certain", [("SIGXCPU", "evidence.json"), (f"CPU limit {limit}, used {used:.1f} s", "evidence.json")])
    if f.signal != "SIGKILL":
        return None
    reach = min((v for v in limit if v is not None), default=None)
    if reach is not None and used >= reach - 1.5:
        return Verdict("cpu_limit", "certain", [("SIGKILL", "evidence.json"), (f"used {used:.1f} s of CPU time, the limit is {reach} s", "evidence.json")])
    for name, text in f.reports:                             # a Jetsam report lists every process; the ones it ended have a reason
        with contextlib.suppress(ValueError, AttributeError):
            listed = json.loads(text.partition("\n")[2]).get("processes", [])
            if reason := next((p.get("reason") for p in listed if p.get("pid") == f.attempt.get("pid")), None):
                return Verdict("oom_killed", "certain", [("SIGKILL", "evidence.json"), (f"the system's memory report ends it: {reason}", name)])
    kills = f.kills()
    if not kills:
        return Verdict("killed_externally", "unknown", [("SIGKILL", "evidence.json"), ("no counter of kills for want of memory on this system", "evidence.json")],
                       "killed from outside (SIGKILL); whether by the system, for want of memory, is not known")
    return Verdict("killed_externally", "certain", [("SIGKILL", "evidence.json")] +
                   [(f"oom_kill stayed at {b}: it was not memory" if a == b else f"oom_kill of the machine rose from {a} to {b}, for another process", file)
                    for file, (a, b) in kills.items()])


def rule_bus(f):
    """A page of a mapped file that is not there: the file was cut, or a full disk could not give the page."""
    worker_bus = find_text(f, r"is killed by signal: Bus error|Unexpected bus error encountered in worker", True)
    bus = f.signal == "SIGBUS" or "Fatal Python error: Bus error" in f.fault and f.signal != "SIGKILL"
    if not (bus or worker_bus):
        return None
    fact = ("SIGBUS", "evidence.json") if f.signal == "SIGBUS" else worker_bus or ("Fatal Python error: Bus error", "crash/faulthandler.log")
    at = f", in phase {f.beat['phase']}" if f.beat else ""
    if lost := f.shrunk():
        return Verdict("input_file_shrank", "certain", [(fact[0] + at, fact[1])] +
                       [(f"{p}: {before:,} bytes at the start, {after:,} now", "evidence.json") for p, before, after in lost])
    if worker_bus and (shm := f.full("shm")):
        return Verdict("shared_memory_full", "certain", [worker_bus, (f"{shm[0][1]}: {shm[0][2]:,} of {shm[0][3]:,} bytes free", "evidence.json")])
    if full := f.full("run", "tmp", "cwd"):
        return Verdict("disk_full", "certain" if f.status else "probable",
                       [(fact[0] + at, fact[1])] + [(f"{path}: {free:,} of {total:,} bytes free", "evidence.json") for _, path, free, total in full])
    if worker_bus and not bus:
        small = f.attempt.get("disk", {}).get("shm", [0, 0, 1 << 60])[2] < 2 ** 28
        return Verdict("shared_memory_full" if small else "worker_segfault", "probable", [worker_bus])
    return Verdict("segfault", "probable", [(fact[0] + at, fact[1])], "a memory access that could not be done (SIGBUS); no input shrank, and no disk was full")


def rule_abort(f):
    aborted = f.signal == "SIGABRT" or f.status is None and "Fatal Python error: Aborted" in f.fault
    worker = find_text(f, r"is killed by signal: Aborted", True) if f.code else None
    said = [line for line in (f.stderr or "").splitlines() if line.strip()]
    tail, strange = said[-25:], f.status is None and not f.end and "Fatal" not in f.fault            # no status: the message alone
    if not (aborted or worker or strange and f.stderr):
        return None
    for key, pattern in ABORT_TEXTS:
        for lines, confidence in ((tail, "certain"), (said, "probable")) if aborted else ((tail, "probable"),):
            if hit := next((line for line in reversed(lines) if re.search(pattern, line)), None):
                sure = "unknown" if key == "abort" and confidence == "probable" else confidence
                fact = ("SIGABRT", "evidence.json") if f.signal else worker or ("Fatal Python error: Aborted", "crash/faulthandler.log")
                detail = f"native code gave up: {quote(hit)}" if key == "abort" else ""
                return Verdict(key, sure, [fact] * (aborted or bool(worker)) + [(quote(hit), f.stderr_file)], detail)
    if not aborted:
        return None
    for name, text in f.reports:
        if m := re.search(r'"asi"\s*:\s*\{(.*?)\}', text, re.S):
            return Verdict("abort", "probable", [("SIGABRT", "evidence.json"), (quote(m[1]), name)], f"native code gave up: {quote(m[1])}")
    lost = "its stderr is lost, and the cause with it" if f.stderr is None else "it left no message"
    return Verdict("abort", "unknown", [("SIGABRT", "evidence.json") if f.signal else ("Fatal Python error: Aborted", "crash/faulthandler.log"), (lost, f.stderr_file)],
                   f"it aborted, and the cause is not established: {lost}")


def rule_native(f):
    """SIGSEGV, SIGILL and the like, by the signal or by what faulthandler wrote."""
    words = {"SIGSEGV": "Segmentation fault", "SIGILL": "Illegal instruction", "SIGFPE": "Floating(?:-| )point exception"}
    for name, text in words.items():
        said = re.search(rf"Fatal Python error: {text}", f.fault)
        if f.signal != name and not (f.status is None and said):
            continue
        facts = [(name, "evidence.json")] if f.signal else []
        facts += [(said[0], "crash/faulthandler.log")] if said else []
        frames = [f"{os.path.basename(file)} line {line} ({function})" for file, line, function in f.frames]
        facts += [(f"in {frames[0]}", "crash/faulthandler.log")] if frames else []
        facts += [(f"phase {f.beat['phase']}, epoch {f.beat['epoch']}, step {f.beat['step']}", "crash/heartbeat")] if f.beat else []
        sure = "certain" if f.signal else "probable"
        if name == "SIGILL":
            return Verdict("illegal_instruction", sure, facts)
        if name == "SIGFPE":
            return Verdict("unknown", "unknown", facts, "native code divided by zero, or the like (SIGFPE); no known cause")
        if len(frames) >= 50 and len(set(frames)) <= len(frames) / 5:
            return Verdict("stack_overflow", sure, facts + [(f"{len(frames)} frames, {len(set(frames))} different ones", "crash/faulthandler.log")])
        if f.fault and not said:                             # faulthandler was on, and had no stack to write from
            sure, facts = "probable", facts + [("faulthandler was on and wrote nothing: a stack that overflows in a thread looks like that", "crash/faulthandler.log")]
        place = f" in {frames[0]}" if frames else ""
        return Verdict("segfault", sure, facts, f"native code touched memory that is not its own{place}" + (f", phase {f.beat['phase']}" if f.beat else ""))
    if f.signal == "SIGXFSZ":
        return Verdict("file_size_limit", "certain", [("SIGXFSZ", "evidence.json")])
    return None


def rule_stopped(f):
    name, ended = f.end.get("signal"), f.end.get("status") == "interrupted"
    if name == "SIGPIPE" or f.signal == "SIGPIPE":
        return Verdict("log_reader_died", "certain", [("broken pipe: the reader of stdout is gone; the run saved and stopped", "events.jsonl")])
    if not ended:
        by_code = {130: "SIGINT", 143: "SIGTERM", 129: "SIGHUP"}.get(f.code)
        name = f.signal if f.signal in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") else by_code
        if not name:
            return None
        if refused := find_text(f, r"pthread_create failed.*|Thread creation failed.*", True):       # OpenBLAS then sends itself SIGINT
            return Verdict("thread_limit", "probable", [refused, (f"{name}, and nobody sent it", "evidence.json")])
    said = find_text(f, rf"train: {name}: finishing|train: stopped before", True)
    known = ended or f.signal or said or name in [s for s, _ in f.attempt.get("signals", [])]
    return Verdict("stopped", "certain" if known else "probable",
                   [(f"{name}, interrupted and saved", "events.jsonl") if ended else said or (f"{name}, exit status {f.status[1]}", "evidence.json")],
                   f"stopped by {name}" + ("" if ended else ", before it could save; the last checkpoint is whole"))


def rule_error_text(f):
    """A Python error: the text decides, with what the parent saw of disk and limits."""
    if f.signal or f.code == 0 or f.code == 3:
        return None
    about_child = re.search(r"DataLoader|multiprocessing|EOFError|Connection\w*Error|ancdata", "\n".join((f.stderr or "").splitlines()[-60:]))
    for key, whole, pattern in ERROR_TEXTS:
        if hit := find_text(f, pattern, whole is True or whole and about_child):
            facts, sure = [hit], "certain"
            if key == "shared_memory_full" and not f.full("shm"):
                sure = "probable"
            if key in ("disk_full", "file_size_limit", "shared_memory_full"):
                facts += [(f"{path}: {free:,} of {total:,} bytes free", "evidence.json") for _, path, free, total in f.full()]
            if key == "allocation_refused" and f.attempt.get("limits", {}).get("as", [None])[0]:
                facts.append((f"address space limit {f.attempt['limits']['as'][0]:,} bytes", "evidence.json"))
            return Verdict(key, sure, facts, f"{CAUSES[key][0]}: {hit[0]}")
    if hit := find_text(f, r"PytorchStreamWriter failed|file write failed|unexpected pos \d+ vs|unable to (?:write to|resize|stretch) file", False):
        if full := f.full():                                 # torch's writer never says why
            return Verdict("disk_full", "certain", [hit] + [(f"{path}: {free:,} of {total:,} bytes free", "evidence.json") for _, path, free, total in full])
        if (size := f.attempt.get("limits", {}).get("fsize", [None])[0]) is not None:
            return Verdict("file_size_limit", "probable", [hit, (f"file size limit {size:,} bytes, and no full disk", "evidence.json")])
        return Verdict("disk_full", "probable", [hit, ("a write failed; no full disk was seen, but space can be free again by now", "evidence.json")])
    if hit := find_text(f, r"BrokenPipeError|\[Errno 32\]", False):
        printed = re.search(r"print\(|stdout|\.write\(|flush", f.stderr or "")
        return Verdict("log_reader_died", "certain" if printed else "probable", [hit])
    return None


def rule_refused(f):
    if f.code != 2 and not (f.status is None and f.end.get("error", "").startswith("UserError")):
        return None
    hit = find_text(f, r"^train: (?!warning)|^UserError", True)
    if not hit:
        return None
    given = f.attempt.get("command", [])
    names = [b for a, b in zip(given, given[1:]) if a in ("--pairs", "--bank")] + [str(f.config.get(k) or "") for k in ("pairs", "bank")]
    about_input = re.search(r"\.np[zy]\b", hit[0]) or any(f"{n}:" in hit[0] for n in names if n)
    if about_input and not re.search(r"read-only|Permission denied", hit[0]):
        return Verdict("corrupt_input", "certain", [hit, ("exit code 2", "evidence.json")], f"an input file was refused: {hit[0].removeprefix('train: ')}")
    return Verdict("python_error", "certain", [hit], f"the trainer refused to go on: {hit[0].removeprefix('train: ')}")


def rule_diverged(f):
    if f.code != 3 and f.end.get("status") != "diverged":
        return None
    facts = [(f"{len(f.guards)} guard events, the last: {f.guards[-1]['what']}", "events.jsonl")] if f.guards else []
    rows = list(dict.fromkeys(r for e in f.guards for r in e.get("rows", [])))
    facts += [(f"rows: {', '.join(map(str, rows[:10]))}", "events.jsonl")] if rows else []
    return Verdict("diverged", "certain" if f.guards else "probable", facts + [("exit code 3", "evidence.json")] * (f.code == 3))


def rule_python(f):
    """Any other exception, by the traceback's last line."""
    if f.signal or f.code == 0:
        return None
    lines = last_traceback(f.stderr or "") if "Traceback (most recent call last)" in (f.stderr or "") else []
    hit = next(((quote(x), f.stderr_file) for x in reversed(lines) if re.match(r"[\w.]+(?:Error|Exception|Exit|Interrupt|Warning|Iteration)\b|[\w.]+: ", x)), None)
    error = f.end.get("error")
    if not hit and not error:
        return None
    hit, space = hit or (quote(error), "events.jsonl"), f.attempt.get("limits", {}).get("as", [None])[0]
    if space and f.attempt.get("vm_peak", 0) > 0.9 * space:  # who is refused memory does not always say so
        return Verdict("allocation_refused", "probable", [hit, (f"it had mapped {f.attempt['vm_peak']:,} of the {space:,} bytes it may", "evidence.json")])
    return Verdict("python_error", "certain" if f.code else "probable", [hit], f"a Python error: {hit[0]}")


def rule_signal(f):
    if not f.signal:
        return None
    return Verdict("killed_externally" if f.signal in ("SIGUSR1", "SIGUSR2", "SIGALRM") else "unknown", "probable" if f.signal.startswith("SIGUSR") else "unknown",
                   [(f.signal, "evidence.json")], f"ended by {f.signal}; who sent it is not known")


def rule_unknown(f):
    missing = []
    if f.status is None:
        missing.append("the exit status (it had no supervisor, or that was killed too)")
    if f.stderr is None:
        missing.append("stderr")
    if not f.events:
        missing.append("events of this attempt")
    facts = [(f"missing: {', '.join(missing)}", str(f.folder))] if missing else []
    facts += [(f"exit code {f.code}, without a message", "evidence.json")] if f.code is not None else []
    facts += [(f"last heartbeat: phase {f.beat['phase']}, epoch {f.beat['epoch']}, step {f.beat['step']}", "crash/heartbeat")] if f.beat else []
    return Verdict("unknown", "unknown", facts, f"not established: {', '.join(missing) + ' missing' if missing else 'nothing names the cause'}")


RULES = (rule_running, rule_hang, rule_finished, rule_memory, rule_kill, rule_bus, rule_abort, rule_native, rule_stopped, rule_diverged,
         rule_error_text, rule_refused, rule_python, rule_signal, rule_unknown)


def diagnose(f):
    verdict = next(v for v in (rule(f) for rule in RULES) if v)
    if f.status is None and verdict.confidence == "certain":
        verdict.confidence = "probable"                      # nobody saw how it ended
    return verdict


def list_excluded(f, key):
    """What else people suspect, and the fact that speaks against it."""
    kills, said = f.kills(), f.stderr or ""
    native = f.signal in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE")
    found = []
    if kills and all(a == b for a, b in kills.values()):
        found.append(("oom_killed", f"the kernel's oom_kill counter stayed at {list(kills.values())[-1][1]}"))
    elif f.status and f.signal != "SIGKILL" and not memory_gone(f):
        found.append(("oom_killed", f"it ended with {f.status[0]} {f.status[1]}, not by SIGKILL"))
    if f.attempt.get("disk") and not f.full():
        path, free, _ = f.attempt["disk"].get("run") or f.attempt["disk"]["cwd"]
        found.append(("disk_full", f"at least {free / 1e9:.1f} GB were free in {path}"))
    if f.stderr is not None and "OMP: Error #15" not in said:
        found.append(("openmp_duplicate", "no OMP: Error #15 in its stderr"))
    if any(e["event"] == "step" for e in f.events) and not f.guards:
        found.append(("diverged", "every loss and gradient was finite"))
    if (f.attempt.get("inputs_end") or f.config.get("bank_bytes")) and not f.shrunk():
        found.append(("input_file_shrank", "the input files have the size they had at the start"))
    if f.stderr is not None and native and "Traceback (most recent call last)" not in said:
        found.append(("python_error", "no traceback in its stderr"))
    if f.attempt.get("ended") and f.beat and not f.attempt.get("hang"):
        found.append(("hang", f"its last heartbeat was {max(0.0, f.attempt['ended'] - f.beat['t']):.1f} s before the end"))
    return [{"what": k, "why": why} for k, why in found if k != key]


def post_mortem(folder):
    """Everything that can be said about the last attempt, as the JSON that programs read."""
    f = read_facts(folder)
    v = diagnose(f)
    headline, fix, then, helps = CAUSES[v.key]
    if v.key == "unknown" and f.running:
        fix, then, helps = "wait, or look at its progress", f"tail -f {shlex.quote(str(f.folder / 'events.jsonl'))}", False
    saved, command = f.saved(), shlex.join(f.attempt.get("command", [])) or "./launch_v4_cpu.sh"
    resume = f"python train_twotower_v4.py --resume {shlex.quote(str(f.folder))}" if saved else command
    lower = float(f.config.get("lr", 1e-3)) / 10
    warnings = []
    if v.key not in ("openmp_masked", "openmp_duplicate") and len(f.attempt.get("openmp", [])) > 1:
        warnings.append(f"openmp_masked: two OpenMP runtimes were in the process ({', '.join(f.attempt['openmp'])}); that alone can crash it")
    warnings += [e["what"] for e in f.events if e["event"] == "guard" and "search worker died" in e.get("what", "")][-1:]
    return {"verdict": v.key, "confidence": v.confidence, "what": v.detail or headline,
            "evidence": [{"fact": fact, "file": f.parent_file if file == "evidence.json" else file} for fact, file in v.evidence],
            "excluded": list_excluded(f, v.key) if v.key not in ("ok", "openmp_masked") else [], "fix": fix,
            "next": then.format(resume=resume, command=command, run=shlex.quote(str(f.folder)), lower_lr=lower),
            "where": {k: f.beat[k] for k in ("phase", "epoch", "step")} if f.beat else {}, "saved_step": saved["step"] if saved else None,
            "warnings": warnings, "run": str(f.folder), "resuming_can_help": helps and not f.running}


def tell(p):
    """The verdict for people; the cause stands in the first line, the next command in the last."""
    lines = [f"verdict: {p['verdict']}: {p['what']}", f"confidence: {p['confidence']}"]
    if p["where"] and p["verdict"] not in ("ok", "openmp_masked"):
        lines.append("where: phase {phase}, epoch {epoch}, step {step}".format(**p["where"]))
    lines += [f"evidence: {e['fact']} [{e['file']}]" for e in p["evidence"]]
    lines += [f"not {e['what']}: {e['why']}" for e in p["excluded"]]
    lines += [f"warning: {w}" for w in p["warnings"]]
    if p["verdict"] not in ("ok", "openmp_masked"):
        lines.append(f"saved: step {p['saved_step']}, in {p['run']}/checkpoints" if p["saved_step"] is not None else "saved: nothing yet")
    lines += [f"fix: {p['fix']}"] if p["verdict"] != "ok" else []
    return "\n".join(lines + ([f"next: {p['next']}"] if p["next"] else []))


# -----------------------------------------------------------------------------
# supervise: the parent of a run; it sees what only a parent can, and decides whether to go on

class Evidence:
    """What the parent keeps of one attempt: in a temporary folder until the run has one, then in RUN/crash/attempt-N."""
    RESERVED = 2 ** 16                                       # bytes written at once, so that a disk that fills up later still takes the end

    def __init__(self, command):
        self.temporary = self.place = Path(tempfile.mkdtemp(prefix="twotower."))
        self.log, self.heard, self.fresh = open(self.place / "stderr", "ab", buffering=0), b"", b""
        asks_only = any(a in ("--dry-run", "--help", "-h", "--version") for a in command)
        self.data = {"command": command, "cwd": os.getcwd(), "pid": 0, "started": time.time(), "run": "", "asks_only": asks_only, "signals": [],
                     "environment": {k: v for k, v in sorted(os.environ.items()) if SETTINGS.fullmatch(k)}, "python": platform.python_version(),
                     "platform": platform.platform(), "limits": limits_of("self"), "oom_start": oom_kills(), "openmp": [],
                     "inputs": sizes_of(os.path.abspath(a) for a in command if re.search(r"\.np[zy]$", a)), "disk": {}}

    def keep(self, chunk):
        """stderr, at once; of a progress bar's frames only the last of each piece."""
        self.heard, self.fresh = (self.heard + chunk)[-65536:], (self.fresh + chunk)[-65536:]
        with contextlib.suppress(OSError):
            if self.log.tell() > 2 ** 24:                    # the bar of a long run: the older half goes
                os.replace(self.place / "stderr", self.place / "stderr.old")
                self.log = open(self.place / "stderr", "ab", buffering=0)
            self.log.write(re.sub(rb"\r[^\r\n]*(?=\r[^\n])", b"", chunk))

    def settle(self, folder):
        """Move to the run's folder; tried once, for a full one takes the folder and not the files."""
        self.data["run"] = str(folder)
        try:
            taken = [int(p.name[8:]) for p in (folder / "crash").glob("attempt-*") if p.name[8:].isdigit()]
            place = folder / "crash" / f"attempt-{max(taken, default=0) + 1:03d}"
            place.mkdir(parents=True)
            log = open(place / "stderr", "ab", buffering=0)
            log.write((self.place / "stderr").read_bytes())
            write_reserved(place / "evidence.json", self.data, self.RESERVED)
        except OSError:
            return                                           # no room there: it stays where it is
        self.log.close()
        self.log, self.place = log, place

    def sample(self, pid):
        """What changes while it runs, and can't be asked any more when it is dead."""
        d, before = self.data, (len(self.data["openmp"]), len(self.data["inputs"]), self.data["limits"])
        if read(f"/proc/{pid}/limits"):
            d["limits"] = limits_of(pid)
        if peak := re.search(r"^VmPeak:\s*(\d+) kB", read(f"/proc/{pid}/status"), re.M):
            d["vm_peak"] = 1024 * int(peak[1])
        if process := describe_process(pid):
            d["cpu_seconds"], d["threads"] = process["cpu"], max(process["threads"], d.get("threads", 0))
        if process and process["state"] != "Z":              # the dead are in no control group
            d["oom_last"] = oom_kills(pid)
            d["oom_start"] = d["oom_last"] | d["oom_start"]
        for name, path in {"run": d["run"] or ".", "cwd": ".", "tmp": tempfile.gettempdir(), "shm": "/dev/shm"}.items():
            with contextlib.suppress(OSError):
                free, total = disk_space(path)
                lowest = d["disk"][name][1] if name in d["disk"] and d["disk"][name][0] == path else free
                d["disk"][name] = [path, min(free, lowest), total]
        files = mapped_files(pid) if LINUX or time.time() - d.get("listed", 0) > 60 else []
        d["listed"] = time.time() if files else d.get("listed", 0)
        d["openmp"] = sorted({*d["openmp"], *(p for p in files if is_llvm_openmp(p))})
        d["inputs"] = sizes_of(p for p in files if re.search(r"\.np[zy]$", p) and not (d["run"] and p.startswith(d["run"]))) | d["inputs"]
        if not d["run"] and (folder := read(self.temporary / "run")):
            self.settle(Path(folder))
        elif (len(d["openmp"]), len(d["inputs"]), d["limits"]) != before:
            self.save()

    @property
    def settled(self):
        return self.place != self.temporary

    def save(self):
        self.data["updated"] = time.time()
        try:
            write_reserved(self.place / "evidence.json", self.data, self.RESERVED)
        except OSError:                                      # no room in the run's folder: kept outside of it
            with contextlib.suppress(OSError):
                shutil.copy(self.place / "stderr", self.temporary)
                self.place = self.temporary
                write_reserved(self.place / "evidence.json", self.data, self.RESERVED)

    def finish(self, status, usage):
        d = self.data
        d["exit"] = ["signal", signal.Signals(-status).name] if status < 0 else ["exit", status]
        d["ended"], d["oom_end"], d["inputs_end"] = time.time(), read_counters(d["oom_start"]), sizes_of(d["inputs"])
        d["usage"] = {"user_s": usage.ru_utime, "system_s": usage.ru_stime, "peak_rss_mb": round(usage.ru_maxrss / (2 ** 10 if LINUX else 2 ** 20), 1),
                      "major_faults": usage.ru_majflt}
        d["cpu_seconds"] = d.get("cpu_seconds") or usage.ru_utime + usage.ru_stime
        if not LINUX:
            self.copy_reports()
        self.save()

    def copy_reports(self):
        """macOS writes a crash report a moment after the death, in a folder of the user or of the system."""
        time.sleep(3)
        for root in (Path.home() / "Library/Logs/DiagnosticReports", Path("/Library/Logs/DiagnosticReports")):
            for p in root.glob("*.ips"):
                with contextlib.suppress(OSError):
                    if p.stat().st_mtime >= self.data["started"] and re.search(rf'"pid"\s*:\s*{self.data["pid"]}\b', text := read(p)):
                        (self.place / p.name).write_text(text)


def write_reserved(path, data, size):
    """JSON, padded with blanks and written in place: a full disk takes it, for the blocks are there already."""
    text = json.dumps(data, indent=1)
    brief = json.dumps({k: data[k] for k in ("pid", "started", "ended", "updated", "run", "exit", "cwd") if k in data} |
                       {"limits": {k: v for k, v in data["limits"].items() if v[0] is not None and k in ("fsize", "cpu", "as")}})
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        for content in (f"{text:<{size}}\n".encode(), text.encode(), brief.encode()):               # a small file size limit is ours too
            with contextlib.suppress(OSError):
                if os.pwrite(fd, content, 0) == len(content):
                    return os.ftruncate(fd, len(content))
        raise OSError(f"{path}: no room")
    finally:
        os.close(fd)


def open_channel():
    """(our end, the child's end) of its stderr: a terminal if ours is one, so that it keeps its progress bar; else a pipe."""
    if not os.isatty(2):
        return os.pipe()
    ours, theirs = pty.openpty()
    mode = termios.tcgetattr(theirs)
    mode[1] &= ~termios.OPOST                                # the real terminal turns line ends into its own
    termios.tcsetattr(theirs, termios.TCSANOW, mode)
    copy_window_size(ours)
    return ours, theirs


def copy_window_size(fd):
    with contextlib.suppress(OSError):
        fcntl.ioctl(fd, termios.TIOCSWINSZ, fcntl.ioctl(2, termios.TIOCGWINSZ, bytes(8)))


def say(text):
    with contextlib.suppress(OSError):
        os.write(2, (text + "\n").encode())


class Child:
    """One attempt: the command as a child in a process group of its own, so that a signal of the terminal reaches it once, from here."""

    def __init__(self, command, evidence, hang_seconds):
        self.evidence, self.hang_seconds, self.pending, self.terminal = evidence, hang_seconds, [], True
        self.fd, theirs = open_channel()
        libc = ctypes.CDLL(None) if LINUX else None
        orphan = (lambda: libc.prctl(1, signal.SIGTERM)) if LINUX else None          # PR_SET_PDEATHSIG: if we are killed, it saves and stops
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=theirs, process_group=0, preexec_fn=orphan,
                                            env=os.environ | {"TWOTOWER_EVIDENCE": str(evidence.temporary)})
        finally:
            os.close(theirs)
        self.pid = evidence.data["pid"] = self.process.pid
        self.moved, self.place_seen, self.sampled, self.born = time.monotonic(), None, 0.0, time.monotonic()
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if (s, signal.getsignal(s)) != (signal.SIGHUP, signal.SIG_IGN):              # under nohup it outlives the terminal
                signal.signal(s, self.on_signal)
        signal.signal(signal.SIGTSTP, self.on_pause)
        signal.signal(signal.SIGWINCH, lambda *_: copy_window_size(self.fd) if self.fd is not None and os.isatty(self.fd) else None)

    def on_signal(self, signum, _frame):
        name = signal.Signals(signum).name
        self.evidence.data["signals"].append([name, time.time()])
        self.pending.append((signum, time.monotonic(), self.evidence.heard.count(f"train: {name}: finishing".encode())))

    def on_pause(self, _signum, _frame):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            os.killpg(self.pid, signal.SIGCONT)

    def pass_signals(self):
        """Send on what reached only us. A signal to all processes of a job has reached the trainer too, which says so; twice would end it unsaved."""
        for item in [p for p in self.pending if time.monotonic() - p[1] > 0.3]:
            self.pending.remove(item)
            if self.evidence.heard.count(f"train: {signal.Signals(item[0]).name}: finishing".encode()) <= item[2]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, item[0])

    def listen(self, timeout):
        """Copy what it writes to stderr to the terminal and to the file; whether there was something."""
        if self.fd is None:
            time.sleep(timeout)
            return False
        if not select.select([self.fd], [], [], timeout)[0]:
            return False
        try:
            chunk = os.read(self.fd, 65536)
        except OSError:                                      # a pty whose other end is closed
            chunk = b""
        if not chunk:
            os.close(self.fd)
            self.fd = None
            return False
        self.evidence.keep(chunk)
        if self.terminal:
            try:
                os.write(2, chunk)
            except OSError:
                self.terminal = False
        return True

    def wait(self):
        """Until it ends -> its status as subprocess counts, and what it used."""
        while True:
            self.listen(0.2)
            self.pass_signals()
            if hasattr(os, "waitid") and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self.evidence.sample(self.pid)               # a dead child that nobody has waited for still has its times and limits
            done, status, usage = os.wait4(self.pid, os.WNOHANG)
            if done:
                break
            if time.monotonic() - self.sampled > (0.3 if time.monotonic() - self.born < 10 else 1):
                self.sampled = time.monotonic()
                self.evidence.sample(self.pid)
                self.watch()
        self.process.returncode = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)              # loader workers it left behind; they would hold its lock
        while self.listen(0.1):
            pass
        return self.process.returncode, usage

    def watch(self):
        """Has it moved? By its heartbeat; before the first one by its CPU time; in a search by its worker's."""
        folder, d = self.evidence.data["run"], self.evidence.data
        beat = (read_beats(Path(folder), d["started"]) or [None])[-1] if folder else None
        place, limit, tree = beat and beat["t"], self.hang_seconds, []
        if not beat or beat["phase"] == "search":
            tree = process_tree(self.pid)
        worker = next((p for p in tree if "--search-worker" in p["command"]), None)
        if not beat:
            place = int(10 * sum(p["cpu"] for p in tree))
            limit = limit if LINUX else 6 * limit            # without /proc there is no CPU time to see
        elif worker:
            place = (worker["pid"], int(10 * worker["cpu"]))
        if place != self.place_seen or (describe_process(self.pid) or {}).get("state") in ("T", "t"):
            self.place_seen, self.moved, self.evidence.fresh = place, time.monotonic(), b""
        elif (silent := time.monotonic() - self.moved) > (min(limit, 30) if b"Traceback (most" in self.evidence.fresh else limit):
            if worker:
                say(f"check: the search worker stood still for {silent:.0f} s; ended, the trainer searches by itself")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker["pid"], signal.SIGKILL)
                self.moved = time.monotonic()
            else:
                self.end_hang(silent, beat)

    def end_hang(self, silent, beat):
        """Record where it stands, from inside and from outside, and end it."""
        d, tree, log = self.evidence.data, process_tree(self.pid), Path(self.evidence.data["run"] or ".") / "crash" / "faulthandler.log"
        mask = re.search(r"^SigCgt:\s*(\w+)", read(f"/proc/{self.pid}/status"), re.M)
        listens = int(mask[1], 16) >> (signal.SIGUSR1 - 1) & 1 if mask else beat is not None         # else SIGUSR1 would kill it
        before, stacks = len(read(log)), ""
        if listens:
            os.kill(self.pid, signal.SIGUSR1)
            for _ in range(30):
                time.sleep(0.1)
                if stacks and stacks == read(log)[before:]:
                    break
                stacks = read(log)[before:]
        d["hang"] = {"silent": silent, "limit": self.hang_seconds, "phase": beat["phase"] if beat else "start", "stacks": stacks[-20000:], "processes": tree}
        self.evidence.save()
        os.killpg(self.pid, signal.SIGKILL)


def planned_folder(command):
    """Where the trainer would have put a run that it refused to begin: --out, or the next free number after a finished one."""
    out = "runs/twotower_v4"
    for a, b in zip(command, command[1:] + [""]):
        if re.match(r"--(out|resume)\b", a) and not (value := a.partition("=")[2] or b).endswith(".pt"):
            out = value or out
    n = 1
    while Path(f"{out}_{n + 1}").exists():
        n += 1
    folder = Path(out if n == 1 else f"{out}_{n}")
    events = read_events(folder)
    return Path(f"{out}_{n + 1}") if events and events[-1].get("status") == "done" else folder


def supervise(command, hang_seconds):
    """Run the command until it is done, or can't go on. The exit code is the command's."""
    most, resumed_at = int(os.environ["MAX_RESTARTS"]) if os.environ.get("MAX_RESTARTS", "").isdigit() else 3, []
    while True:
        evidence = Evidence(command)
        try:
            child = Child(command, evidence, hang_seconds)
        except OSError as e:
            shutil.rmtree(evidence.temporary, ignore_errors=True)
            say(f"check: {command[0]}: {e.strerror}")
            return 2
        status, usage = child.wait()
        code = 128 - status if status < 0 else status
        if not evidence.data["run"] and status and not evidence.data["asks_only"]:
            evidence.finish(status, usage)
            if post_mortem(evidence.place)["verdict"] == "python_error" and status == 2:
                shutil.rmtree(evidence.temporary, ignore_errors=True)            # a flag mistyped: the trainer has said it, there was no run
                return code
            evidence.settle(planned_folder(command).absolute())
        evidence.finish(status, usage)
        report = post_mortem(Path(evidence.data["run"]) if evidence.settled else evidence.place)
        if evidence.settled:
            shutil.rmtree(evidence.temporary, ignore_errors=True)
        if report["verdict"] == "ok":
            shutil.rmtree(evidence.temporary, ignore_errors=True)
            return code
        saved = -1 if report["saved_step"] is None else report["saved_step"]
        why_not = ("going on can't help before that is mended" if not report["resuming_can_help"] else
                   "it was asked to stop" if evidence.data["signals"] else
                   f"MAX_RESTARTS is {most}" if len(resumed_at) >= most else
                   f"the last start made no progress, nothing was saved after step {max(0, saved)}" if resumed_at and saved <= resumed_at[-1] else "")
        text = tell(report)
        if why_not and report["resuming_can_help"]:
            text = text.replace("\nfix: ", f"\nrestart: no, {why_not}\nfix: ")
        with contextlib.suppress(OSError):
            (evidence.place / "post-mortem.txt").write_text(text + "\n")
        say(("" if not child.terminal else "\n") + text + ("" if evidence.settled else f"\nkept: the evidence is in {evidence.place}"))
        if why_not:
            return code
        resumed_at.append(saved)
        say(f"restart {len(resumed_at)} of {most}: going on {f'from step {saved}' if saved > 0 else 'from the start'}\n")


# -----------------------------------------------------------------------------
# environment and bundle: what a bug report needs

def package_versions():
    for name in ("torch", "faiss-cpu", "numpy", "tqdm", "intel-openmp", "mkl", "scikit-learn", "scipy", "threadpoolctl"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)


def openmp_files():
    """OpenMP runtimes that installed packages bring, mapped or not."""
    roots = {Path(p) for p in sys.path if p.endswith("site-packages")} | {Path(sys.prefix, "lib")}
    found = {p.resolve() for root in roots for pattern in ("libomp*", "libiomp*", "libgomp*", "*/lib*omp*.so*", "*/lib/lib*omp*", "*/.dylibs/lib*omp*", "*.libs/lib*omp*")
             for p in root.glob(pattern) if re.search(r"^lib(omp|iomp5|gomp)[-.\d].*(so|dylib)", p.name)}
    return [f"{p} ({'LLVM or Intel' if is_llvm_openmp(str(p)) else 'GNU'})" for p in sorted(found)]


def describe_machine():
    memory = re.findall(r"^(MemTotal|MemAvailable|SwapTotal):\s+(\d+) kB", read("/proc/meminfo"), re.M)
    cpu = re.search(r"^model name\s*: (.*)$", read("/proc/cpuinfo"), re.M)
    flags = re.search(r"^flags\s*: (.*)$", read("/proc/cpuinfo"), re.M)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    lines = [f"platform     {platform.platform()}, {platform.machine()}", f"python       {platform.python_version()}, {short_path(sys.executable)}",
             f"cpu          {cpu[1] if cpu else platform.processor()}, {cores} cores usable"]
    if flags:
        lines.append("cpu flags    " + (" ".join(f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in flags[1].split()) or "no avx2"))
    lines += ["memory       " + ", ".join(f"{name} {int(kb) / 2 ** 20:.1f} GiB" for name, kb in memory)] if memory else []
    lines += [f"package      {name} {version}" for name, version in package_versions()]
    lines += [f"limit        {name} {' '.join('unlimited' if v is None else str(v) for v in values)}" for name, values in limits_of("self").items()]
    lines += [f"oom_kill     {count} {file}" for file, count in oom_kills().items()]
    lines += [f"disk         {path} {disk_space(path)[0] / 1e9:.1f} GB free" for path in (".", tempfile.gettempdir(), "/dev/shm") if os.path.isdir(path)]
    lines += [f"setting      {k}={v}" for k, v in sorted(os.environ.items()) if SETTINGS.fullmatch(k)]
    lines += [f"openmp       {short_path(line)}" for line in openmp_files()]
    return "\n".join(lines)


def bundle(folder):
    """One archive of text: what the run wrote, its verdict, the machine. No vectors, no weights, no home paths."""
    folder = Path(folder)
    if not folder.is_dir():
        print(f"check: {folder}: no such run folder", file=sys.stderr)
        return 2
    name = f"{folder.resolve().name}_report"
    texts = {"post-mortem.json": json.dumps(post_mortem(folder), indent=1), "environment.txt": describe_machine()}
    for p in sorted([*folder.glob("*.yaml"), *folder.glob("*.jsonl"), *folder.glob("history.json"), *(folder / "crash").rglob("*")]):
        if p.is_file() and not p.is_symlink() and p.suffix not in (".npy", ".npz", ".pt"):
            texts[str(p.relative_to(folder))] = read(p)[-4_000_000:]
    with tarfile.open(f"{name}.tar.gz", "w:gz") as tar:
        for path, text in texts.items():
            data = short_path(text).encode()
            info = tarfile.TarInfo(f"{name}/{path}")
            info.size, info.mtime = len(data), int(time.time())
            tar.addfile(info, io.BytesIO(data))
    print(f"{name}.tar.gz: {len(texts)} text files; look through it before you send it")
    return 0


# -----------------------------------------------------------------------------
# stages: the minimal reproducer; each runs in a process of its own, which may die

def small_tower():
    import train_twotower_v4 as t
    cfg = dataclasses.replace(t.Config(), hidden_dim=32)
    return t, cfg, t.QueryTower(64, 20, cfg)


def train_tower(iterations, accumulate=1, between=None):
    """The trainer's own tower on random numbers."""
    import torch
    _, _, tower = small_tower()
    optimizer = torch.optim.AdamW(tower.parameters(), lr=1e-3)
    for i in range(iterations):
        optimizer.zero_grad()
        for _ in range(accumulate):
            x, d = torch.randn(8, 10, 64), torch.nn.functional.normalize(torch.randn(8, 64), dim=-1)
            loss = torch.nn.functional.cross_entropy(tower(x) @ d.T / 0.05, torch.arange(8)) / accumulate
            loss.backward()
        optimizer.step()
        assert loss.isfinite(), "the loss is not finite"
        if between and i % 20 == 0:
            between()


def search_faiss():
    import faiss
    import numpy as np
    bank = np.random.default_rng(0).standard_normal((20_000, 64), np.float32)
    scores, ids = faiss.knn(bank[:200], bank, 10, metric=faiss.METRIC_INNER_PRODUCT)
    assert (np.abs(scores[:, 0] - (bank[:200] @ bank.T).max(1)) < 1e-2).all(), "FAISS and NumPy differ"


def import_both(first, second):
    for name in (second, first) if os.environ.get("TWOTOWER_ORDER") else (first, second):
        importlib.import_module(name)
    search_faiss()
    import torch
    assert (torch.ones(300, 300) @ torch.ones(300, 300) == 300).all()


def check_blas():
    import numpy as np
    import torch
    x = np.random.default_rng(0).standard_normal((700, 700)).astype(np.float32)
    assert np.abs(x @ x - (torch.from_numpy(x) @ torch.from_numpy(x)).numpy()).max() < 1e-2, "NumPy and torch differ in a matrix product"


def search_apart():
    """As the trainer does it: torch here, FAISS in a worker process."""
    import numpy as np
    t, cfg, _ = small_tower()
    train_tower(10)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "bank.npz")
        np.savez(path, vectors=np.random.default_rng(0).standard_normal((5000, 64)).astype(np.float32))
        bank, run = t.Bank(path), t.Run(None, cfg, "cpu")
        run.folder = folder
        ids, backend = t.search_bank([bank.documents(slice(0, 200))], 200, 5, bank, cfg, run)
        assert backend == "faiss" and (ids[:, 0] == np.arange(200)).all(), f"the search worker failed ({backend})"


def search_together():
    if os.environ.get("TWOTOWER_ORDER"):
        importlib.import_module("faiss")
    train_tower(40, between=search_faiss)


def load_by_workers():
    import numpy as np
    t, _, _ = small_tower()
    workers = int(os.environ.get("TWOTOWER_WORKERS", 2))
    data = list(np.random.default_rng(0).standard_normal((64, 20, 64)).astype(np.float32))
    assert len(list(t.load_batches(data, list(range(64)), workers))) == 64


def read_mapped():
    import numpy as np
    t, _, _ = small_tower()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "bank.npz")
        np.savez(path, vectors=np.random.default_rng(0).standard_normal((50_000, 64)).astype(np.float32))
        assert np.isfinite(t.Bank(path).documents(slice(0, 50_000)).sum())


def compare_mps():
    import torch
    if not torch.backends.mps.is_available():
        print("no MPS on this machine")
        sys.exit(77)
    _, _, tower = small_tower()
    x, results = torch.randn(16, 20, 64), []
    for device in ("cpu", "mps"):
        moved = tower.to(device)
        moved.zero_grad()
        q = moved(x.to(device))
        q.square().mean().add(q.sum()).backward()
        results.append([q.detach().cpu(), *(w.grad.detach().cpu().clone() for w in moved.parameters())])
    for a, b in zip(*results):
        assert torch.allclose(a, b, rtol=1e-2, atol=1e-3), "MPS and the CPU differ in the forward pass or the gradient"


# name: (what runs, which of the cures below can be tried on it)
STAGES_TABLE = {
    "import torch, then faiss": (lambda: import_both("torch", "faiss"), "flag thread order apart"),
    "import faiss, then torch": (lambda: import_both("faiss", "torch"), "flag thread order apart"),
    "BLAS: NumPy and torch agree": (check_blas, "flag thread"),
    "GRU training, 100 iterations": (lambda: train_tower(100), "flag thread"),
    "FAISS search alone": (search_faiss, "flag thread"),
    "both, as the trainer does": (search_apart, "flag thread"),
    "both in one process": (search_together, "flag thread order apart"),
    "gradient accumulation, 32": (lambda: train_tower(5, 32), "flag thread"),
    "loader workers, 2": (load_by_workers, "flag thread workers"),
    "memory-mapped data": (read_mapped, "flag thread"),
    "MPS against the CPU": (compare_mps, "flag"),
}
STAGE_SECONDS = 20.0
ONE_THREAD = {k: "1" for k in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")}
CURES = {"flag": ("KMP_DUPLICATE_LIB_OK=TRUE (hides it, does not mend it)", {"KMP_DUPLICATE_LIB_OK": "TRUE"}), "thread": ("one thread", ONE_THREAD),
         "order": ("the other import order", {"TWOTOWER_ORDER": "other"}), "workers": ("--workers 0", {"TWOTOWER_WORKERS": "0"})}


def stage_python():
    """An interpreter with torch: this one, or the suite's."""
    venv = HERE / ".venv" / "bin" / "python"
    return str(venv) if importlib.util.find_spec("torch") is None and venv.exists() else sys.executable


def run_stage(name, extra, seconds):
    """(result, facts) of one stage in a child: ok, skipped, or how it failed."""
    # passive: on a busy machine, threads that spin while they wait make small parallel regions a thousand times slower
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | {"PYTHONFAULTHANDLER": "1", "KMP_DUPLICATE_LIB_OK": "FALSE"} | extra
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        p = subprocess.run([stage_python(), str(HERE / "check_crash_cause.py"), "--stage", name], cwd=HERE, env=environment, text=True, errors="replace",
                           capture_output=True, timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime > 0.2 * seconds
        return "not run: out of time" if busy or seconds < STAGE_SECONDS else f"stood still for {seconds:.0f} s", None
    took = time.monotonic() - started
    missing = re.search(r"No module named '(torch|faiss|numpy|tqdm)'", p.stderr)
    if p.returncode == 0:
        return f"ok, {took:.1f} s", None
    if p.returncode == 77 or missing:
        return f"skipped: {missing[0] if missing else p.stdout.strip()}", None
    status = ("signal", signal.Signals(-p.returncode).name) if p.returncode < 0 else ("exit", p.returncode)
    fatal = p.stderr.find("Fatal Python error")
    facts = Facts(Path(tempfile.gettempdir(), "none"), status=status, stderr=p.stderr[:fatal] if fatal >= 0 else p.stderr, fault=p.stderr[fatal:] if fatal >= 0 else "")
    how = status[1] if p.returncode < 0 else "failed: " + (p.stderr.strip().splitlines() or ["no message"])[-1][:90]
    return f"{how}, {took:.1f} s", facts


def reproduce(names=None, budget=56.0):
    """All stages, the cures of those that failed, one verdict -> exit code."""
    began, results, failed, untested = time.monotonic(), {}, {}, []
    left = lambda: budget - (time.monotonic() - began)       # noqa: E731
    print(f"{'stage':<32} result", flush=True)
    for name in names or STAGES_TABLE:
        result, facts = run_stage(name, {}, min(STAGE_SECONDS, left())) if left() > 2 else ("not run: out of time", None)
        results[name] = result
        print(f"{name:<32} {result}", flush=True)
        if result.startswith(("skipped", "not run")):
            untested.append(f"{name} ({result.partition(': ')[2]})")
        elif not result.startswith("ok"):
            failed[name] = facts
    cured = {}
    for name in failed:
        print(f"\n{name}: what cures it")
        for cure in STAGES_TABLE[name][1].split():
            if cure == "apart":
                label, result = "FAISS in its own process, as the trainer does", results.get("both, as the trainer does", "not run")
            elif left() > 2:
                label, result = CURES[cure][0], run_stage(name, CURES[cure][1], min(STAGE_SECONDS, left()))[0]
            else:
                label, result = CURES[cure][0], "not run: out of time"
            print(f"  {label:<56} {result}", flush=True)
            if result.startswith("ok"):
                cured.setdefault(name, []).append(label)
    print(f"\nnot tested: your data, your sizes, hours of running, {'; '.join(untested) or 'nothing else of the list'}. Those are for ./test_segfault.sh")
    return tell_stages(results, failed, cured)


def tell_stages(results, failed, cured):
    if not any(r.startswith("ok") for r in results.values()) and not failed:
        print("verdict: unknown: nothing could be tested, the packages are missing\nnext: python -m pip install -r requirements.txt")
        return 1
    if not failed:
        print("verdict: ok: every stage passed; what kills a run here needs its data, its size or its time\nnext: ./test_segfault.sh")
        return 0
    for name, facts in failed.items():
        verdict = diagnose(facts) if facts else Verdict("hang", "certain", [], "it stood still")
        print(f"verdict: {verdict.key}: {name}: {verdict.detail or CAUSES[verdict.key][0]}")
        for fact, _ in verdict.evidence[:3]:
            print(f"evidence: {fact}")
        print(f"cured by: {'; '.join(cured[name]) if name in cured else 'none of the known fixes'}")
    if results.get("both, as the trainer does", "").startswith("ok") and all("both in one" in n or n.startswith("import") for n in failed):
        print("fix: torch and FAISS can't share a process here, and the trainer never lets them: training is not affected\nnext: ./launch_v4_cpu.sh")
    else:
        print("fix: that component fails here without any of your data: upgrade or replace it\nnext: python check_crash_cause.py --env")
    return 1


# -----------------------------------------------------------------------------
# main

def main(argv=None):
    parser = argparse.ArgumentParser(prog="check_crash_cause.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--post-mortem", metavar="RUN", help="explain how the run in this folder ended")
    what.add_argument("--env", action="store_true", help="describe the machine")
    what.add_argument("--bundle", metavar="RUN", help="make an archive for a bug report")
    what.add_argument("--supervise", action="store_true", help="run the COMMAND after --")
    what.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="with --post-mortem: for programs")
    parser.add_argument("--hang-seconds", type=float, default=float(os.environ.get("HANG_SECONDS") or 600),
                        help="with --supervise: without a heartbeat for so long it hangs; HANG_SECONDS in the environment [%(default)s]")
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="with --supervise, after --")
    args = parser.parse_args(argv)
    if args.command and not args.supervise:
        parser.error("a COMMAND needs --supervise")
    if args.stage:
        STAGES_TABLE[args.stage][0]()
    elif args.supervise:
        if not args.command:
            parser.error("--supervise needs a COMMAND after --")
        return supervise(args.command, args.hang_seconds)
    elif args.post_mortem:
        report = post_mortem(args.post_mortem)
        print(json.dumps(report, indent=1) if args.json else tell(report))
    elif args.env:
        print(describe_machine())
    elif args.bundle:
        return bundle(args.bundle)
    else:
        return reproduce()
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL if "--supervise" not in sys.argv else signal.SIG_IGN)       # | head ends it quietly
    sys.exit(main())
