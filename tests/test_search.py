"""The search worker and mining, with real FAISS in its own process and real deaths of it."""
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from conftest import ROOT, SMALL

import train_twotower_v4 as T


def vectors(n, D, seed):
    return np.random.default_rng(seed).standard_normal((n, D)).astype(np.float32)


def setup(tmp_path, dtype=np.float32, normal=False, M=3000, **flags):
    data = vectors(M, 24, 0)
    data = (T.unit_rows(data) if normal else data * 3).astype(dtype)
    np.savez(tmp_path / "bank.npz", vectors=data)
    cfg = dataclasses.replace(T.Config(pairs="p", bank=str(tmp_path / "bank.npz")), **flags)
    run = T.Run(None, cfg, "cpu")
    run.folder = tmp_path
    return T.Bank(tmp_path / "bank.npz"), cfg, run


def search(queries, k, bank, cfg, run):
    return T.search_bank([queries[:7], queries[7:]], len(queries), k, bank, cfg, run)


@pytest.mark.parametrize("dtype, normal", [(np.float32, True), (np.float32, False), (np.float16, False)])
def test_faiss_worker_and_torch_search_equal_brute_force(tmp_path, dtype, normal, monkeypatch):
    bank, cfg, run = setup(tmp_path, dtype, normal)
    queries = T.unit_rows(vectors(50, 24, 1))
    expected = np.argsort(-(queries.astype(np.float64) @ T.unit_rows(bank.vectors).astype(np.float64).T), 1)[:, :30]
    found, backend = search(queries, 30, bank, cfg, run)
    assert backend == "faiss" and (found == expected).mean() > 0.999      # rounding may swap two neighbours
    monkeypatch.setattr(T, "CHUNK", 700)
    found, backend = search(queries, 30, bank, dataclasses.replace(cfg, search="torch"), run)
    assert backend == "torch" and (found == expected).mean() > 0.999
    assert search(queries, 5000, bank, cfg, run)[0].shape == (50, 3000)
    assert not list(tmp_path.glob("search.*")), "a search leaves nothing behind"


@pytest.mark.parametrize("case", ["plain", "misleading", "opposite", "float16"])
def test_bf16_scan_finds_the_same_rows_as_brute_force(tmp_path, case, monkeypatch):
    """Also where the sample that sets the bar misleads, for the nearest rows stand where it does not look; and where all cosines are negative."""
    data, queries = vectors(20_000, 24, 0), T.unit_rows(vectors(50, 24, 1))
    if case == "misleading":
        data[1:600:2] = queries[:1] + 0.1 * vectors(300, 24, 2)
    if case == "opposite":
        data, queries = data + 4, T.unit_rows(queries - 1)
    data = (3 * data).astype(np.float16) if case == "float16" else T.unit_rows(data)
    np.savez(tmp_path / "bank.npz", vectors=data)
    monkeypatch.setattr(T, "CHUNK", 1000)
    monkeypatch.setattr(T, "SCAN", 3001)                                  # a block that 16 does not divide, too
    _, cfg, run = setup(tmp_path / "..", M=10)
    bank, run.folder = T.Bank(tmp_path / "bank.npz"), tmp_path
    scores = queries.astype(np.float64) @ T.unit_rows(data).astype(np.float64).T
    assert (scores.max() < 0) == (case == "opposite")
    expected = np.argsort(-scores, 1)[:, :30]
    found, backend = search(queries, 30, bank, dataclasses.replace(cfg, search="bf16"), run)
    assert backend == "bf16" and (found == expected).mean() > 0.999
    assert search(queries, 25_000, bank, dataclasses.replace(cfg, search="bf16"), run)[0].shape == (50, 20_000)


def test_ivf_search_says_how_much_of_the_exact_answer_it_found(tmp_path):
    bank, cfg, run = setup(tmp_path, M=30_000, search="ivf")
    queries = T.unit_rows(vectors(300, 24, 1))
    expected = np.argsort(-(queries @ T.unit_rows(bank.vectors).T), 1)[:, :30]
    found, backend = search(queries, 30, bank, cfg, run)
    recall = np.mean([np.isin(a, b).mean() for a, b in zip(expected, found)])
    assert backend == f"ivf, which found {100 * recall:.1f}% of the exact answer on a sample" and 0.5 < recall < 1
    made = (tmp_path / "index.ivf").stat().st_mtime_ns
    assert (search(queries, 30, bank, cfg, run)[0] == found).all() and (tmp_path / "index.ivf").stat().st_mtime_ns == made
    assert 300 * 20_000 > (search(queries, 20_000, bank, cfg, run)[0] < 0).sum() > 0, "lists that hold fewer leave -1"


def test_worker_that_is_killed_costs_a_line_and_the_answer_is_the_same(tmp_path, capsys):
    bank, cfg, run = setup(tmp_path, M=60_000)
    queries = T.unit_rows(vectors(3000, 24, 1))
    killed = []

    def kill():
        for _ in range(400):
            time.sleep(0.01)
            found = subprocess.run(["pgrep", "-f", f"search-worker {tmp_path}"], capture_output=True, text=True).stdout.split()
            if found:
                killed.append(os.kill(int(found[0]), signal.SIGSEGV))
                return
    thread = threading.Thread(target=kill)
    thread.start()
    found, backend = search(queries, 10, bank, cfg, run)
    thread.join()
    assert killed and backend == "torch" and "the worker died (SIGSEGV" in capsys.readouterr().out
    expected, _ = search(queries, 10, bank, cfg, run)
    assert (found == expected).mean() > 0.999


def test_worker_without_faiss_is_named_and_replaced(tmp_path, capsys, monkeypatch):
    (tmp_path / "faiss.py").write_text("raise ImportError('no FAISS in this test')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    bank, cfg, run = setup(tmp_path)
    assert search(T.unit_rows(vectors(5, 24, 1)), 3, bank, cfg, run)[1] == "torch"
    assert "ImportError: no FAISS in this test" in capsys.readouterr().out


def test_neither_process_ever_loads_both_torch_and_faiss(lab):
    """From the loaded images: the trainer's own, and those of its worker, which is watched while it runs."""
    code = f"""
import sys, threading, time, pathlib
sys.argv[1:] = {lab.command("--out", "images")[2:]!r}
sys.path.insert(0, {str(ROOT)!r})
import subprocess, train_twotower_v4 as T
seen = set()
class Watched(subprocess.Popen):
    def wait(self, timeout=None):                 # called while the worker runs
        try:
            seen.update(line.split()[-1] for line in open(f"/proc/{{self.pid}}/maps") if ".so" in line)
        except OSError:
            pass
        return super().wait(0.002 if timeout else None)
T.subprocess.Popen = Watched
assert T.main(sys.argv[1:]) == 0
mine = {{line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}}
print("IMAGES", any("faiss" in x for x in mine), any("libtorch" in x for x in mine), any("faiss" in x for x in seen), any("libtorch" in x for x in seen))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=lab.folder, capture_output=True, text=True, timeout=120)
    assert "IMAGES False True True False" in done.stdout, done.stdout[-500:] + done.stderr[-500:]
    assert [e["backend"] for e in lab.events("images", "mine")] == ["faiss"]


class Fixed:
    """Mining over a search result that the test decides."""

    def __init__(self, lab, monkeypatch, rows, **flags):
        self.cfg = dataclasses.replace(T.Config(pairs=str(lab.pairs), bank=str(lab.bank)), **flags)
        self.train, _ = T.open_data(self.cfg)
        monkeypatch.setattr(T, "search_bank", lambda blocks, n, k, bank, cfg, run: (rows(self.train, k), "fixed"))

    def mine(self, text, epoch=1):
        rule = T.parse_schedule(text, 1)[0]
        return T.mine_negatives(None, self.train, rule, epoch, self.cfg, T.Run(None, self.cfg, "cpu"))


def ordered(train, k):
    """Every query finds rows in the order: its target, its context backwards, then rows 0, 1, 2, ..."""
    N, M = len(train), len(train.bank.vectors)
    out = np.empty((N, min(k, M)), np.int64)
    for i in range(N):
        first = [int(train.rows[i])] + [int(c) for c in train.C[i][::-1] if c >= 0]
        out[i] = (first + [r for r in range(M) if r not in first])[:out.shape[1]]
    return out


def test_rank_windows_count_candidates_only_and_hold_no_positive_or_context(lab, monkeypatch):
    fixed = Fixed(lab, monkeypatch, ordered, filter_threshold=1.0)
    mined, train = fixed.mine("1-:4@r3-6"), fixed.train
    for i in range(len(train)):
        taken = {int(train.rows[i]), *map(int, train.C[i])}
        candidates = [r for r in range(len(train.bank.vectors)) if r not in taken]
        assert sorted(mined[i]) == candidates[2:6]                        # ranks 3 to 6, all four of them
    fewer = fixed.mine("1-:9@r3-6")
    assert ((fewer >= 0).sum(1) == 4).all() and (fewer == -1).sum() == 5 * len(train), "too few candidates: fewer, never padding"


def test_mining_is_a_draw_that_seed_and_epoch_decide(lab, monkeypatch):
    fixed = Fixed(lab, monkeypatch, ordered)
    one, again, other = fixed.mine("1-:4@r1-60"), fixed.mine("1-:4@r1-60"), fixed.mine("1-:4@r1-60", epoch=2)
    assert (one == again).all() and (one != other).any()


def test_near_duplicates_of_the_positive_are_dropped_from_mined_rows(lab, monkeypatch):
    fixed = Fixed(lab, monkeypatch, ordered, filter_threshold=0.2)
    mined, train = fixed.mine("1-:4@r1-60"), fixed.train
    cosine = np.einsum("nkd,nd->nk", train.bank.documents(mined.ravel()).reshape(*mined.shape, -1), train.positives(np.arange(len(train))))
    assert (cosine[mined >= 0] <= 0.2).all() and (mined >= 0).any()


def test_cosine_windows_hold_what_they_say(lab, monkeypatch, capsys):
    fixed = Fixed(lab, monkeypatch, ordered)
    mined, train = fixed.mine("1-:4@0.1-0.4"), fixed.train
    cosine = np.einsum("nkd,nd->nk", train.bank.documents(mined.ravel()).reshape(*mined.shape, -1), train.positives(np.arange(len(train))))
    assert ((cosine[mined >= 0] >= 0.1) & (cosine[mined >= 0] <= 0.4)).all() and (mined >= 0).all(1).mean() > 0.9
    fixed.mine("1-:4@0.97-0.98")
    assert "the window is empty on this data" in capsys.readouterr().out


def test_a_run_mines_by_its_schedule(lab):
    assert "1-1:none;2-:4@r2-20" in SMALL
    done = lab.train("--out", "mines")
    assert done.returncode == 0, done.stderr
    events = lab.events("mines", "mine")
    assert [(e["epoch"], e["filled"], e["backend"]) for e in events] == [(2, 1.0, "faiss")]
    done = lab.train("--out", "mines_not", "--no-mining")
    assert done.returncode == 0 and not lab.events("mines_not", "mine")
