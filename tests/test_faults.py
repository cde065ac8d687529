"""Every class of fault, injected for real into the real trainer under the real supervisor; then the post-mortem must name it."""
import fcntl
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from conftest import SCORE

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import check_crash_cause as check  # noqa: E402

PYTHON = str(ROOT / ".venv/bin/python")
FLAGS = ("--precision fp32 --log-dir none --epochs 2 --hidden-dim 8 --threads 1 --bs 8 --accum 2 --ckpt-seconds 0 --memory-bank-size 256 --bank-negatives 32 "
         "--mine-schedule 1-:none").split()
# what may be said instead of a class when stderr or the exit status is lost: less, but nothing else
WEAKER = {"openmp_duplicate": {"abort"}, "heap_corruption": {"abort"}, "native_out_of_memory": {"abort"}, "openmp_masked": {"ok"},
          "disk_full": {"python_error", "segfault"}, "input_file_shrank": {"segfault"}, "shared_memory_full": {"worker_segfault", "disk_full"},
          "worker_segfault": {"python_error"}, "worker_killed": {"python_error"}, "too_many_open_files": {"python_error"}, "cpu_limit": {"killed_externally"},
          "log_reader_died": {"stopped"}, "corrupt_input": {"python_error"}, "fork_deadlock": {"hang"}}


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    subprocess.run([PYTHON, "make_tiny_pairs.py", "--out", folder, *"--sequences 30 --targets 5 --context 6 --dim 16".split()], cwd=ROOT, check=True)
    return folder


class Bench:
    """One run under the supervisor, in a folder of its own, with a fault in one phase of one step."""

    def __init__(self, folder, data):
        self.folder, self.data, self.run = folder, folder / "data", folder / "run"
        shutil.copytree(data, self.data)
        self.environment = {k: v for k, v in os.environ.items() if k != "KMP_DUPLICATE_LIB_OK"} | {"MAX_RESTARTS": "0", "OMP_NUM_THREADS": "1"}

    def command(self, *flags, supervised=True, hang=60):
        trainer = [PYTHON, str(ROOT / "train_twotower_v4.py"), "--pairs", str(self.data / "pairs.npz"), "--bank", str(self.data / "bank.npz"),
                   "--out", str(self.run), *FLAGS, *flags]
        return [PYTHON, str(ROOT / "check_crash_cause.py"), "--supervise", "--hang-seconds", str(hang), "--", *trainer] if supervised else trainer

    def fault(self, code, at="forward:3"):
        (self.folder / "fault.py").write_text(code)
        self.environment["TWOTOWER_FAULT"] = f"{at}:{self.folder / 'fault.py'}"

    def start(self, *flags, limit=None, **options):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        signal.signal(signal.SIGHUP, signal.SIG_DFL)         # whatever started the tests, nohup is not meant here
        return subprocess.Popen(self.command(*flags, **options), env=self.environment, cwd=self.folder, text=True, preexec_fn=limit, **pipes)

    def die(self, code=None, *flags, at="forward:3", limit=None, **options):
        """Run to its end -> the finished process."""
        if code:
            self.fault(code, at)
        process = self.start(*flags, limit=limit, **options)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def post_mortem(self):
        return json.loads(subprocess.run([PYTHON, ROOT / "check_crash_cause.py", "--post-mortem", self.run, "--json"], capture_output=True, text=True, check=True).stdout)

    def expect(self, key, confidence="certain", counted=True):
        """The verdict is the class; with stderr or the exit status lost it is weaker, and not another one."""
        if counted:
            before = SCORE["injected"].get(key, True)
            SCORE["injected"][key] = False                   # until the rest of this function says otherwise
        report = self.post_mortem()
        assert report["verdict"] == key, report
        assert report["confidence"] == confidence, report
        assert report["evidence"] and all(e["fact"] and e["file"] for e in report["evidence"])
        assert key not in {e["what"] for e in report["excluded"]}
        assert key == "ok" or report["fix"] and report["next"]
        for lost in ("stderr", "evidence.json"):
            copy = self.folder / f"without-{lost}"
            shutil.copytree(self.run, copy, ignore=shutil.ignore_patterns("*.pt", lost), copy_function=shutil.copy2)
            left = check.post_mortem(copy)
            assert left["verdict"] in {key, "unknown"} | WEAKER.get(key, set()), (lost, left)
            assert left["confidence"] != "certain" or left["verdict"] in {key} | WEAKER.get(key, set()), (lost, left)
            assert lost == "stderr" or left["confidence"] != "certain", left
        if counted:
            SCORE["injected"][key] = before
        return report


@pytest.fixture
def bench(tmp_path, data):
    return Bench(tmp_path, data)


# -----------------------------------------------------------------------------
# controls: nobody healthy is accused

def test_healthy_run_is_ok_and_says_nothing_more(bench):
    done = bench.die()
    assert done.returncode == 0 and done.stderr == "", done.stderr
    bench.expect("ok")


def test_healthy_run_with_workers_mining_and_a_bar_of_warnings_is_ok(bench):
    done = bench.die("import sys; sys.stderr.write('OMP: Error #15 is what other people see\\nstd::bad_alloc\\nNo space left on device\\n')",
                     "--workers", "1", "--mine-schedule", "1-1:none;2-:2@r1-20")
    assert done.returncode == 0
    bench.expect("ok")


@pytest.mark.parametrize("flags", [["--dry-run"], ["--help"], ["--version"]])
def test_questions_under_the_supervisor_leave_nothing_behind(bench, flags):
    done = bench.die(None, *flags)
    assert done.returncode == 0 and not bench.run.exists() and "verdict" not in done.stderr


def test_mistyped_flag_is_one_line_and_no_post_mortem(bench):
    done = bench.die(None, "--epoch", "3")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and not bench.run.exists()


def test_run_that_is_still_training_is_not_declared_dead(bench):
    bench.fault("import time; time.sleep(2)")
    process = bench.start()
    wait_for(lambda: (check.read_beats(bench.run) or [{}])[-1].get("step") == 3)
    report = bench.post_mortem()
    process.kill()
    process.communicate()
    assert report["verdict"] == "unknown" and "has not ended" in report["what"]


def wait_for(condition, seconds=30):
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, "waited in vain"
        time.sleep(0.05)


# -----------------------------------------------------------------------------
# deaths by native code

RUNTIMES = f"""
import ctypes, os, shutil, tempfile, time
first = {str(ROOT / ".venv/lib/libiomp5.so")!r}
second = os.path.join(os.environ["TWOTOWER_TEST"], "NAME")
if not os.path.exists(second):
    shutil.copy(first, second)
    for path in (first, second):
        ctypes.CDLL(path).omp_get_max_threads()
    time.sleep(1.5)
"""
needs_iomp = pytest.mark.skipif(not (ROOT / ".venv/lib/libiomp5.so").exists(), reason="intel-openmp is not installed, see requirements-test.txt")


@needs_iomp
def test_second_openmp_runtime_is_named(bench):
    bench.environment |= {"TWOTOWER_TEST": str(bench.folder), "KMP_DUPLICATE_LIB_OK": "FALSE"}
    done = bench.die(RUNTIMES.replace("NAME", "libiomp5.so"))
    assert done.returncode == 128 + signal.SIGABRT and "OMP: Error #15" in done.stderr
    bench.expect("openmp_duplicate")


@needs_iomp
def test_masked_second_runtime_is_a_warning_even_under_another_name(bench):
    bench.environment |= {"TWOTOWER_TEST": str(bench.folder), "KMP_DUPLICATE_LIB_OK": "TRUE"}
    done = bench.die(RUNTIMES.replace("NAME", "libblas_helper.so"))
    assert done.returncode == 0 and "verdict: openmp_masked" in done.stderr
    bench.expect("openmp_masked")


@needs_iomp
def test_second_runtime_masked_from_inside_is_a_warning_too(bench):
    """As threadpoolctl does it: the flag is set in the process, and nobody outside sees it."""
    bench.environment |= {"TWOTOWER_TEST": str(bench.folder)}
    assert bench.die("import os; os.environ['KMP_DUPLICATE_LIB_OK'] = 'True'\n" + RUNTIMES.replace("NAME", "libiomp5.so")).returncode == 0
    bench.expect("openmp_masked", "probable")


@pytest.mark.parametrize("at", ["load:2", "backward:4", "evaluate:0", "checkpoint:1"])
def test_segmentation_fault_is_named_with_its_phase(bench, at):
    done = bench.die("import ctypes; ctypes.string_at(0)", at=at)
    assert done.returncode == 128 + signal.SIGSEGV
    report = bench.expect("segfault")
    assert report["where"]["phase"] == at.partition(":")[0] and "string_at" in report["what"]


def test_segmentation_fault_in_another_thread_is_a_segfault(bench):
    bench.die("import ctypes, threading; t = threading.Thread(target=ctypes.string_at, args=(0,)); t.start(); t.join()")
    bench.expect("segfault")


def test_endless_recursion_in_native_code_is_a_stack_overflow(bench):
    bench.die("import sys\nsys.setrecursionlimit(10 ** 9)\ndef deeper(x): return sorted([x], key=deeper)\ndeeper(0)")
    bench.expect("stack_overflow")


def test_abort_without_a_message_has_no_established_cause(bench):
    bench.die("import os; os.abort()")
    report = bench.expect("abort", "unknown")
    assert "not established" in report["what"]


def test_abort_long_after_an_allocator_message_is_not_certain(bench):
    bench.die("import os, sys\nsys.stderr.write('free(): invalid pointer\\n' + 'all is well again\\n' * 60)\nsys.stderr.flush()\nos.abort()")
    assert bench.post_mortem()["confidence"] != "certain"


def test_abort_with_a_message_quotes_it(bench):
    bench.die("import os; os.write(2, b\"tower.cpp:12: int main(): Assertion `rows > 0' failed.\\n\"); os.abort()")
    assert "rows > 0" in bench.expect("abort", "certain")["what"]


@pytest.mark.parametrize("code", ["p = c.malloc(32); c.free(p); c.free(p)", "p = c.malloc(5000); c.free(p + 16)"])
def test_damaged_heap_is_named(bench, code):
    bench.die("import ctypes; c = ctypes.CDLL(None); c.malloc.restype = ctypes.c_void_p; c.free.argtypes = [ctypes.c_void_p]\n"
              "c.free.restype = None\n" + code)
    bench.expect("heap_corruption")


def test_uncaught_bad_alloc_is_named(bench):
    bench.die("import ctypes; new = ctypes.CDLL('libstdc++.so.6')._Znwm; new.argtypes = [ctypes.c_size_t]; new(1 << 62)")
    bench.expect("native_out_of_memory")


def test_undefined_opcode_is_named(bench):
    bench.die("import ctypes, mmap\npage = mmap.mmap(-1, 4096, prot=7)\npage.write(b'\\x0f\\x0b' if __import__('platform').machine() == 'x86_64' else bytes(4))\n"
              "ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()")
    bench.expect("illegal_instruction")


# -----------------------------------------------------------------------------
# kills, limits, signals

def test_kill_9_is_not_called_memory(bench):
    bench.die("import os; os.kill(os.getpid(), 9)")
    report = bench.expect("killed_externally")
    assert "oom_killed" in {e["what"] for e in report["excluded"]}


def test_kill_by_the_kernel_is_called_memory(bench, tmp_path):
    group = make_memory_group(300 * 2 ** 20)
    if isinstance(group, str):
        SCORE["not injected here"]["oom_killed"] = group
        pytest.skip(group)
    try:
        bench.die(f"import os\nopen({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\nimport time; time.sleep(1.5)\n"
                  "import mmap\nm = mmap.mmap(-1, 2 ** 30)\nfor i in range(0, 2 ** 30, 4096): m[i] = 1")
        bench.expect("oom_killed")
    finally:
        group.rmdir()


def make_memory_group(limit):
    """A control group of our own, next to the others, not in one of them; or why there can be none."""
    for root, file in ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max")):
        group = root / f"twotower_test_{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / file).write_text(str(limit))
            return group
        except OSError:
            group.rmdir()
    return "no right to make a control group with a memory limit"


@pytest.mark.parametrize("hard", [0, 20])
def test_cpu_time_limit_is_named(bench, hard):
    def limit():
        resource.setrlimit(resource.RLIMIT_CPU, (4, 4 + hard))
    bench.die("while True: pass", limit=limit)
    bench.expect("cpu_limit")


ALLOCATIONS = {"numpy": "import numpy; numpy.ones(2 ** 33)", "torch": "import torch; torch.empty(2 ** 34)", "python": "bytearray(2 ** 35)",
               "faiss": "import faiss; faiss.Float32Vector().resize(2 ** 34)"}


@pytest.mark.parametrize("who", ALLOCATIONS)
def test_refused_allocation_is_named(bench, who):
    done = bench.die("import resource; resource.setrlimit(resource.RLIMIT_AS, (12 * 2 ** 30, 12 * 2 ** 30))\n" + ALLOCATIONS[who])
    assert done.returncode == 1
    bench.expect("allocation_refused")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_signal_to_the_supervisor_stops_and_saves_once(bench, name):
    bench.fault("import time; time.sleep(0.7)")
    process = bench.start()
    wait_for(lambda: (check.read_beats(bench.run) or [{}])[-1].get("step") == 3)
    process.send_signal(getattr(signal, name))
    err = process.communicate(timeout=30)[1]
    assert process.returncode == 128 + getattr(signal, name) and "interrupted and saved" in err
    bench.expect("stopped")


def test_signal_to_the_whole_job_does_not_reach_the_trainer_twice(bench):
    bench.fault("import time; time.sleep(0.7)")
    process = bench.start()
    wait_for(lambda: (check.read_beats(bench.run) or [{}])[-1].get("step") == 3)
    for pid in (process.pid, check.read_beats(bench.run)[-1]["pid"]):
        os.kill(pid, signal.SIGTERM)
    process.communicate(timeout=30)
    assert check.read_events(bench.run)[-1]["status"] == "interrupted"
    assert bench.post_mortem()["verdict"] == "stopped"


def test_thread_limit_is_named(bench):
    done = bench.die("import os, resource, torch\nresource.setrlimit(resource.RLIMIT_NPROC, (1, 1))\nos.getuid() or os.setuid(65534)\n"
                     "torch.set_num_threads(64); x = torch.ones(2000, 2000); x.exp_()")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    bench.expect("thread_limit")


def test_refused_python_thread_is_a_thread_limit(bench):
    bench.die("import os, resource, threading\nresource.setrlimit(resource.RLIMIT_NPROC, (1, 1))\nos.getuid() or os.setuid(65534)\n"
              "threading.Thread(target=print).start()")
    bench.expect("thread_limit")


@pytest.mark.parametrize("count", [24, 16])
def test_descriptor_limit_with_workers_is_named(bench, count):
    bench.die(f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({count}, {count}))", "--workers", "4", at="checkpoint:0")
    bench.expect("too_many_open_files")


@pytest.mark.parametrize("default", [False, True])
def test_file_size_limit_is_named(bench, default):
    bench.die("import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))" + "; signal.signal(signal.SIGXFSZ, signal.SIG_DFL)" * default)
    bench.expect("file_size_limit")


# -----------------------------------------------------------------------------
# data and disks

@pytest.mark.parametrize("workers", ["0", "1"])
def test_input_cut_while_mapped_is_named(bench, workers):
    bench.die(f"import os; os.truncate({str(bench.data / 'bank.npz')!r}, 4096)", "--workers", workers, at="load:1")
    report = bench.expect("input_file_shrank")
    assert any("bank.npz" in e["fact"] for e in report["evidence"])


def in_small_space(bench, key, where, size, *flags, **options):
    """The run and its post-mortem in a mount namespace, where a small tmpfs stands in one place."""
    place = Path(where)
    place.mkdir(exist_ok=True)
    report = bench.folder / "report.json"
    script = ('mount -t tmpfs -o size="$1" none "$2" || exit 99; "${@:4}"; status=$?; '
              f'"{PYTHON}" "{ROOT / "check_crash_cause.py"}" --post-mortem "{bench.run}" --json > "$3"; exit $status')
    unshare = ["unshare", "-m"] if os.getuid() == 0 else ["unshare", "-rm"]
    done = subprocess.run([*unshare, "bash", "-c", script, "bash", size, str(place), str(report), *bench.command(*flags, **options)], cwd=bench.folder,
                          env=bench.environment, capture_output=True, text=True, timeout=120)
    if done.returncode == 99 or done.stderr.startswith("unshare"):
        SCORE["not injected here"][key] = "no right to mount a small tmpfs"
        pytest.skip(f"no right to mount a small tmpfs: {done.stderr.strip()[-80:]}")
    found = json.loads(report.read_text())
    SCORE["injected"][key] = SCORE["injected"].get(key, True) and bool(done.returncode) and found["verdict"] == key
    return done, found


def full_disk(bench, code, *flags, at="forward:3"):
    bench.run = bench.folder / "small" / "run"
    bench.fault("import os\ntry:\n    with open(os.path.join(str(run.folder), '..', 'filler'), 'wb', 0) as f:\n"
                "        while True: f.write(bytes(4096))\nexcept OSError: pass\n" + code, at)
    return in_small_space(bench, "disk_full", bench.folder / "small", "1m", *flags)


@pytest.mark.parametrize("code", ["", "import torch; torch.save({'x': torch.ones(10 ** 6)}, str(run.folder / 'x.pt'))",
                                  "import numpy as np; m = np.memmap(str(run.folder / 'm'), np.uint8, 'w+', shape=10 ** 6); m[:] = 1"],
                         ids=["the trainer's own save", "torch's text never says so", "a mapped write"])
def test_full_disk_is_named(bench, code):
    done, report = full_disk(bench, code)
    assert done.returncode and report["verdict"] == "disk_full" and report["confidence"] == "certain", report


def test_full_disk_in_a_search_is_named(bench):
    _, report = full_disk(bench, "", "--mine-schedule", "1-1:none;2-:2@r1-20", at="encode:9")
    assert report["verdict"] == "disk_full", report


def test_small_shared_memory_is_named(bench, data):
    subprocess.run([PYTHON, "make_tiny_pairs.py", "--out", bench.data, *"--sequences 60 --targets 10 --context 20 --dim 64".split()], cwd=ROOT, check=True)
    done, report = in_small_space(bench, "shared_memory_full", "/dev/shm", "1m", "--workers", "2", "--bs", "512", "--accum", "1", hang=8)
    assert done.returncode and report["verdict"] == "shared_memory_full", (report, done.stderr[-2000:])


@pytest.mark.parametrize("damage", ["cut short", "garbage", "not there"])
def test_damaged_input_is_refused_and_named(bench, damage):
    path = bench.data / "pairs.npz"
    whole = path.read_bytes()
    path.write_bytes({"cut short": whole[:len(whole) // 2], "garbage": os.urandom(2000), "not there": b""}[damage])
    if damage == "not there":
        path.unlink()
    assert bench.die().returncode == 2
    bench.expect("corrupt_input")


# -----------------------------------------------------------------------------
# workers, waits

CHILD = "import os, signal, subprocess\nkids = [int(p) for p in subprocess.check_output(['pgrep', '-P', str(os.getpid()), '-f', 'spawn_main']).split()]\n"


@pytest.mark.parametrize("how, key", [("SIGKILL", "worker_killed"), ("SIGSEGV", "worker_segfault"), ("SIGABRT", "worker_segfault")])
def test_loader_worker_that_dies_is_named(bench, how, key):
    done = bench.die(CHILD + f"os.kill(kids[0], signal.{how})\nimport time; time.sleep(1)", "--workers", "1", "--epochs", "200", at="load:2")
    assert done.returncode == 1
    bench.expect(key)


def test_fork_after_openmp_that_waits_forever_is_named(bench):
    bench.environment["OMP_NUM_THREADS"] = "2"
    bench.die("import os, torch\ntorch.set_num_threads(2); x = torch.ones(3000, 3000); x.exp()\n"
              "if not (pid := os.fork()):\n    x.exp()\n    os._exit(0)\nos.waitpid(pid, 0)", hang=3)
    bench.expect("fork_deadlock")


def test_lock_never_released_is_a_hang_at_that_line(bench):
    done = bench.die("import threading\ndef waits_forever():\n    lock = threading.Lock()\n    lock.acquire(); lock.acquire()\nwaits_forever()", hang=3)
    report = bench.expect("hang")
    assert "waits_forever" in report["what"] and "verdict: hang" in done.stderr


def test_slow_step_within_the_limit_is_no_hang(bench):
    assert bench.die("import time; time.sleep(1.5)", hang=4).returncode == 0


def test_search_worker_that_stands_still_is_ended_and_the_run_goes_on(bench):
    bench.fault("import os, signal, subprocess\nfor p in subprocess.run(['pgrep', '-P', str(os.getpid()), '-f', 'search-worker'], capture_output=True).stdout.split():\n"
                "    os.kill(int(p), signal.SIGSTOP)", at="search:9")
    done = bench.die(None, "--mine-schedule", "1-1:none;2-:2@r1-20", hang=3)
    assert done.returncode == 0 and "searching with torch instead" in done.stdout


def test_search_worker_that_is_killed_costs_a_line(bench):
    bench.fault("import os, signal, subprocess\nfor p in subprocess.run(['pgrep', '-P', str(os.getpid()), '-f', 'search-worker'], capture_output=True).stdout.split():\n"
                "    os.kill(int(p), signal.SIGSEGV)", at="search:9")
    done = bench.die(None, "--mine-schedule", "1-1:none;2-:2@r1-20")
    assert done.returncode == 0 and "the worker died (SIGSEGV" in done.stdout
    assert bench.post_mortem()["verdict"] == "ok"


# -----------------------------------------------------------------------------
# errors and endings

def test_exit_in_mid_run_is_incomplete(bench):
    assert bench.die("import os; os._exit(0)").returncode == 0
    bench.expect("incomplete")


TRAINER = "import gc\ntrainer = next(o for o in gc.get_objects() if type(o).__name__ == 'Trainer')\n"


def test_huge_weights_diverge(bench):
    assert bench.die(TRAINER + "for w in trainer.tower.parameters(): w.data.fill_(3e38)", "--max-bad-steps", "3").returncode == 3
    bench.expect("diverged")


def test_nan_in_the_data_diverges_and_the_rows_are_named(bench):
    bench.die("import numpy as np, zipfile\nsize = os.path.getsize(path)\nf = np.memmap(path, np.uint8, 'r+')\nf[1024:size // 2] = 255\nf.flush()".replace(
        "import numpy", f"import os; path = {str(bench.data / 'bank.npz')!r}\nimport numpy"), "--max-bad-steps", "3", at="load:1")
    report = bench.expect("diverged")
    assert any("rows: " in e["fact"] for e in report["evidence"])


def test_dead_reader_of_the_output_is_named_and_the_state_saved(bench):
    bench.fault("import time; time.sleep(0.3)", at="load:3")
    process = bench.start("--epochs", "3")
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    process.wait(30)
    assert "verdict: log_reader_died" in err and process.returncode == 128 + signal.SIGPIPE
    assert bench.expect("log_reader_died")["saved_step"] is not None


def test_any_other_exception_is_quoted(bench):
    bench.die("raise KeyError('boom')")
    assert "KeyError: 'boom'" in bench.expect("python_error")["what"]


def test_exception_that_mentions_a_fault_in_its_source_line_is_still_that_exception(bench):
    bench.die("def f():\n    raise ValueError('rows do not fit')  # No space left on device, MemoryError\nf()")
    bench.expect("python_error")


def test_killed_without_a_supervisor_is_unknown_and_says_what_is_missing(bench):
    bench.die("import os; os.kill(os.getpid(), 9)", supervised=False)
    report = bench.expect("unknown", "unknown")
    assert "exit status" in report["what"] and "stderr" in report["what"]


def test_folder_without_evidence_is_unknown(bench):
    assert bench.post_mortem()["verdict"] == "unknown"


# -----------------------------------------------------------------------------
# going on

def test_killed_run_goes_on_by_itself_and_ends_well(bench):
    bench.environment["MAX_RESTARTS"] = "3"
    marker = bench.folder / "killed"
    done = bench.die(f"import os\nif not os.path.exists({str(marker)!r}):\n    open({str(marker)!r}, 'w'); os.kill(os.getpid(), 9)")
    assert done.returncode == 0 and "killed from outside" in done.stderr and "restart 1 of 3: going on from step 3" in done.stderr
    assert bench.expect("ok") and "done   |" in done.stdout


def test_no_second_start_from_the_same_step(bench):
    bench.environment["MAX_RESTARTS"] = "3"
    done = bench.die("import ctypes; ctypes.string_at(0)")
    assert done.stderr.count("restart 1 of 3") == 1 and "restart 2" not in done.stderr and "made no progress" in done.stderr


def test_no_restart_where_it_can_not_help(bench):
    bench.environment["MAX_RESTARTS"] = "3"
    done = bench.die("raise KeyError('boom')")
    assert "\nrestart" not in done.stderr and done.stderr.splitlines()[-1].startswith("next: ")


def test_later_attempt_does_not_hide_an_earlier_one(bench):
    bench.die("import ctypes; ctypes.string_at(0)")
    del bench.environment["TWOTOWER_FAULT"]
    assert bench.die().returncode == 0
    attempts = check.read_attempts(bench.run)
    assert [a["exit"] for a, _ in attempts] == [["signal", "SIGSEGV"], ["exit", 0]]
    bench.expect("ok")


def test_killed_supervisor_lets_the_trainer_save(bench):
    bench.fault("import time; time.sleep(1)")
    process = bench.start("--epochs", "50")
    wait_for(lambda: (check.read_beats(bench.run) or [{}])[-1].get("step") == 3)
    process.kill()
    process.wait()
    wait_for(lambda: not check.lock_holder(bench.run))
    assert check.read_events(bench.run)[-1]["status"] == "interrupted"


def test_bundle_has_no_vectors_and_no_home_paths(bench):
    bench.die("raise KeyError('/home/somebody/secret')")
    subprocess.run([PYTHON, ROOT / "check_crash_cause.py", "--bundle", bench.run], cwd=bench.folder, check=True, capture_output=True)
    subprocess.run(["tar", "xzf", "run_report.tar.gz"], cwd=bench.folder, check=True)
    files = [p for p in (bench.folder / "run_report").rglob("*") if p.is_file()]
    assert {"config.yaml", "events.jsonl", "post-mortem.json", "environment.txt"} <= {p.name for p in files}
    assert not any(p.suffix in (".pt", ".npy", ".npz") for p in files)
    assert not any("/home/somebody" in p.read_text() for p in files)


# -----------------------------------------------------------------------------
# recorded: evidence that can't be produced here, from where its heading says; counted apart

def evidence_folder(folder, stderr=None, reports=(), **data):
    place = folder / "run" / "crash" / "attempt-001"
    place.mkdir(parents=True)
    (place / "evidence.json").write_text(json.dumps({"pid": 4242, "run": str(folder / "run"), "started": 1.0, "ended": 2.0, "updated": 2.0} | data))
    if stderr is not None:
        (place / "stderr").write_text(stderr)
    for name, text in reports:
        (place / name).write_text(text)
    return folder / "run"


@pytest.mark.parametrize("path", sorted((ROOT / "tests/fixtures").glob("macos_*.txt")), ids=lambda p: p.stem)
def test_recorded_macos_evidence_is_read(tmp_path, path):
    lines = path.read_text().splitlines(keepends=True)
    head = dict(line[2:].strip().split(": ", 1) for line in lines if line.startswith("# "))
    body = "".join(line for line in lines if not line.startswith("# "))
    SCORE["recorded"][path.stem] = False
    status = ["signal", head["ended"]] if head["ended"].startswith("SIG") else ["exit", int(head["ended"].split()[1])]
    texts = {"stderr": "", "reports": [(head["report"], body)]} if "report" in head else {"stderr": body}
    report = check.post_mortem(evidence_folder(tmp_path, exit=status, pid=int(head.get("pid", 4242)), **texts))
    assert f"{report['verdict']} {report['confidence']}" == head["verdict"], report
    SCORE["recorded"][path.stem] = True


GROUP = "/sys/fs/cgroup/session/memory.events"


@pytest.mark.parametrize("before, after, key, confidence", [
    ({"/proc/vmstat": 3, GROUP: 0}, {"/proc/vmstat": 4, GROUP: 1}, "oom_killed", "certain"),
    ({"/proc/vmstat": 3, GROUP: 0}, {"/proc/vmstat": 4, GROUP: 0}, "killed_externally", "certain"),       # the kernel killed somebody else
    ({"/proc/vmstat": 3}, {"/proc/vmstat": 4}, "oom_killed", "probable"),
    ({}, {}, "killed_externally", "unknown")])
def test_sigkill_is_memory_only_if_our_counter_rose(tmp_path, before, after, key, confidence):
    report = check.post_mortem(evidence_folder(tmp_path, "", exit=["signal", "SIGKILL"], oom_start=before, oom_end=after))
    assert (report["verdict"], report["confidence"]) == (key, confidence), report


# -----------------------------------------------------------------------------
# terminals

def on_a_terminal(bench, *flags, send=None):
    """Run under a terminal of our own -> (what it showed, exit code); `send` is typed when step 3 is reached."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 97, 0, 0))

    def take_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    process = subprocess.Popen(bench.command(*flags), env=bench.environment, cwd=bench.folder, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal)
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 65536)
        except OSError:
            break
        if send and (check.read_beats(bench.run) or [{}])[-1].get("step", 0) >= 3:
            os.write(ours, send)
            send = None
    return shown.decode(errors="replace"), process.wait(30)


def test_progress_bar_survives_the_supervisor_and_is_not_kept_frame_by_frame(bench):
    shown, code = on_a_terminal(bench, "--epochs", "8")
    assert code == 0 and "epoch 1:" in shown and max(len(frame) for frame in shown.split("\r") if frame.startswith("epoch ")) <= 97
    kept = (bench.run / "crash/attempt-001/stderr").read_text()
    assert kept.count("epoch ") < shown.count("epoch ")


def test_ctrl_c_on_a_terminal_saves_and_stops(bench):
    bench.fault("import time; time.sleep(1)")
    shown, code = on_a_terminal(bench, "--epochs", "50", send=b"\x03")
    assert code == 130 and "verdict: stopped: stopped by SIGINT" in shown
    assert shown.count("finishing the step") == 1
    bench.expect("stopped")


def test_reader_of_both_outputs_that_dies_costs_no_state(bench):
    bench.fault("import time; time.sleep(0.3)", at="load:3")
    process = subprocess.Popen(bench.command("--epochs", "3"), env=bench.environment, cwd=bench.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    process.stdout.readline()
    process.stdout.close()
    process.wait(60)
    assert process.returncode == 128 + signal.SIGPIPE
    assert bench.expect("log_reader_died")["saved_step"] is not None


# -----------------------------------------------------------------------------
# the reproducer

def test_every_stage_passes_on_a_healthy_machine_within_a_minute():
    started = time.time()
    done = subprocess.run([PYTHON, ROOT / "check_crash_cause.py"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "verdict: ok" in done.stdout and "not tested:" in done.stdout, done.stdout
    assert time.time() - started < 60


@needs_iomp
def test_second_runtime_in_a_stage_is_named_and_its_cures_are_tried(tmp_path):
    """FAISS as it is on macOS: with an LLVM runtime of its own, and another one with torch. Real runtimes, a real Error #15."""
    library = str(ROOT / ".venv/lib/libiomp5.so")
    shutil.copy(library, tmp_path / "libiomp5.so")
    (tmp_path / "sitecustomize.py").write_text(
        "import ctypes, importlib.abc, sys\n"
        f"PATHS = {{'faiss': {library!r}, 'torch': {str(tmp_path / 'libiomp5.so')!r}}}\n"
        "class Finder(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name in PATHS:\n"
        "            ctypes.CDLL(PATHS.pop(name)).omp_get_max_threads()\n"
        "sys.meta_path.insert(0, Finder())\n")
    stages = ["GRU training, 100 iterations", "FAISS search alone", "both, as the trainer does", "both in one process"]
    environment = {k: v for k, v in os.environ.items() if k != "KMP_DUPLICATE_LIB_OK"} | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([PYTHON, "-c", f"import sys, check_crash_cause; sys.exit(check_crash_cause.reproduce({stages}))"], cwd=ROOT, env=environment,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    table = {line[:32].strip(): line[33:] for line in done.stdout.splitlines()}
    assert table["both in one process"].startswith("SIGABRT") and table["both, as the trainer does"].startswith("ok")
    assert table["FAISS search alone"].startswith("ok") and table["GRU training, 100 iterations"].startswith("ok")
    assert "verdict: openmp_duplicate" in done.stdout and "OMP: Error #15" in done.stdout
    cures = done.stdout.partition("both in one process: what cures it")[2]
    assert "KMP_DUPLICATE_LIB_OK=TRUE" in cures and "FAISS in its own process, as the trainer does            ok" in cures


def test_environment_and_post_mortem_work_without_torch(tmp_path):
    bare = [f"/usr/bin/{name}" for name in ("python3.13", "python3.12", "python3.11", "python3") if os.path.exists(f"/usr/bin/{name}")] or [sys.executable]
    done = subprocess.run([bare[0], "-S", "-E", ROOT / "check_crash_cause.py", "--env"], capture_output=True, text=True)
    assert done.returncode == 0 and "limit        nofile" in done.stdout and str(Path.home()) + "/" not in done.stdout
    done = subprocess.run([bare[0], "-S", "-E", ROOT / "check_crash_cause.py", "--post-mortem", tmp_path, "--json"], capture_output=True, text=True)
    assert json.loads(done.stdout)["verdict"] == "unknown"


def test_nohup_outlives_the_terminal(bench):
    bench.fault("import time; time.sleep(0.7)")
    process = subprocess.Popen(bench.command(), env=bench.environment, cwd=bench.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    wait_for(lambda: (check.read_beats(bench.run) or [{}])[-1].get("step") == 3)
    process.send_signal(signal.SIGHUP)
    assert process.communicate(timeout=30)[1] == b"" and process.returncode == 0


def test_launcher_goes_on_by_itself_after_kill_9(tmp_path, data):
    """The documented use: the launcher, its trainer killed from outside, the verdict on the terminal, the run done."""
    suite = tmp_path / "suite"
    suite.mkdir()
    for name in ("launch_v4_cpu.sh", "launch_env.sh", "train_twotower_v4.py", "check_crash_cause.py", "requirements.txt"):
        shutil.copy2(ROOT / name, suite)
    (suite / ".venv").symlink_to(ROOT / ".venv")
    (tmp_path / "slow.py").write_text("import time; time.sleep(1)")
    environment = os.environ | {"PAIRS": str(data / "pairs.npz"), "BANK": str(data / "bank.npz"), "TWOTOWER_FAULT": f"load:3:{tmp_path / 'slow.py'}"}
    process = subprocess.Popen([suite / "launch_v4_cpu.sh", *FLAGS], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run = suite / "runs/v4_cpu"
    wait_for(lambda: [(check.read_beats(run) or [{}])[-1].get(key) for key in ("step", "phase")] == [3, "load"])     # saved, and asleep
    os.kill(check.read_beats(run)[-1]["pid"], signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "done   |" in out
    assert "killed from outside" in err and "not oom_killed" in err and "saved: step 3" in err and "restart 1 of 3: going on from step 3" in err


def test_overflow_in_a_thread_that_leaves_no_frames_is_not_called_certain(bench):
    bench.die("import sys, threading\nsys.setrecursionlimit(10 ** 9)\ndef deeper(x): return sorted([x], key=deeper)\n"
              "t = threading.Thread(target=deeper, args=(0,)); t.start(); t.join()")
    report = bench.post_mortem()
    assert report["verdict"] in ("segfault", "stack_overflow") and report["confidence"] == "probable", report
