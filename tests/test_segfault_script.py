"""test_segfault.sh against real deaths: a sitecustomize that the test puts on PYTHONPATH kills the processes it names."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).resolve().parent.parent
RUNS = ("tiny data", "small batch", "single thread", "no accumulation", "no mining", "no memory bank", "workers")

# argv is that of a process whose script is the trainer; `finish` ends it at once like a run that is done
SITE = """
import ctypes, json, os, signal, sys, time
argv = sys.orig_argv
trainer = next((a for a in argv if a.endswith(".py")), "").endswith("train_twotower_v4.py")
training = trainer and "--pairs" in argv

def finish(**event):
    out = argv[argv.index("--out") + 1]
    os.makedirs(out, exist_ok=True)
    with open(os.path.join(out, "events.jsonl"), "a") as f:
        for e in ([event] if event else []) + [{"event": "end", "status": "done"}]:
            f.write(json.dumps(e) + "\\n")
    os._exit(0)

"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    subprocess.run([sys.executable, "make_tiny_pairs.py", "--sequences", "50", "--targets", "5", "--dim", "16", "--out", folder], cwd=SUITE, check=True)
    return folder


def isolate(data, tmp_path, fault="", flags=(), pairs="pairs.npz", **env):
    """One call of the script from the data's folder -> exit code, results by run, the whole output, the folder it kept or None."""
    (tmp_path / "sitecustomize.py").write_text(SITE + fault)
    done = subprocess.run([SUITE / "test_segfault.sh", "--hidden-dim", "8", *flags], cwd=data, capture_output=True, text=True, timeout=300,
                          env=os.environ | {"PAIRS": pairs, "BANK": "bank.npz", "STEPS": "1", "PYTHONPATH": str(tmp_path)} | env)
    results = {m[1].strip(): m[2].strip() for m in re.finditer(r"^([\w ]+?) +\| ([\w ]+?) +\| +\d+ s", done.stdout, re.M)}
    folder = SUITE / re.search(r"runs/test_segfault\.\w+", done.stdout)[0]
    return done.returncode, results, done.stdout + done.stderr, folder if folder.exists() else None


def remove(folder):
    subprocess.run(["rm", "-rf", folder], check=True)


def test_a_healthy_installation_passes_all_and_leaves_nothing(data, tmp_path):
    code, results, text, kept = isolate(data, tmp_path)
    assert (code, results) == (0, dict.fromkeys(RUNS, "ok")), text
    assert "all pass" in text and "./launch_v4_cpu.sh" in text and kept is None


def test_a_search_worker_that_segfaults_is_found_though_the_trainer_survives_it(data, tmp_path):
    # two of the runs are real, to be quick: one with mining, one without; the others end at once as the first of them does
    code, results, text, kept = isolate(data, tmp_path, """
if trainer and "--search-worker" in argv: ctypes.string_at(0)
if training and "--no-mining" not in argv and not argv[argv.index("--out") + 1].endswith("tiny_data"):
    finish(event="guard", what="search worker died: SIGSEGV")
""")
    assert code == 1 and results == dict.fromkeys(RUNS, "search SIGSEGV") | {"no mining": "ok"}, text
    assert "FAISS" in text and "--search torch" in text and (kept / "tiny_data.log").stat().st_size
    remove(kept)


def test_a_loader_process_that_segfaults_fails_the_workers_only(data, tmp_path):
    code, results, text, kept = isolate(data, tmp_path, 'if any("spawn_main" in a for a in argv): ctypes.string_at(0)\n'
                                                        'if training and "--workers" not in argv: finish()')
    assert code == 1 and results.pop("workers") not in ("ok", "hung") and set(results.values()) == {"ok"}, text
    assert "only workers fail" in text and "--workers 0" in text and kept
    remove(kept)


PATTERNS = {
    "threads": ('if training: finish() if os.environ["OMP_NUM_THREADS"] == "1" else os.abort()', "single thread", "SIGABRT", "OMP_NUM_THREADS=1"),
    "accumulation": ('if training: finish() if argv[len(argv) - 1 - argv[::-1].index("--accum") + 1] == "1" else ctypes.string_at(0)',
                     "no accumulation", "SIGSEGV", "--accum 1"),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_what_alone_cures_is_named_with_its_fix(data, tmp_path, name):
    fault, cure, result, fix = PATTERNS[name]
    code, results, text, kept = isolate(data, tmp_path, fault)
    assert code == 1 and results == dict.fromkeys(RUNS, result) | {cure: "ok"}, text
    assert fix in text.split("kept:")[0].splitlines()[-1]
    remove(kept)


def test_when_all_fail_it_is_the_loop_or_the_installation(data, tmp_path):
    """With a hang, an early exit 0 and two signals among them: none of these stops the script."""
    code, results, text, kept = isolate(data, tmp_path, """
if training:
    if "--threads" in argv: os._exit(0)
    if "--workers" in argv: time.sleep(600)
    os.kill(os.getpid(), signal.SIGILL if "--no-mining" in argv else signal.SIGBUS)
""", LIMIT="3")
    assert code == 1 and results == dict.fromkeys(RUNS, "SIGBUS") | {"no mining": "SIGILL", "single thread": "incomplete", "workers": "hung"}, text
    assert "all fail" in text and "check_crash_cause.py" in text
    remove(kept)


def test_a_refused_setting_is_no_crash(data, tmp_path):
    code, results, text, kept = isolate(data, tmp_path, flags=["--lr", "0"])
    assert code == 1 and results == dict.fromkeys(RUNS, "exit 2") and "--lr is 0.0" in text and "no crash" in text, text
    remove(kept)


def test_a_missing_half_of_the_data_is_one_line():
    done = subprocess.run([SUITE / "test_segfault.sh"], capture_output=True, text=True, env=os.environ | {"PAIRS": "x.npz"})
    assert done.returncode == 2 and done.stderr.startswith("test_segfault.sh: ") and done.stderr.count("\n") == 1
