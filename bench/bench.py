#!/usr/bin/env python3
"""The suite against the documented way of doing the same, measured side by side, as one table of ratios.

    bench/run.sh [SECTION...] [flags]

  step      pairs a second of Trainer.step with a full memory bank, against the documented loop and a plain torch.nn.GRU; share of the
            machine's matrix-multiply peak
  start     process start to first optimizer step at the documented sizes (makes 14 GB under --data, once)
  memory    highest private memory of a launched run through mining, steps and evaluation, at those sizes
  search    mining and evaluation queries a second over that bank, their private memory, and what the bf16 scan finds
  evidence  what heartbeats, events and checkpoints cost
  growth    what twice and four times the pairs, or the bank rows, cost
  rivals    sentence-transformers on the same vectors, where it is installed
  quality   bf16 against fp32 after the same steps on real data: --quality PAIRS BANK

Each side runs in child processes of its own: ours in the environment that the launchers set, the documented one with the same number of
threads and nothing else of ours. They take turns; figures are medians over the turns, and the spread is that of the ratio in each turn.
Exit code 1 if a required figure is not met.
"""
import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import operator
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import check_crash_cause as check  # noqa: E402

OURS = {"GOMP_SPINCOUNT": "3000", "KMP_DUPLICATE_LIB_OK": "TRUE"}          # what the launchers set besides threads
WINDOW = 512                                                 # pairs of an optimizer step: 32 x 16, 8 x 64
FULL = {"L": 100, "D": 768, "H": 512, "memory": 50_000, "step_pairs": 2_048, "step_bank": 60_000, "mm": 4_096, "turns": 3, "steps": 3,
        "pairs": 35_901, "val": 2_000, "bank": 771_115, "start_turns": 3, "search_turns": 3, "mine_queries": 2_048, "eval_queries": 2_000,
        "old_eval_queries": 64, "overlap_queries": 256, "evidence_steps": 60, "saves": 7, "grow_turns": 5, "grow_pairs": 4_096, "grow_bank": 100_000,
        "grow_D": 128, "grow_queries": 1_024, "seeds": 2}
QUICK = FULL | {"L": 12, "D": 64, "H": 32, "memory": 2_000, "step_pairs": 600, "step_bank": 3_000, "mm": 256, "turns": 2, "steps": 1,
                "pairs": 1_500, "val": 300, "bank": 20_000, "start_turns": 1, "search_turns": 2, "mine_queries": 256, "eval_queries": 300,
                "overlap_queries": 64, "evidence_steps": 2, "saves": 2, "grow_turns": 2, "grow_pairs": 512, "grow_bank": 5_000, "grow_D": 32,
                "grow_queries": 64, "seeds": 1}


class Skipped(Exception):
    """Why a section has no figures here."""


def say(line):
    print(f"bench: {line}", file=sys.stderr, flush=True)


# -----------------------------------------------------------------------------
# children: each side of a comparison is an object in a process of its own, asked over a pipe

class Child:
    """A function or class of this file, called in a new process; then its methods, one at a time."""

    def __init__(self, side, name, **args):
        env = {k: v for k, v in os.environ.items() if k not in OURS} | (OURS if side == "ours" else {})
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen([sys.executable, __file__, "--child", name, json.dumps(args)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.log, text=True, env=env, cwd=ROOT)
        self.pid, self.result = self.process.pid, self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            sys.exit(f"bench: a child died with {self.process.wait()}:\n{self.log.read().decode()[-3000:]}")
        return json.loads(line)

    def ask(self, method, **args):
        print(json.dumps([method, args]), file=self.process.stdin, flush=True)
        return self.answer()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()                           # it ends when it has read all
        self.process.wait()


def serve(name, args):
    """The other end of Child. What the code under test prints goes to stderr, answers alone to stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    thing = globals()[name](**json.loads(args))
    print(json.dumps(thing if isinstance(thing, (dict, list, float)) else None), file=answers, flush=True)
    for line in sys.stdin:
        method, args = json.loads(line)
        print(json.dumps(getattr(thing, method)(**args)), file=answers, flush=True)


def timed(action):
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


class Watch:
    """Highest private memory (GB) of a process and all below it, in all and by the phase that its heartbeat names."""

    def __init__(self, pid, run=None):
        self.pid, self.folder, self.peak, self.phases, self.done = pid, run, 0.0, {}, threading.Event()
        self.thread = threading.Thread(target=self.sample)

    def private(self):
        total, commands = 0, {}
        for process in check.process_tree(self.pid):
            # a child that is still its parent's program stands between fork and exec, where it shares its parent's pages
            if process["command"] != commands.get(process["parent"]):
                found = re.search(r"^RssAnon:\s*(\d+) kB", check.read(f"/proc/{process['pid']}/status"), re.M)
                total += int(found[1]) / 1e6 * 1.024 if found else 0
            commands[process["pid"]] = process["command"]
        return total

    def sample(self):
        last = False
        while not last:                                      # at least once, and once more at the end
            last = self.done.wait(0.05)
            private, beats = self.private(), check.read_beats(self.folder) if self.folder else []
            phase = beats[-1]["phase"] if beats else "start"
            self.peak, self.phases[phase] = max(self.peak, private), max(private, self.phases.get(phase, 0))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()


# -----------------------------------------------------------------------------
# data: topics and noise, in sequences; contexts and targets are rows of the bank, stored as copies of them

def write_stream(path, arrays):
    """An uncompressed NPZ of arrays that are given as shape and blocks, none of them whole in memory."""
    import train_twotower_v4 as t

    def write(f):
        with zipfile.ZipFile(f, "w", zipfile.ZIP_STORED) as out:
            for name, (shape, blocks) in arrays.items():
                with out.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array_header_1_0(member, {"descr": "<f4", "fortran_order": False, "shape": shape})
                    for block in blocks:
                        member.write(np.ascontiguousarray(block))
    t.Disk.replace(path, write)


def make_data(pairs, bank, N, val, L, D, M):
    """Bank rows come in sequences of one topic, with a cosine of about 0.5 to each other; a context is L rows in a row, the next is the target."""
    import train_twotower_v4 as t
    rng = np.random.default_rng(0)
    topics = t.unit_rows(rng.standard_normal((max(2, M // 400), D), dtype=np.float32))
    topic_of = rng.integers(len(topics), size=M // 120 + 1)

    def documents():
        for a, b in t.spans(M, 8192):
            yield t.unit_rows(topics[topic_of[np.arange(a, b) // 120]] + t.unit_rows(rng.standard_normal((b - a, D), dtype=np.float32)))
    if not Path(bank).exists():
        write_stream(bank, {"vectors": ((M, D), documents())})
    vectors = t.open_npz(bank)[0]["vectors"]
    starts = np.random.default_rng(1).permutation(M - L)[:N + val]
    arrays = {}
    for name, first in (("train", starts[:N]), ("val", starts[N:])):
        arrays[f"X_{name}"] = (len(first), L, D), (vectors[s:s + L] for s in first)
        arrays[f"Y_{name}"] = (len(first), D), (vectors[s + L] for s in first)
    if not Path(pairs).exists():
        write_stream(pairs, arrays)


def prepare(args, N, val, L, D, M):
    """The files of such sizes, made once -> their paths, or a reason why there are none."""
    args.data.mkdir(parents=True, exist_ok=True)
    paths = {"pairs": str(args.data / f"pairs_{N}_{val}x{L}x{D}_of_{M}.npz"), "bank": str(args.data / f"bank_{M}x{D}.npz")}
    if not all(Path(p).exists() for p in paths.values()):
        need, free = 4 * D * (M + (N + val) * (L + 1)), shutil.disk_usage(args.data).free
        if need > free - 2 ** 30:
            raise Skipped(f"the data needs {need / 1e9:.1f} GB under --data, {free / 1e9:.1f} GB are free")
        say(f"making {need / 1e9:.1f} GB of data")
        Child("ours", "make_data", **paths, N=N, val=val, L=L, D=D, M=M).__exit__()
    return paths


def prepare_full(args, s):
    return prepare(args, s["pairs"], s["val"], s["L"], s["D"], s["bank"])


def prepare_step(args, s):
    return prepare(args, s["step_pairs"], 64, s["L"], s["D"], s["step_bank"])


# -----------------------------------------------------------------------------
# step: the trainer, the documented loop, and the peak

class OurTrainer:
    """The real Trainer with its events and heartbeat, and a memory bank that is full from the start."""

    def __init__(self, pairs, bank, precision="fp32", first=None, **flags):
        import train_twotower_v4 as t
        t.keep_freed_memory()
        cfg = dataclasses.replace(t.Config(), pairs=pairs, bank=bank, log_dir="none", no_mining=True, **flags)
        self.t, documents, (arrays, path) = t, t.Bank(bank), t.open_npz(pairs)
        train, val = (t.Split(path, name, {k: a[:first] for k, a in arrays.items()}, documents) for name in ("train", "val"))
        self.folder = tempfile.TemporaryDirectory()
        run = t.Run(Path(self.folder.name), cfg, "cpu", precision)
        run.say = lambda line: None
        self.trainer = t.Trainer(cfg, run, train, val)
        rows = np.arange(cfg.memory_bank_size)
        for a, b in t.spans(len(rows), t.CHUNK):
            self.trainer.memory.push(t.torch.from_numpy(documents.documents(slice(a, b))), t.torch.from_numpy(rows[a:b] % len(train)))
        rng = np.random.default_rng(0)                       # windows as an epoch has them, read ahead as there; more than are asked for
        orders = [rng.permutation(len(train)) for _ in range(200)]
        windows = [order[a:b] for order in orders for a, b in t.spans(len(order) // self.trainer.effective * self.trainer.effective, self.trainer.effective)]
        self.windows = iter(windows)
        self.batches = t.load_batches(train, (w[a:b] for w in windows for a, b in t.spans(len(w), self.trainer.micro)), 0)

    def steps(self, n):
        """Seconds of n optimizer steps."""
        return timed(lambda: [self.trainer.step(next(self.windows), self.batches) for _ in range(n)])

    def save(self):
        return timed(self.trainer.save)


class DocumentedLoop:
    """All data in memory, nn.GRU, a loss for each micro-batch against it and the memory bank, which is a concatenation; memory 0 = no bank."""

    def __init__(self, pairs, bank, bs, accum, H, memory):
        import torch
        arrays, vectors = dict(np.load(pairs)), np.load(bank)["vectors"]
        X, Y = torch.from_numpy(arrays["X_train"]), torch.from_numpy(arrays["Y_train"])
        self.torch, self.F, self.accum, self.memory, self.D = torch, torch.nn.functional, accum, memory, X.shape[2]
        self.loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=bs, shuffle=True, drop_last=True)
        self.gru = torch.nn.GRU(self.D, H, batch_first=True, bidirectional=True)
        self.project = torch.nn.Linear(2 * H, self.D)
        self.weights = [*self.gru.parameters(), *self.project.parameters()]
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-3, weight_decay=0.01)
        self.bank, self.batches = self.F.normalize(torch.from_numpy(vectors[:memory]), dim=-1), self.draw()

    def draw(self):
        while True:
            yield from self.loader

    def step(self):
        torch, F = self.torch, self.F
        for _ in range(self.accum):
            x, y = next(self.batches)                                     # (B, L, D), (B, D)
            q, d = F.normalize(self.project(self.gru(x)[0].mean(1)), dim=-1), F.normalize(y, dim=-1)
            scores = torch.cat([q @ d.T, q @ self.bank.T], 1) / 0.05      # (B, B + memory)
            (F.cross_entropy(scores, torch.arange(len(q))) / self.accum).backward()
            if self.memory:
                self.bank = torch.cat([self.bank, d])[-self.memory:]
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, n):
        return timed(lambda: [self.step() for _ in range(n)])


class Peak:
    """torch.mm of square matrices, in operations a second."""

    def measure(self, size, repeats=5):
        import torch
        found = {}
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
            out = torch.mm(a, b)
            found[name] = 2 * size ** 3 / float(np.median([timed(lambda: torch.mm(a, b, out=out)) for _ in range(repeats)]))     # noqa: B023
        return found


def operations(L, D, H, columns):
    """Of one pair, forward and backward, a multiplication and an addition each one -> of the GRU, and with the scores and their gradient.
    In each direction and step: input (3H x D) forward and for its weights, state (3H x H) forward, for its weights and for the state before."""
    gru = 2 * L * 2 * (2 * 3 * H * D + 3 * 3 * H * H)
    return gru, gru + 2 * 2 * columns * D


def bench_step(args, s, table):
    data = prepare_step(args, s)
    flags = data | {"hidden_dim": s["H"], "memory_bank_size": s["memory"], "bank_negatives": 0, "pool": "mean", "residual": "none"}
    old = data | {"H": s["H"]}
    need = {("fp32", 32): 1.35, ("fp32", 8): 2.5, ("bf16", 32): 4.2, ("bf16", 8): 7.5}
    reached, peaks = {"fp32": [], "bf16": []}, {"fp32": [], "bf16": []}
    with Child("ours", "Peak") as peak:
        for bs, accum in ((32, 16), (8, 64)):
            sides = {p: ("ours", "OurTrainer", flags | {"precision": p, "bs": bs, "accum": accum}) for p in ("fp32", "bf16")}
            sides["documented"] = "documented", "DocumentedLoop", old | {"bs": bs, "accum": accum, "memory": s["memory"]}
            if bs == 32:
                sides["plain"] = "documented", "DocumentedLoop", old | {"bs": bs, "accum": accum, "memory": 0}
            rates = take_turns(sides, s, peak)
            for p in ("fp32", "bf16"):
                reached[p] += rates[p]
                peaks[p] += [x[p] / 1e9 for x in rates["peak"]]
                table.add(f"{bs} x {accum} {p} / documented loop", rates[p], rates["documented"], "pairs/s", need=(">=", need[p, bs]))
                if bs == 32:
                    table.add(f"{bs} x {accum} {p} / plain nn.GRU, in-batch loss, no memory bank", rates[p], rates["plain"], "pairs/s")
    for p, share in (("fp32", 0.85), ("bf16", 0.55)):
        rate = np.array(reached[p])
        gru, whole = (n / 1e9 for n in operations(s["L"], s["D"], s["H"], WINDOW + s["memory"]))
        table.add(f"share of the {p} peak, GRU alone ({gru:.3g} GFLOP a pair)", list(rate * gru), peaks[p], "GFLOP/s", need=(">=", share))
        table.add(f"share of the {p} peak, with the scores ({whole:.3g} GFLOP a pair)", list(rate * whole), peaks[p], "GFLOP/s")


def take_turns(sides, s, peak=None):
    """Pairs a second of the optimizer steps of each side, in turn, and what `peak` measures then -> name to figures."""
    with contextlib.ExitStack() as stack:
        children = {name: stack.enter_context(Child(side, kind, **flags)) for name, (side, kind, flags) in sides.items()}
        for child in children.values():
            child.ask("steps", n=1)                          # the first one fills caches
        found = {name: [] for name in children}
        for turn in range(s["turns"]):
            say(f"{', '.join(children)}: turn {turn + 1} of {s['turns']}")
            for name, child in children.items():
                found[name].append(s["steps"] * WINDOW / child.ask("steps", n=s["steps"]))
            if peak:
                found.setdefault("peak", []).append(peak.ask("measure", size=s["mm"]))
    return found


# -----------------------------------------------------------------------------
# start and memory: a real run at the documented sizes

class DocumentedStart:
    """All arrays read into memory, a loader over them, and the first batch in hand."""

    def load(self, pairs, bank, H):
        import torch
        arrays, self.vectors = dict(np.load(pairs)), np.load(bank)["vectors"]
        self.arrays = {name: torch.from_numpy(a) for name, a in arrays.items()}
        dataset = torch.utils.data.TensorDataset(self.arrays["X_train"], self.arrays["Y_train"])
        self.gru = torch.nn.GRU(arrays["X_train"].shape[2], H, batch_first=True, bidirectional=True)
        self.batch = next(iter(torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True)))
        return time.time()


def read_through(path):
    with open(path, "rb") as f:
        while f.read(2 ** 24):
            pass


def forget(path):
    """Drop a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def train(folder, data, *flags, command=(sys.executable, "train_twotower_v4.py")):
    """Start a real training process -> it, and the time before it was started."""
    out = open(folder / "output", "w")
    where = ("--pairs", str(data["pairs"]), "--bank", str(data["bank"]), "--out", str(folder / "run"), "--log-dir", "none")
    env = os.environ | OURS | {"MAX_RESTARTS": "0", "PAIRS": str(data["pairs"]), "BANK": str(data["bank"])}
    started = time.time()
    return subprocess.Popen([*map(str, command), *where, *map(str, flags)], cwd=ROOT, stdout=out, stderr=out, env=env), started


def finish(process, folder):
    if process.wait():
        sys.exit(f"bench: the trainer ended with {process.returncode}:\n{(folder / 'output').read_text()[-3000:]}")
    return check.read_events(folder / "run")


def seconds_to_first_step(data, s, parent, watched=None):
    """Of a real training process; with a list in `watched`, the highest private memory of the whole process goes there.

    What lies between the start event and the first checkpoint is the plan's four lines and the baselines' evaluation: not counted, for it is
    a measurement that the documented way does not make. The first step began its own length before its event."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        process, started = train(Path(folder), data, "--max-steps", 1, "--epochs", 1, "--no-mining", "--eval-queries", 64, "--hidden-dim", s["H"])
        with Watch(process.pid) if watched is not None else contextlib.nullcontext() as watch:
            events = finish(process, Path(folder))
    if watched is not None:
        watched.append(watch.peak)
    first = {name: next(e for e in events if e["event"] == name) for name in ("start", "checkpoint", "step")}
    judged = first["checkpoint"]["t"] - first["checkpoint"]["seconds"]
    began = first["step"]["t"] - min(WINDOW, s["pairs"]) / first["step"]["pairs_per_s"]
    return first["start"]["t"] - started + began - judged


def available_gb():
    found = re.search(r"MemAvailable:\s*(\d+)", check.read("/proc/meminfo"))
    if not found:
        raise Skipped("private memory is read from /proc, which only Linux has")
    return int(found[1]) / 1e6


def bench_start(args, s, table):
    available, data = available_gb(), prepare_full(args, s)
    need = sum(os.path.getsize(p) for p in data.values()) / 1e9 + 3
    ours, cold, old, memory, old_memory = [], [], [], [], []
    for turn in range(s["start_turns"]):
        say(f"start: turn {turn + 1} of {s['start_turns']}")
        read_through(data["bank"])                           # in the page cache for both; the pairs don't fit there beside a copy of themselves
        ours.append(seconds_to_first_step(data, s, args.data))
        for path in data.values():
            forget(path)
        cold.append(seconds_to_first_step(data, s, args.data, memory))
        if available < need:
            continue
        read_through(data["bank"])
        started = time.time()
        with Child("documented", "DocumentedStart") as child, Watch(child.pid) as watch:
            old.append(child.ask("load", **data, H=s["H"]) - started)
        old_memory.append(watch.peak)
    table.add("start to first step, bank in the page cache / reading all arrays", ours, old, "s", higher=False, need=("<", 4), on="ours")
    table.add("start to first step, no file in the page cache", cold, [], "s")
    table.add("private memory of that start, one step and an evaluation / of reading all arrays", memory, old_memory, "GB", higher=False)
    table.known["documented_gb"] = old_memory
    if available < need:
        table.skip(f"reading all arrays into memory: needs {need:.0f} GB, {available:.0f} GB are available")


def bench_memory(args, s, table):
    available_gb()                                           # or there is nothing to measure with
    data = prepare_full(args, s)
    for precision in args.precisions.split(","):
        with tempfile.TemporaryDirectory(dir=args.data) as folder:
            say(f"memory: a launched run in {precision}")
            full = -(-s["memory"] // WINDOW) + 2             # steps after which the memory bank is full
            process, _ = train(Path(folder), data, "--precision", precision, "--max-steps", full, "--epochs", -(-full * WINDOW // s["pairs"]),
                               "--hidden-dim", s["H"], "--mine-schedule", "1-1:8@r10-100;2-:none", command=[ROOT / "launch_v4_cpu.sh"])
            with Watch(process.pid, Path(folder, "run")) as watch:
                finish(process, Path(folder))
        where = max(watch.phases, key=watch.phases.get)
        table.add(f"private memory of a launched {precision} run, highest in {where} / of reading all arrays", [watch.peak],
                  table.known.get("documented_gb", [])[:1], "GB", higher=False, need=("<=", 1.5), on="ours")
        table.rows[-1]["phases"] = watch.phases


# -----------------------------------------------------------------------------
# search: mining and evaluation over the whole bank

class OurSearch:
    """mine_negatives and count_ranks on queries that are there already: encoding is the tower's speed, not the search's. The queries are weighted
    contexts, which is what the tower begins with."""

    def __init__(self, pairs, bank, mine_queries, eval_queries, folder):
        import train_twotower_v4 as t
        t.keep_freed_memory()
        self.t, self.bank, (arrays, path) = t, t.Bank(bank), t.open_npz(pairs)
        self.splits = {name: t.Split(path, name, {k: a[:n] for k, a in arrays.items()}, self.bank) for name, n in (("train", mine_queries), ("val", eval_queries))}
        self.cfg = dataclasses.replace(t.Config(), log_dir="none")
        self.run = t.Run(Path(folder) / "run", self.cfg, "cpu")
        self.queries = {}
        for name, split in self.splits.items():
            x = (t.align(t.torch.from_numpy(split[np.arange(a, b)])) for a, b in t.spans(len(split), 256))
            self.queries[name] = np.concatenate([t.weighted_context(x, valid, t.decay_weights(0.5, x.shape[1])).numpy() for x, valid in x])
            np.save(Path(folder) / f"{name}.npy", self.queries[name])                    # for the other side
            np.save(Path(folder) / f"{name}_rows.npy", split.rows)

    def mine(self, precision):
        """Search and choice of negatives by the default schedule's last rule, with what --search auto means in this precision."""
        self.run.precision, queries = precision, self.queries["train"]
        self.t.encode = lambda *_: (queries[a:b] for a, b in self.t.spans(len(queries), 128))
        rule = self.t.rule_for(self.cfg, 11)
        return timed(lambda: self.t.mine_negatives(None, self.splits["train"], rule, 11, self.cfg, self.run))

    def evaluate(self):
        q = self.queries["val"]
        return timed(lambda: self.t.count_ranks(q[None], self.splits["val"], np.arange(len(q)), False, self.run))

    def open(self):
        return timed(lambda: self.t.Bank(self.bank.path))

    def search(self, precision, k):
        self.run.precision, q = precision, self.queries["val"]
        return timed(lambda: self.t.search_bank([q], len(q), k, self.bank, self.cfg, self.run))

    def overlap(self, n, k):
        """Share of the exact search's top k that the bf16 scan has too."""
        found = []
        for search in ("bf16", "torch"):
            q = self.queries["train"][:n]
            found.append(self.t.search_bank([q], len(q), k, self.bank, dataclasses.replace(self.cfg, search=search), self.run)[0])
        return float(np.mean([len(np.intersect1d(a, b)) / k for a, b in zip(*found)]))


class DocumentedSearch:
    """The bank in memory, copied and put into a new IndexFlatIP for each use; ids sifted one by one. No torch in this process."""

    def __init__(self, bank, folder):
        self.bank = np.load(bank)["vectors"]
        self.queries, self.rows = ({name: np.load(Path(folder) / f"{name}{end}.npy") for name in ("train", "val")} for end in ("", "_rows"))

    def search(self, queries, k):
        import faiss
        vectors = np.ascontiguousarray(self.bank.astype(np.float32))
        index = faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors)
        return index.search(queries, k)[1]

    def mine(self, k, count):
        def work():
            negatives = []
            for ids, own in zip(self.search(self.queries["train"], k), self.rows["train"]):
                kept = []
                for i in ids:
                    if i != own:
                        kept.append(int(i))
                negatives.append(kept[:count])
            return negatives
        return timed(work)

    def evaluate(self, n):
        def work():
            hits = 0
            for ids, own in zip(self.search(self.queries["val"][:n], 500), self.rows["val"]):
                for i in ids:
                    if i == own:
                        hits += 1
                        break
            return hits / n
        return timed(work)


def bench_search(args, s, table):
    available, data, rates, memory = available_gb(), prepare_full(args, s), {}, {}
    if available < (need := 3 * os.path.getsize(data["bank"]) / 1e9 + 3):
        raise Skipped(f"copies of the bank need {need:.0f} GB, {available:.0f} GB are available")
    with tempfile.TemporaryDirectory(dir=args.data) as folder, \
            Child("ours", "OurSearch", **data, mine_queries=s["mine_queries"], eval_queries=s["eval_queries"], folder=folder) as ours, \
            Child("documented", "DocumentedSearch", bank=data["bank"], folder=folder) as old:
        k = 200 + 8 + 1                                      # as mine_negatives asks for ranks 1 to 200 of dense pairs
        jobs = {"mine bf16": (ours, s["mine_queries"], "mine", {"precision": "bf16"}), "mine faiss": (ours, s["mine_queries"], "mine", {"precision": "fp32"}),
                "mine old": (old, s["mine_queries"], "mine", {"k": k, "count": 16}), "eval": (ours, s["eval_queries"], "evaluate", {}),
                "eval old": (old, s["old_eval_queries"], "evaluate", {"n": s["old_eval_queries"]})}
        for turn in range(s["search_turns"]):
            say(f"search: turn {turn + 1} of {s['search_turns']}")
            for name, (child, n, method, flags) in jobs.items():
                with Watch(child.pid) as watch:
                    rates.setdefault(name, []).append(n / child.ask(method, **flags))
                memory.setdefault(name, []).append(watch.peak)
        say("search: overlap")
        overlap = ours.ask("overlap", n=s["overlap_queries"], k=k)
    rows = (("mining, --search auto in bf16 / an index of copies", "mine bf16", "mine old", 4),
            ("mining, FAISS worker / an index of copies", "mine faiss", "mine old", None),
            (f"evaluation of {s['eval_queries']:,} / of {s['old_eval_queries']}, an index of copies", "eval", "eval old", 20))
    for what, mine, theirs, need in rows:
        table.add(what, rates[mine], rates[theirs], "queries/s", need=need and (">=", need))
        table.add(f"private memory of that {what.split()[0].strip(',')} ({mine.split()[-1]})", memory[mine], memory[theirs], "GB", higher=False)
    table.add(f"top {k} of an exact search that the bf16 scan has", [100 * overlap], [100.0], "%")


# -----------------------------------------------------------------------------
# evidence and growth

def measure_evidence(steps):
    import evidence_cost
    return evidence_cost.measure(steps)


def bench_evidence(args, s, table):
    with Child("ours", "measure_evidence", steps=s["evidence_steps"]) as child:
        m = child.result
    table.add("heartbeats and events / a small step of one thread", [1000 * (m["beat_seconds"] + m["event_seconds"])], [1000 * m["off"]], "ms", need=("<", 0.01))
    data = prepare_step(args, s)
    with Child("ours", "OurTrainer", **data, hidden_dim=s["H"], memory_bank_size=s["memory"]) as child:
        child.ask("steps", n=1)                              # the optimizer's moments exist from here on
        saves = [child.ask("save") for _ in range(s["saves"])]
    table.add("a checkpoint / the time between two (--ckpt-seconds)", saves, [60.0], "s")


def bench_growth(args, s, table):
    scales, N, M, D, n = (1, 2, 4), s["grow_pairs"], s["grow_bank"], s["grow_D"], s["grow_queries"]
    data = prepare(args, 4 * N, 64, 20, D, s["step_bank"])
    flags = data | {"hidden_dim": 128, "memory_bank_size": s["memory"], "bs": 32, "accum": 16}
    with contextlib.ExitStack() as stack:
        trainers = {x: stack.enter_context(Child("ours", "OurTrainer", **flags, first=x * N)) for x in scales}
        banks = {}
        for x in scales:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=args.data))
            banks[x] = stack.enter_context(Child("ours", "OurSearch", **prepare(args, 64, n, 4, D, x * M), mine_queries=64, eval_queries=n, folder=folder))
        jobs = {"an epoch of steps": lambda x: trainers[x].ask("steps", n=x * N // WINDOW), "opening the bank": lambda x: banks[x].ask("open"),
                "search, bf16 scan": lambda x: banks[x].ask("search", precision="bf16", k=308),
                "search, FAISS worker": lambda x: banks[x].ask("search", precision="fp32", k=308), "count_ranks": lambda x: banks[x].ask("evaluate")}
        for what, ask in jobs.items():
            say(f"growth: {what}")
            times = [[ask(x) for x in scales] for _ in range(s["grow_turns"] + 1)][1:]             # the first turn fills caches
            one, two, four = (list(column) for column in zip(*times))
            of = "pairs" if "epoch" in what else "bank rows"
            table.add(f"{what}, 2x / 1x the {of}", two, one, "s")
            table.add(f"{what}, 4x / 1x the {of}", four, one, "s", need=("<=", 4.2))


# -----------------------------------------------------------------------------
# rivals: what sentence-transformers offers for the same work, on the same vectors

class CachedLoss:
    """CachedMultipleNegativesRankingLoss over a window, with torch.nn.GRU as the model: it encodes twice, for it must know all documents first."""

    def __init__(self, pairs, bank, H, bs):
        import torch
        from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
        F, arrays = torch.nn.functional, np.load(pairs)
        self.X, self.Y, self.torch = torch.from_numpy(arrays["X_train"]), torch.from_numpy(arrays["Y_train"]), torch

        class Towers(torch.nn.Module):
            def __init__(self, D):
                super().__init__()
                self.gru, self.project = torch.nn.GRU(D, H, batch_first=True, bidirectional=True), torch.nn.Linear(2 * H, D)
                self.zero = torch.nn.Parameter(torch.zeros(()))              # the loss wants a gradient from documents too

            def forward(self, features):
                x = features["input_ids"]                                    # (B, L, D) is a query, (B, D) a document
                return {"sentence_embedding": F.normalize(self.project(self.gru(x)[0].mean(1)) if x.dim() == 3 else x + self.zero, dim=-1)}
        self.model = torch.nn.Sequential(Towers(self.X.shape[2]))           # a model is a list of modules there
        self.loss = CachedMultipleNegativesRankingLoss(self.model, scale=20.0, mini_batch_size=bs)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.01)

    def steps(self, n):
        def step():
            rows = self.torch.randperm(len(self.X))[:WINDOW]
            self.loss([{"input_ids": self.X[rows]}, {"input_ids": self.Y[rows]}], None).backward()
            self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return timed(lambda: [step() for _ in range(n)])


class Miner:
    """mine_hard_negatives with FAISS; the model it is given only looks vectors up, by the numbers that stand for texts."""
    device = "cpu"

    def __init__(self, bank, folder):
        self.bank, self.queries, self.rows = np.load(bank)["vectors"], np.load(Path(folder) / "train.npy"), np.load(Path(folder) / "train_rows.npy")

    def encode_document(self, texts, **_):
        return self.bank                                     # the texts are its row numbers, in order

    def encode_query(self, texts, **_):
        return self.queries

    def get_embedding_dimension(self):
        return self.bank.shape[1]

    def similarity_pairwise(self, a, b):
        import torch
        return (torch.as_tensor(a) * torch.as_tensor(b)).sum(1)

    def mine(self):
        from datasets import Dataset
        from sentence_transformers.util import mine_hard_negatives
        data = Dataset.from_dict({"anchor": [f"q{i}" for i in range(len(self.queries))], "positive": [str(row) for row in self.rows]})
        corpus = [str(i) for i in range(len(self.bank))]
        return timed(lambda: mine_hard_negatives(data, self, corpus=corpus, range_max=200, num_negatives=16, sampling_strategy="random",
                                                 output_format="n-tuple", use_faiss=True, verbose=False))


def bench_rivals(args, s, table):
    for package in ("sentence-transformers", "datasets"):
        if not importlib.util.find_spec(package.replace("-", "_")):
            raise Skipped(f"{package} is not installed")
    data = prepare_step(args, s)
    sides = {"ours": ("ours", "OurTrainer", data | {"hidden_dim": s["H"], "memory_bank_size": 0, "bank_negatives": 0, "filter_threshold": 1.0, "residual": "none"}),
             "rival": ("documented", "CachedLoss", data | {"H": s["H"], "bs": 32})}
    rates = take_turns(sides, s)
    table.add("fp32 step, no memory bank / CachedMultipleNegativesRankingLoss", rates["ours"], rates["rival"], "pairs/s")
    data, n, rates = prepare_full(args, s), s["mine_queries"], {}
    with tempfile.TemporaryDirectory(dir=args.data) as folder, Child("ours", "OurSearch", **data, mine_queries=n, eval_queries=1, folder=folder) as ours, \
            Child("documented", "Miner", bank=data["bank"], folder=folder) as rival:
        for turn in range(s["search_turns"]):
            say(f"mine_hard_negatives: turn {turn + 1} of {s['search_turns']}")
            for name, child, flags in (("bf16", ours, {"precision": "bf16"}), ("fp32", ours, {"precision": "fp32"}), ("rival", rival, {})):
                rates.setdefault(name, []).append(n / child.ask("mine", **flags))
    table.add("mining, --search auto in bf16 / mine_hard_negatives", rates["bf16"], rates["rival"], "queries/s")
    table.add("mining, FAISS worker / mine_hard_negatives", rates["fp32"], rates["rival"], "queries/s")


# -----------------------------------------------------------------------------
# quality: the same steps in two precisions

def bench_quality(args, s, table):
    with tempfile.TemporaryDirectory() as folder:
        folder, data, flags = Path(folder), args.quality and dict(zip(("pairs", "bank"), args.quality)), []
        if not data and not args.quick:
            raise Skipped("give real data with --quality PAIRS BANK")
        if not data:
            import make_tiny_pairs
            with contextlib.redirect_stdout(sys.stderr):
                make_tiny_pairs.main(["--out", str(folder / "data"), "--sequences", "60", "--dim", "32"])
            data, flags = {"pairs": str(folder / "data" / "pairs.npz"), "bank": str(folder / "data" / "bank.npz")}, ["--hidden-dim", 32]
        recall = {"fp32": [], "bf16": []}
        for seed in range(s["seeds"]):
            for precision in recall:
                say(f"quality: {precision}, seed {seed}")
                place = folder / f"{precision}_{seed}"
                place.mkdir()
                events = finish(train(place, data, "--precision", precision, "--epochs", 2, "--seed", seed, "--eval-queries", 0, *flags)[0], place)
                recall[precision].append(100 * [e for e in events if e["event"] == "eval"][-1]["recall@500"])
    worst = max(abs(a - b) for a, b in zip(recall["bf16"], recall["fp32"]))
    table.add(f"Recall@500 after two epochs, bf16 / fp32; largest difference of {s['seeds']} seeds: {worst:.2f} points", recall["bf16"], recall["fp32"], "%")
    table.rows[-1] |= {"required": "within 1 point", "met": worst <= 1 if table.judged else None}


# -----------------------------------------------------------------------------
# the table

class Table:
    """Rows of figures of ours and of what they are compared with; the ratio says how many times better, or how many times as much."""
    HEAD = ("section", "what", "ours", "other", "ratio", "spread", "required", "met")
    COMPARE = {">=": operator.ge, "<=": operator.le, "<": operator.lt}

    def __init__(self, judged):
        self.rows, self.section, self.judged, self.known = [], "", judged, {}        # known: what one section leaves for a later one

    def add(self, what, ours, other, unit, higher=True, need=None, on="ratio"):
        """higher: ours / other, more is better or it is a share; else other / ours. need is of the ratio, or of our own figure."""
        mine, theirs = (float(np.median(x)) if x else None for x in (ours, other))
        ratios = [(a / b if higher else b / a) for a, b in zip(ours, other if len(other) == len(ours) else len(ours) * other[:1])]
        row = {"section": self.section, "what": what, "unit": unit, "ours": mine, "other": theirs, "each": {"ours": ours, "other": other},
               "ratio": None if theirs is None else mine / theirs if higher else theirs / mine, "spread": [min(ratios), max(ratios)] if ratios else None}
        if need:
            row["required"] = f"{on} {need[0]} {need[1]}"
            row["met"] = bool(self.COMPARE[need[0]](row[on], need[1])) if self.judged else None
        self.rows.append(row)

    def skip(self, why):
        self.rows.append({"section": self.section, "what": f"skipped: {why}"})

    def lines(self):
        def number(x, unit=""):
            return "" if x is None else f"{x:,.0f} {unit}".strip() if abs(x) >= 1000 else f"{x:.3g} {unit}".strip()

        def cells(r):
            met = {True: "yes", False: "NO"}.get(r.get("met"), "not judged" if "required" in r else "")
            spread = "-".join(map(number, r["spread"])) if r.get("spread") and len(r["each"]["ours"]) > 1 else ""
            return r["section"], r["what"], number(r.get("ours"), r.get("unit")), number(r.get("other"), r.get("unit")), number(r.get("ratio")), \
                spread, r.get("required", ""), met
        text = [self.HEAD, *map(cells, self.rows)]
        widths = [max(len(line[i]) for line in text) for i in range(len(self.HEAD))]
        return [" | ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in text]

    def save(self, path, args):
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"quick": args.quick, "python": platform.python_version(), "platform": platform.platform(), "cores": os.cpu_count(), "load": os.getloadavg(),
                 "threads": os.environ.get("OMP_NUM_THREADS")} | {name: importlib.metadata.version(name) for name in ("torch", "faiss-cpu", "numpy")}
        path.write_text(json.dumps({"about": about, "rows": self.rows}, indent=1))


SECTIONS = {"step": bench_step, "start": bench_start, "memory": bench_memory, "search": bench_search, "evidence": bench_evidence, "growth": bench_growth,
            "rivals": bench_rivals, "quality": bench_quality}


def parse_args():
    def path(text):                                          # run.sh changes the folder; the user's paths are relative to where that was
        return Path(os.environ.get("BENCH_CALLER", os.getcwd()), text)
    parser = argparse.ArgumentParser(prog="bench/run.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="which to run; none = all of them")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, a test of the benchmark itself: nothing is judged")
    parser.add_argument("--data", type=path, default=ROOT / "artifacts" / "bench", metavar="DIR", help="where the data is made, once [artifacts/bench]")
    parser.add_argument("--json", type=path, default=ROOT / "runs" / "bench" / "results.json", metavar="PATH", help="all figures [runs/bench/results.json]")
    parser.add_argument("--precisions", default="fp32,bf16", help="of the runs of section memory [%(default)s]")
    parser.add_argument("--quality", nargs=2, type=path, metavar=("PAIRS", "BANK"), help="real data of section quality; none = it is skipped")
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return args


def main():
    if sys.argv[1:2] == ["--child"]:
        return serve(*sys.argv[2:])
    args = parse_args()
    table, sizes = Table(judged=not args.quick), QUICK if args.quick else FULL
    if os.getloadavg()[0] > 0.5:
        say(f"the machine is busy (load {os.getloadavg()[0]:.1f}); the figures will be worse than it is")
    for name in args.sections or SECTIONS:
        table.section, started = name, time.time()
        try:
            SECTIONS[name](args, sizes, table)
        except Skipped as e:
            table.skip(str(e))
        say(f"{name}: {time.time() - started:.0f} s")
        table.save(args.json, args)
    print("\n".join(table.lines()))
    print(f"all figures: {args.json}")
    return any(row.get("met") is False for row in table.rows)


if __name__ == "__main__":
    sys.exit(main())
