"""monitor_training_memory.sh against processes whose memory is known, and against records made by hand."""
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SUITE = Path(__file__).resolve().parent.parent
MONITOR = SUITE / "monitor_training_memory.sh"
COLUMNS = ("time", "seconds", "processes", "private_mb", "rss_mb", "share_percent", "available_mb", "limit_mb")
SAMPLES, RATE = 45, 20                                       # of a live record; MB a second of what leaks
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="compares with /proc")

# each says ready, then goes on until its parent is gone or ends it; memory follows the clock, so the rate is true on a busy machine too
PROCESSES = {
    "leak": "keep, begin = [], now()\n"
            "while alive():\n"
            "    while len(keep) < (now() - begin) * RATE: keep.append(b'x' * MB)",
    "mapped": "view, at = mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), 0, prot=mmap.PROT_READ), 0\n"
              "while alive():\n"
              "    for _ in range(MB // 2048): at = (at + 4096) % len(view); view[at]",
    "plateau": "keep, begin = [], now()\n"                   # a warm-up of one second, then a peak in each second that falls back
               "while alive():\n"
               "    while len(keep) < min(100, (now() - begin) * 100): keep.append(b'x' * MB)\n"
               "    peak = b'x' * (60 * MB) if now() % 1 < 0.3 else b''",
    "tree": "child = subprocess.Popen([sys.executable, '-c', sys.argv[2]])\n"
            "while alive(): pass\n"
            "child.kill()",
}
START = f"import mmap, os, subprocess, sys, time\nMB, RATE, parent, now = 2 ** 20, {RATE}, os.getppid(), time.monotonic\n" \
        "def alive():\n    time.sleep(0.02)\n    return os.getppid() == parent\n"


def read_record(path):
    lines = path.read_text().splitlines()
    assert tuple(lines[0].split("\t")) == COLUMNS
    return [dict(zip(COLUMNS, line.split("\t"))) for line in lines[1:]]


def anonymous_mb(pid):
    return sum(int(x) for x in re.findall(r"^Anonymous: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)) / 1024


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """All processes watched at once -> name: exit code and output of the monitor, its record, and the last anonymous memory by smaps."""
    folder, running, result = tmp_path_factory.mktemp("live"), {}, {}
    with open(folder / "bank", "wb") as f:
        f.truncate(2000 * 2 ** 20)
    middle = START + f"subprocess.Popen([sys.executable, '-c', {START + PROCESSES['leak']!r}])\nwhile alive(): pass"
    for name, code in PROCESSES.items():
        process = subprocess.Popen([sys.executable, "-c", START + code, folder / "bank", middle])
        tsv = folder / f"{name}.tsv"
        running[name] = process, tsv, subprocess.Popen([MONITOR, str(process.pid), "0.15", tsv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for name, (process, tsv, monitor) in running.items():
        while monitor.poll() is None and not (tsv.exists() and len(tsv.read_text().splitlines()) > SAMPLES):
            time.sleep(0.1)
        anonymous = anonymous_mb(process.pid) if sys.platform.startswith("linux") else None
        process.kill()                                       # and not reaped yet: a zombie has ended, too
        text = monitor.communicate(timeout=60)[0]
        result[name] = monitor.returncode, text, read_record(tsv), anonymous, tsv
        process.wait()
    return result


def reported_slope(text):
    return float(re.search(r"([+-][\d.]+) MB per minute", text)[1])


@pytest.mark.parametrize("name", ("leak", "tree"))
def test_a_leak_is_found_with_its_slope_in_the_process_or_in_a_grandchild(live, name):
    code, text, rows, _, _ = live[name]
    assert code == 1 and "growing without bound" in text and "has ended" in text
    assert reported_slope(text) == pytest.approx(60 * RATE, rel=0.15)
    assert int(rows[-1]["processes"]) == (3 if name == "tree" else 1)
    left = int(rows[-1]["available_mb"]) / RATE              # seconds until it hits the limit
    number, unit = re.search(r"hits the limit .* in (\d+) (seconds|minutes|hours);", text).groups()
    assert int(number) * {"seconds": 1, "minutes": 60, "hours": 3600}[unit] == pytest.approx(left, rel=0.3)


def test_a_mapped_file_that_is_read_is_no_leak(live):
    code, text, rows, anonymous, _ = live["mapped"]
    assert code == 0 and "stable, so not memory" in text and "mapped files" in text
    assert float(rows[-1]["rss_mb"]) > float(rows[0]["rss_mb"]) + 50
    if anonymous is not None:
        assert float(rows[-1]["private_mb"]) == pytest.approx(anonymous, abs=2)


def test_a_warm_up_and_peaks_that_fall_back_are_no_leak(live):
    code, text, rows, _, _ = live["plateau"]
    assert code == 0 and "stable, so not memory" in text
    assert max(float(r["private_mb"]) for r in rows) > 150 > 100 < float(rows[-1]["private_mb"])


@pytest.mark.parametrize("name", PROCESSES)
def test_a_record_replayed_gives_the_same_verdict(live, name):
    code, text, _, _, tsv = live[name]
    again = subprocess.run([MONITOR, "--replay", tsv.name], cwd=tsv.parent, capture_output=True, text=True)       # relative to where the user stands
    assert again.returncode == code and again.stdout.strip() and text.endswith(again.stdout)


# -----------------------------------------------------------------------------
# records by hand

def replay(folder, private, step=5.0, limit=16_000, others=2000):
    path = folder / "record.tsv"
    lines = [f"2026-01-01T00:00:00\t{i * step:.2f}\t3\t{mb:.1f}\t{mb + 4000:.1f}\t{100 * mb / limit:.2f}\t{limit - others - mb:.0f}\t{limit}"
             for i, mb in enumerate(private)]
    path.write_text("\n".join(["\t".join(COLUMNS), *lines]) + "\n")
    done = subprocess.run([MONITOR, "--replay", path], capture_output=True, text=True)
    assert not done.stderr
    return done.returncode, done.stdout


noise = random.Random(0).gauss
STABLE = {
    "flat": [700] * 60,
    "noise": [700 + noise(0, 60) for _ in range(200)],
    "warm-up, then a plateau": [min(3000, 200 + 80 * i) + noise(0, 5) for i in range(100)],
    "warm-up that levels off": [3000 - 2500 * 0.93 ** i + noise(0, 5) for i in range(100)],
    "a step at each epoch that falls back": [900 + (1200 if i % 40 < 12 else 0) + noise(0, 5) for i in range(230)],
    "a ramp in each epoch that falls back": [900 + 20 * (i % 40) + noise(0, 5) for i in range(238)],
    "one step, late": [900 + (500 if i > 130 else 0) + noise(0, 5) for i in range(200)],
    "mining begins, then mines more": [900 + (300 if i > 90 else 0) + (300 if i > 160 else 0) + noise(0, 5) for i in range(200)],
    "falling": [3000 - 5 * i for i in range(200)],
}
LEAKS = {                                                    # MB a sample, and the record
    "steady": (3, [500 + 3 * i for i in range(100)]),
    "in noise": (1, [1000 + i + noise(0, 40) for i in range(400)]),
    "under epochs that fall back": (3, [900 + 3 * i + (400 if i % 20 < 6 else 0) + noise(0, 5) for i in range(240)]),
    "a stair in each epoch": (2, [900 + 40 * (i // 20) + noise(0, 3) for i in range(240)]),
    "after a long plateau": (20, [900 + 20 * max(0, i - 250) + noise(0, 5) for i in range(320)]),
}


@pytest.mark.parametrize("name", STABLE)
def test_bounded_memory_is_stable(tmp_path, name):
    code, text = replay(tmp_path, STABLE[name])
    assert code == 0 and text.startswith("verdict: stable"), text


@pytest.mark.parametrize("name", LEAKS)
def test_unbounded_memory_is_growing_at_the_true_rate(tmp_path, name):
    rate, private = LEAKS[name]
    code, text = replay(tmp_path, private)
    assert code == 1 and text.startswith("verdict: growing without bound"), text
    assert reported_slope(text) == pytest.approx(12 * rate, rel=0.2)


def test_a_full_machine_is_close_to_the_limit(tmp_path):
    code, text = replay(tmp_path, [13_400 + noise(0, 20) for _ in range(60)])
    assert code == 1 and text.startswith("verdict: close to the limit"), text
    code, text = replay(tmp_path, [13_900] * 3)              # too few for a trend, enough for this
    assert code == 1 and text.startswith("verdict: close to the limit"), text


def test_too_few_samples_are_said_to_be_too_few(tmp_path):
    for n in (0, 1, 19):
        code, text = replay(tmp_path, [500 + 100 * i for i in range(n)])
        assert code == 0 and "too few samples" in text and str(n) in text


# -----------------------------------------------------------------------------
# use

def wait_for_a_sample(monitor):
    assert any(line.count("|") == 5 for line in monitor.stdout), "it ended without one"


@linux
def test_the_limit_of_a_control_group_counts_when_it_is_smaller(tmp_path):
    base = Path("/sys/fs/cgroup/memory" if Path("/sys/fs/cgroup/memory").is_dir() else "/sys/fs/cgroup")
    group, file = base / f"monitor_test_{os.getpid()}", "memory.limit_in_bytes" if base.name == "memory" else "memory.max"
    try:
        group.mkdir()
    except OSError as e:
        pytest.skip(f"needs a control group of its own: {e}")
    process = subprocess.Popen([sys.executable, "-c", "input(); keep = b'x' * (245 * 2 ** 20); print('full', flush=True); input()"],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        try:
            (group / file).write_text(str(256 * 2 ** 20))
            (group / "cgroup.procs").write_text(str(process.pid))
        except OSError as e:
            pytest.skip(f"needs a control group with a memory limit: {e}")
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "full\n"
        monitor = subprocess.Popen([MONITOR, str(process.pid), "0.1", tmp_path / "a.tsv"], stdout=subprocess.PIPE, text=True)
        wait_for_a_sample(monitor)
        process.kill()
        text = monitor.communicate(timeout=60)[0]
        assert monitor.returncode == 1 and "close to the limit" in text and read_record(tmp_path / "a.tsv")[0]["limit_mb"] == "256"
    finally:
        process.kill()
        process.wait()
        group.rmdir()


@pytest.mark.parametrize("signum", (signal.SIGINT, signal.SIGTERM))
def test_a_signal_ends_it_at_once_with_a_verdict(tmp_path, signum):
    process = subprocess.Popen(["sleep", "300"])
    try:
        monitor = subprocess.Popen([MONITOR, str(process.pid), "200", tmp_path / "a.tsv"], stdout=subprocess.PIPE, text=True,
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        wait_for_a_sample(monitor)
        time.sleep(0.3)
        monitor.send_signal(signum)
        assert "verdict: too few samples" in monitor.communicate(timeout=60)[0] and monitor.returncode == 0
        assert process.poll() is None                        # the run goes on
    finally:
        process.kill()
        process.wait()


def test_the_record_goes_to_logs_by_default():
    process = subprocess.Popen(["sleep", "1"])
    done = subprocess.run([MONITOR, str(process.pid), "0.3"], cwd="/", capture_output=True, text=True)
    process.wait()
    found = list((SUITE / "logs").glob(f"memory_{process.pid}_*_*.tsv"))
    assert done.returncode == 0 and len(found) == 1 and len(read_record(found[0])) >= 1
    found[0].unlink()


@pytest.mark.parametrize("arguments", ([], ["12x"], ["99999999"], ["1", "0"], ["1", "soon"], ["1", "1", "a", "b"], ["--replay"], ["--replay", "none.tsv"],
                                       ["--replay", str(MONITOR)], ["1", "1", "/proc/none/a.tsv"]))
def test_bad_arguments_are_one_line(arguments):
    done = subprocess.run([MONITOR, *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout and done.stderr.startswith("monitor_training_memory.sh: ") and done.stderr.count("\n") == 1
