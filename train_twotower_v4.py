#!/usr/bin/env python3
"""Train the query tower of a two-tower dense retriever over vectors that are computed already.

    python train_twotower_v4.py --pairs pairs.npz --bank bank.npz --out runs/first
    python train_twotower_v4.py --pairs pairs.npz --bank bank.npz --dry-run
    python train_twotower_v4.py --resume runs/first

A query is a sequence of L context vectors, a document one row of the bank; the document tower is the identity. The run
folder gets config.yaml, events.jsonl, history.json, ranks_val.npy, checkpoints/ and crash/. The same command again goes
on with an unfinished run and begins a new folder after a finished one; it overwrites nothing.

Exit codes: 0 done; 2 something the user can mend, said in one line; 3 the numbers diverged; 130 or 143 interrupted and
saved; a native death keeps its signal.
"""
import argparse
import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import errno
import faulthandler
import fcntl
import hashlib
import io
import json
import math
import os
import platform
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np
from tqdm import tqdm

VERSION = "4.0.0"

class UserError(Exception):
    """What the user can mend: printed as one line, exit code 2."""

def require(good, message):
    if not good:
        raise UserError(message)

@contextlib.contextmanager
def mendable(what, advice, *errors):
    """An error of the outside world that the user can mend, as one line."""
    try:
        yield
    except errors as e:
        raise UserError(f"{getattr(e, 'filename', None) or what}: {getattr(e, 'strerror', None) or e}; {advice}") from None

# -----------------------------------------------------------------------------
# config: one frozen dataclass is the defaults, the flags and the help

def flag(group, default, text, low=None, choices=None):
    return dataclasses.field(default=default, metadata={"group": group, "help": text, "low": low, "choices": choices})

METRICS = ("recall@1", "recall@10", "recall@100", "recall@500", "recall@1000", "mrr")

@dataclasses.dataclass(frozen=True)
class Config:
    pairs: str = flag("data", "", "NPZ of X_train, Y_train, X_val, Y_val, or of C_train, T_train, C_val, T_val; no default")
    bank: str = flag("data", "", "NPZ of vectors (M, D); no default")
    keep_context: bool = flag("data", False, "rows of a query's own context are candidates and negatives; off = they are neither")
    eval_queries: int = flag("data", 2000, "judge on a fixed sample of so many validation pairs; 0 = on all of them", 0)

    cell: str = flag("model", "gru", "recurrent cell", choices=("gru", "lstm"))
    hidden_dim: int = flag("model", 512, "state size of each direction", 1)
    num_layers: int = flag("model", 1, "recurrent layers", 1)
    pool: str = flag("model", "mean", "how the states become one vector", choices=("mean", "last"))
    residual: str = flag("model", "learned", "weighted context added to the projection: fixed, or learned from there; none = off", choices=("exp", "learned", "none"))
    residual_decay: float = flag("model", 0.5, "weight of a context vector relative to the one after it, at the start; 1 = no decay")
    encoder_share: float = flag("model", 0.6, "how much of the recurrent encoder is added to a residual once trained, to judge and to mine; 1 = all of it")

    epochs: int = flag("training", 0, "passes over the training pairs; 0 = three, or more where pairs are few, for 150 updates", 0)
    bs: int = flag("training", 32, "pairs encoded at a time (on the CPU as many as is fast: the gradient is the same)", 1)
    accum: int = flag("training", 16, "times --bs pairs in an optimizer step; 1 = no accumulation", 1)
    lr: float = flag("training", 1e-3, "highest learning rate")
    lr_min: float = flag("training", 1e-5, "learning rate at the end of the cosine; 0 = down to nothing", 0)
    warmup_steps: int = flag("training", 50, "optimizer steps of linear warm-up; 0 = none", 0)
    wd: float = flag("training", 0.01, "weight decay; 0 = none", 0)
    tau: float = flag("training", 0.05, "temperature that cosines are divided by; 1 = none")
    margin: float = flag("training", 0.0, "subtracted from the positive's cosine; 0 = none", -2)
    grad_clip: float = flag("training", 1.0, "largest gradient norm; 0 = no clipping", 0)
    seed: int = flag("training", 0, "of the weights, the order and the samples", 0)

    memory_bank_size: int = flag("negatives", 50_000, "recent positives kept as negatives; 0 = no memory bank", 0)
    bank_negatives: int = flag("negatives", 2048, "random bank rows in each step; 0 = none", 0)
    filter_threshold: float = flag("negatives", 0.98, "cosine to the positive above which a document is no negative; 1 = off, only equal ones")
    mine_schedule: str = flag("negatives", "1-5:none;6-10:8@r10-100;11-:16@r1-200",
                              "epochs:count@window by rank (r10-100) or by cosine to the positive (0.82-0.92); 1-:none = off")
    no_mining: bool = flag("negatives", False, "mine no hard negatives, whatever the schedule says; off = mine")
    search: str = flag("negatives", "auto", "faiss = in a worker process, torch steps in if it dies; ivf = the same, approximate, its recall is logged; "
                       "torch = no worker; bf16 = no worker, scan in bf16 and score what could be best in fp32; auto = bf16 with --precision bf16, else faiss",
                       choices=("faiss", "ivf", "torch", "bf16", "auto"))

    device: str = flag("machine", "cpu", "where the tower runs; auto = the first of cuda, mps, cpu", choices=("cpu", "mps", "cuda", "auto"))
    precision: str = flag("machine", "auto", "fp32, or bf16 for the recurrence and the scores; auto = bf16 where timing shows that it pays, never on MPS",
                          choices=("fp32", "bf16", "auto"))
    threads: int = flag("machine", 0, "threads of torch and FAISS; 0 = as OMP_NUM_THREADS says, or all cores", 0)
    workers: int = flag("machine", 0, "processes that read batches; 0 = none, the trainer reads them", 0)

    out: str = flag("run", "runs/twotower_v4", "folder of the run")
    log_dir: str = flag("run", "logs", "folder of the log files; none = no log file")
    resume: str = flag("run", "", "run folder or checkpoint to go on from, with its flags as defaults; empty = as --out says")
    metric: str = flag("run", "recall@500", "what the best epoch is chosen by", choices=METRICS)
    patience: int = flag("run", 0, "evaluations in a row without a better --metric that end the run; 0 = never", 0)
    ckpt_seconds: float = flag("run", 60.0, "time between checkpoints within an epoch; 0 = after each step", 0)
    max_bad_steps: int = flag("run", 10, "steps in a row with a non-finite loss or gradient that end the run; 0 = never", 0)
    max_steps: int = flag("run", 0, "optimizer steps after which the run is done; 0 = all of the epochs", 0)
    dry_run: bool = flag("run", False, "check the data, time three steps, print the plan, leave nothing behind; off = train")

FIELDS = dataclasses.fields(Config)
# what may differ between two starts without making it another run (the data files are compared by content)
NOT_IDENTITY = {"out", "log_dir", "resume", "dry_run", "ckpt_seconds", "workers", "threads", "search", "max_bad_steps", "pairs", "bank"}
STATE_FLAGS = ("cell", "hidden_dim", "num_layers", "pool", "residual", "memory_bank_size")    # a checkpoint fits only these

def option(name):
    return "--" + name.replace("_", "-")

class OneLineParser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message} (--help lists the flags)")

def parse_flags(argv):
    """The flags that were given, and only those."""
    parser = OneLineParser(prog="train_twotower_v4.py", description=__doc__, allow_abbrev=False, argument_default=argparse.SUPPRESS,
                           formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s --pairs NPZ --bank NPZ [flags]")
    parser.add_argument("--version", action="version", version=f"train_twotower_v4 {VERSION}")
    groups = {name: parser.add_argument_group(name) for name in dict.fromkeys(f.metadata["group"] for f in FIELDS)}
    for f in FIELDS:
        group, text, choices = groups[f.metadata["group"]], f.metadata["help"], f.metadata["choices"]
        if isinstance(f.default, bool):
            group.add_argument(option(f.name), action="store_true", help=text)
        else:
            group.add_argument(option(f.name), type=type(f.default), choices=choices, metavar=None if choices else type(f.default).__name__.upper(),
                               help=text + (f" [{f.default}]" if f.default != "" else ""))
    return vars(parser.parse_args(argv))

def make_config(given):
    """The whole config: given flags over those of the run to resume, over the defaults; each value checked."""
    stored = read_config(find_resume(given["resume"])[0] / "config.yaml") if given.get("resume") else {}
    keep = {f.name for f in FIELDS} - {"out", "resume", "dry_run"}
    cfg = Config(**({k: v for k, v in stored.items() if k in keep} | given))
    require(cfg.pairs, "--pairs is missing: give the NPZ file of the training pairs")
    require(cfg.bank, "--bank is missing: give the NPZ file of the documents")
    for f in FIELDS:
        low, value = f.metadata["low"], getattr(cfg, f.name)
        require(low is None or value >= low, f"{option(f.name)} is {value}, expected at least {low}")
    for name, high in (("lr", 1e3), ("tau", 1e3), ("residual_decay", 1), ("encoder_share", 1), ("filter_threshold", 1)):
        require(0 < getattr(cfg, name) <= high, f"{option(name)} is {getattr(cfg, name)}, expected above 0 and at most {high:g}")
    require(cfg.lr_min <= cfg.lr, f"--lr-min {cfg.lr_min:g} is above --lr {cfg.lr:g}")
    parse_schedule(cfg.mine_schedule, cfg.epochs)
    return cfg

# epochs first to last (inf = the end): count (0 = none) negatives from a window by kind (rank or cosine), low to high
MineRule = collections.namedtuple("MineRule", "first last count kind low high", defaults=(0, "", 0, 0))

def parse_schedule(text, epochs):
    """`1-5:none;6-10:8@r10-100;11-:16@0.82-0.92` -> rules that cover each epoch once."""
    rules, expected = [], 1
    for part in text.split(";"):
        number = r"(\d+(?:\.\d+)?)"
        m = re.fullmatch(rf"\s*(\d+)-(\d*):(?:none|(\d+)@(?:r(\d+)-(\d+)|{number}-{number}))\s*", part)
        require(m, f"--mine-schedule: can't read '{part}', expected like 6-10:8@r10-100, 11-:16@0.82-0.92 or 1-5:none")
        first, last = int(m[1]), int(m[2]) if m[2] else float("inf")
        what = "an overlap" if first < expected else "a gap"
        require(first == expected and last >= first, f"--mine-schedule: '{part}' leaves {what}: it must begin at epoch {expected} and end no sooner")
        rule = MineRule(first, last)
        if m[3]:
            rule = MineRule(first, last, int(m[3]), *(("rank", int(m[4]), int(m[5])) if m[4] else ("cosine", float(m[6]), float(m[7]))))
            good = 1 <= rule.low <= rule.high if rule.kind == "rank" else rule.low < rule.high <= 1
            require(good and rule.count, f"--mine-schedule: '{part}' has an empty window (ranks count from 1, cosines end at 1)")
        rules.append(rule)
        expected = last + 1
    require(expected > epochs, f"--mine-schedule: leaves a gap from epoch {expected} to --epochs {epochs}; write {rules[-1].first}- in its last part")
    return rules

def rule_for(cfg, epoch):
    rule = next(r for r in parse_schedule(cfg.mine_schedule, cfg.epochs) if r.first <= epoch <= r.last)
    return rule if rule.count and not cfg.no_mining else None

def device_rules(device, accum, available):
    """What --device means on a machine with these accelerators -> (device, warnings). Pure: any machine can ask for mps."""
    if device == "auto":
        device = next(d for d in ("cuda", "mps", "cpu") if d in available or d == "cpu")
    require(device == "cpu" or device in available, f"--device {device}: there is none on this machine; run ./launch_v4_cpu.sh, or give --device cpu")
    risky = device == "mps" and accum > 4
    return device, [f"--accum {accum} on MPS: runs with 32 accumulated backward passes died silently at batches 117 and 927; "
                    "./launch_v4_mps_safe.sh has --accum 4"] if risky else []

def precision_rules(precision, device, gain):
    """What --precision means on this device, where bf16 multiplies `gain` times as fast as fp32. Pure."""
    require(precision != "bf16" or device != "mps", "--precision bf16: not on MPS, where only fp32 is known to be stable; give fp32 or auto")
    return precision if precision != "auto" else "bf16" if gain >= 1.5 and device != "mps" else "fp32"

def micro_batch(cfg, W, L, D, device, precision):
    """Pairs encoded at a time in a window of W: --bs, or on the CPU even parts of the window whose states and scores fit 470 MB."""
    if device != "cpu":
        return cfg.bs
    states = (2 if precision == "bf16" else 4) * L * (2 * D + 10 * cfg.hidden_dim * cfg.num_layers)
    fit = max(1, 470_000_000 // (states + 16 * (W + cfg.memory_bank_size + cfg.bank_negatives)))
    return -(-W // -(-W // fit))

def set_epochs(cfg, N):
    """--epochs 0 for N pairs. Beyond that a tower learns its training documents, and ranks others no better."""
    if not cfg.epochs:
        cfg = dataclasses.replace(cfg, epochs=max(3, -(-150 // -(-N // (cfg.bs * cfg.accum)))))
    parse_schedule(cfg.mine_schedule, cfg.epochs)            # it must cover them
    return cfg

def learning_rate(cfg, update, total):
    """Linear warm-up, then a cosine down to --lr-min; by optimizer step, the first one is 0."""
    warmup = min(cfg.warmup_steps, total // 2)               # a short run still sees its highest rate
    if update < warmup:
        return cfg.lr * (update + 1) / warmup
    done = min(1.0, (update - warmup) / max(1, total - 1 - warmup))
    return cfg.lr_min + (cfg.lr - cfg.lr_min) * 0.5 * (1 + float(np.cos(np.pi * done)))

# -----------------------------------------------------------------------------
# disk: the only code that replaces files; a reader sees the old file or the new one, never half of one

class Disk:
    @staticmethod
    def replace(path, data, keep_previous=False):
        """Write bytes, or what a function writes to a binary file, under a temporary name; then rename."""
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "wb") as f:
                data(f) if callable(data) else f.write(data)
                f.flush()
                os.fsync(f.fileno())
            if keep_previous and path.exists():
                os.replace(path, previous_generation(path))
            os.replace(temporary, path)
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        finally:
            temporary.unlink(missing_ok=True)

def previous_generation(path):
    return path.with_name(f"{path.stem}.prev{path.suffix}")

def find_resume(path):
    """--resume -> (run folder, checkpoint)."""
    path = Path(path)
    folder, checkpoint = (path, path / "checkpoints" / "last.pt") if path.is_dir() else (path.parent.parent, path)
    there = checkpoint.is_file() or previous_generation(checkpoint).is_file()
    require(there, f"--resume {path}: there is no checkpoint; give a run folder or one of its checkpoints/*.pt")
    return folder, checkpoint

def write_config(path, values):
    Disk.replace(path, "".join(f"{k}: {json.dumps(v)}\n" for k, v in values.items()).encode())

def read_config(path):
    with mendable(path, "expected a run folder's lines of `key: json`", OSError, ValueError):
        return {k: json.loads(v) for k, _, v in (line.partition(": ") for line in Path(path).read_text().splitlines())}

# -----------------------------------------------------------------------------
# data: NPZ files mapped in place, pairs in two forms, and the bank with its groups of equal rows

CHUNK = 16_384                                               # bank rows handled at a time
SCAN_LIMIT = 2 ** 30                                         # files up to this size are checked whole

def spans(n, size):
    return ((a, min(a + size, n)) for a in range(0, n, size))

def npz_members(path):
    with mendable(path, "not a whole NPZ file; make it again", zipfile.BadZipFile), mendable(path, "give a file that can be read", OSError), \
            zipfile.ZipFile(path) as z:
        return [m for m in z.infolist() if m.filename.endswith(".npy")]

def fingerprint(path):
    """Names, sizes and checksums from the zip's directory: they stand for the whole content, without reading it."""
    return hashlib.sha256(repr([(m.filename, m.file_size, m.CRC) for m in npz_members(path)]).encode()).hexdigest()[:16]

def open_npz(path, cache=None):
    """The arrays of an NPZ, mapped in place, and the file they are in: a compressed NPZ is unpacked once, beside it or in `cache`."""
    path, members = Path(path), npz_members(path)
    require(not any(m.flag_bits & 1 for m in members), f"{path}: is encrypted; save it with np.savez")
    if any(m.compress_type != zipfile.ZIP_STORED for m in members):
        path = unpack_npz(path, members, cache or path.parent)
        members = npz_members(path)
    return {m.filename.removesuffix(".npy"): map_member(path, m) for m in members}, path

def map_member(path, member):
    key = member.filename.removesuffix(".npy")
    with open(path, "rb") as f:
        f.seek(member.header_offset)
        start = member.header_offset + 30 + sum(struct.unpack("<HH", f.read(30)[26:30]))
        f.seek(start)
        headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        with mendable(f"{path}: {key}", "no NumPy array; make it again", ValueError, KeyError):
            shape, fortran, dtype = headers[np.lib.format.read_magic(f)](f)
        offset = f.tell()
    require(not dtype.hasobject, f"{path}: {key} holds pickled Python objects; save plain arrays of float32, float16 or integers")
    n_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    whole = offset - start + n_bytes == member.file_size and offset + n_bytes <= os.path.getsize(path)
    require(whole, f"{path}: {key} is cut short, {shape} needs {n_bytes:,} bytes; make it again")
    if n_bytes == 0:                                         # nothing to map
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", offset, shape, "F" if fortran else "C")

def unpack_npz(path, members, folder):
    """Store a compressed NPZ uncompressed, under a name that its size, time and checksums decide."""
    stat, declared = os.stat(path), sum(m.file_size for m in members)
    key = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns} {fingerprint(path)}".encode()).hexdigest()[:12]
    target = folder / f".{path.name}.{key}.unpacked.npz"
    if target.exists():
        return target
    free = shutil.disk_usage(folder).free
    require(declared <= 200 * stat.st_size + 2 ** 26, f"{path}: {stat.st_size:,} bytes claim to be {declared:,}; refused as a zip bomb, use np.savez")
    require(declared <= free - 2 ** 26, f"{path}: unpacks to {declared / 1e9:.1f} GB, {folder} has {free / 1e9:.1f} GB free; make room")

    def copy(f):
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(f, "w", zipfile.ZIP_STORED) as out, \
                tqdm(total=declared, unit="B", unit_scale=True, desc=f"unpacking {path.name}", disable=not sys.stderr.isatty()) as bar:
            for m in members:
                with source.open(m) as reader, out.open(m.filename, "w", force_zip64=True) as writer:
                    while block := reader.read(2 ** 22):
                        writer.write(block)
                        bar.update(len(block))
    with mendable(path, "damaged inside; make it again", zipfile.BadZipFile, zlib.error, EOFError), \
            mendable(path, "can't be unpacked there; save it with np.savez", OSError):
        Disk.replace(target, copy)
    for old in set(folder.glob(f".{path.name}.*.unpacked.npz")) - {target}:
        old.unlink()
    return target

def row_norms(rows):
    return np.sqrt(np.einsum("nd,nd->n", rows, rows, dtype=np.float32))                  # (n,)

def unit_rows(rows):
    """The document tower: rows (n, D) in float32, with norm 1."""
    rows = rows.astype(np.float32)
    return rows / np.maximum(row_norms(rows), 1e-12)[:, None]

def check_array(path, key, array, rank, kind, shape_text):
    """One array's rank, dtype and rows, or one line that says what is wrong with it."""
    require(array.ndim == rank, f"{path}: {key} is {array.shape}, expected {shape_text}")
    good, wanted = (array.dtype in (np.float32, np.float16), "float32 or float16") if kind == "float" else (array.dtype.kind in "iu", "integers")
    require(good, f"{path}: {key} is {array.dtype}, expected {wanted}; convert it with .astype")
    require(0 not in array.shape, f"{path}: {key} is {array.shape}: it has no rows")

def check_rows(path, key, array, zero_is_padding=False):
    """Refuse NaN, Inf, zero rows and empty contexts: everywhere in a file of modest size, in a few places of a larger one."""
    blocks = list(spans(len(array), max(1, 2 ** 24 // array[0].nbytes)))
    if os.path.getsize(path) > SCAN_LIMIT:
        blocks = blocks[::max(1, len(blocks) // 4)]
    for a, b in blocks:
        norms = row_norms(array[a:b].reshape(-1, array.shape[-1])).reshape(b - a, -1)    # (rows, 1 or L)
        zero = (norms == 0).all(1) if zero_is_padding else (norms == 0).any(1)
        for what, bad in (("NaN or Inf", ~np.isfinite(norms).all(1)), ("only zeros", zero)):
            require(not bad.any(), f"{path}: {key} has {what} in rows {(a + np.flatnonzero(bad))[:5].tolist()}; drop them and make the file again")

def row_keys(rows):
    """(n, D) -> (n,) 64-bit hashes of the values: equal rows have equal keys in float16 and float32 alike."""
    odd = np.random.default_rng(0).integers(2 ** 63, size=rows.shape[1], dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    keys = np.empty(len(rows), np.uint64)
    for a, b in spans(len(rows), 1024):
        words = (rows[a:b].astype(np.float32) + 0.0).view(np.uint32) * odd               # + 0.0: -0.0 equals 0.0
        keys[a:b] = (words ^ (words >> np.uint64(32))).sum(1, dtype=np.uint64)
    return keys

class Bank:
    """The documents: mapped vectors, and for each row its group, the first row that equals it."""

    def __init__(self, path, cache=None):
        arrays, self.path = open_npz(path, cache)
        require("vectors" in arrays, f"{path}: has no key 'vectors', only {sorted(arrays)}")
        self.vectors = arrays["vectors"]                                                 # (M, D)
        check_array(path, "vectors", self.vectors, 2, "float", "(M, D)")
        check_rows(self.path, "vectors", self.vectors)
        self.keys, self.first, inverse = np.unique(row_keys(self.vectors), return_index=True, return_inverse=True)
        self.groups = self.first[inverse]                                                # (M,)

    def find(self, rows):
        """(n, D) -> (n,) the first bank row that equals each one, -1 where there is none."""
        keys = row_keys(rows)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, self.first[at], -1)

    def documents(self, ids):
        return unit_rows(self.vectors[ids])                                              # (n, D)

class Split:
    """Training or validation pairs by number, whichever form the file has."""

    def __init__(self, path, name, arrays, bank):
        self.path, self.name, self.bank, self.indexed = path, name, bank, f"C_{name}" in arrays
        self.context_key, self.target_key = (f"C_{name}", f"T_{name}") if self.indexed else (f"X_{name}", f"Y_{name}")
        for key in (self.context_key, self.target_key):
            require(key in arrays, f"{path}: has no key '{key}', only {sorted(arrays)}; expected X_, Y_ or C_, T_ of train and val")
        self.C, self.T = arrays[self.context_key], arrays[self.target_key]               # (N, L) or (N, L, D); (N,) or (N, D)
        kind, more, text = ("int", 0, "") if self.indexed else ("float", 1, ", D")
        check_array(path, self.context_key, self.C, 2 + more, kind, f"(N, L{text})")
        check_array(path, self.target_key, self.T, 1 + more, kind, f"(N{text or ','})")
        require(len(self.C) == len(self.T), f"{path}: {self.context_key} has {len(self.C)} rows, {self.target_key} has {len(self.T)}; expected as many")
        self.check_indexed() if self.indexed else self.check_dense()
        self.rows = np.asarray(self.T, np.int64) if self.indexed else bank.find(self.T)  # (N,) of the bank, -1 = not there
        # (N,) the group of each target; one that the bank lacks has a group of its own, past the bank's rows
        self.groups = np.where(self.rows >= 0, bank.groups[self.rows], len(bank.groups) + np.arange(len(self.T)))

    def check_indexed(self):
        M = len(self.bank.vectors)
        outside = f"names a document outside the bank's {M:,} rows; is this its bank?"
        for a, b in spans(len(self.C), CHUNK):
            C, T = self.C[a:b], self.T[a:b]
            for key, bad, what in ((self.context_key, ((C < -1) | (C >= M)).any(1), outside), (self.target_key, (T < 0) | (T >= M), outside),
                                   (self.context_key, (C < 0).all(1), "has no context, only padding; drop it")):
                require(not bad.any(), f"{self.path}: {key} row {a + int(np.argmax(bad))} {what}")

    def check_dense(self):
        D = self.bank.vectors.shape[1]
        for key, array in ((self.context_key, self.C), (self.target_key, self.T)):
            require(array.shape[-1] == D, f"{self.path}: {key} has D = {array.shape[-1]}, the bank has D = {D}")
            check_rows(self.path, key, array, zero_is_padding=array is self.C)

    def __len__(self):
        return len(self.T)

    def __getitem__(self, idx):
        """(B,) pair numbers -> (B, L, D) contexts, zeros where there is padding."""
        C = self.C[idx]
        if not self.indexed:
            return C.astype(np.float32, copy=False)
        x = self.bank.vectors[np.maximum(C, 0)].astype(np.float32)
        x[C < 0] = 0
        return x

    def __reduce__(self):                                    # a loader process maps the files again instead of copying them
        return open_contexts, (self.path, self.bank.path, self.name)

    def positives(self, idx):
        return self.bank.documents(self.T[idx]) if self.indexed else unit_rows(self.T[idx])             # (B, D)

    def forbidden(self, idx, keep_context):
        """(B,) -> (B, 1 + L) groups that can't be negatives of a query: its own positive's and its context's; -1 = nothing."""
        own = self.groups[idx][:, None]                                                  # (B, 1)
        if keep_context or not self.indexed:
            return own
        return np.concatenate([own, np.where(self.C[idx] < 0, -1, self.bank.groups[self.C[idx]])], 1)

    def seen_groups(self):
        """(M,) which groups of the bank are a target here, or stand in a context where that is known."""
        seen = np.zeros(len(self.bank.groups), bool)
        seen[self.groups[self.rows >= 0]] = True
        for a, b in spans(len(self.C) if self.indexed else 0, CHUNK):
            seen[self.bank.groups[self.C[a:b][self.C[a:b] >= 0]]] = True
        return seen

def open_contexts(path, bank_path, name):
    """A Split that can only read contexts, for a loader process: the trainer has checked the files."""
    split, bank = object.__new__(Split), object.__new__(Bank)
    bank.vectors, arrays = open_npz(bank_path)[0]["vectors"], open_npz(path)[0]
    split.bank, split.indexed = bank, f"C_{name}" in arrays
    split.C = arrays[f"C_{name}" if split.indexed else f"X_{name}"]
    return split

def open_data(cfg, cache=None):
    bank = Bank(cfg.bank, cache)
    arrays, path = open_npz(cfg.pairs, cache)
    return Split(path, "train", arrays, bank), Split(path, "val", arrays, bank)

# -----------------------------------------------------------------------------
# search worker: this file in another process, with FAISS and without torch; one job, then it exits

def exact_search(queries, bank, k, find, whole, tick):
    """Top-k rows of the bank for each query by cosine, best first -> ids (n, k). find(q, piece, k) searches one piece."""
    k, ids = min(k, len(bank)), np.empty((len(queries), min(k, len(bank))), np.int32)
    # a float32 bank of unit rows can be searched where it is mapped; any other one in converted pieces
    whole = whole and bank.dtype == np.float32 and all(np.abs(row_norms(bank[a:b]) - 1).max() < 1e-6 for a, b in spans(len(bank), CHUNK))
    for a, b in spans(len(queries), 2048):
        q, scores, rows = np.array(queries[a:b]), np.empty((b - a, 0), np.float32), np.empty((b - a, 0), np.int64)
        for c, d in spans(len(bank), len(bank) if whole else CHUNK):
            tick("search")
            found = find(q, bank[c:d] if whole else unit_rows(bank[c:d]), min(k, d - c))
            scores, rows = np.concatenate([scores, found[0]], 1), np.concatenate([rows, found[1] + c], 1)
            best = np.argsort(-scores, 1, kind="stable")[:, :k]
            scores, rows = np.take_along_axis(scores, best, 1), np.take_along_axis(rows, best, 1)
        ids[a:b] = rows
    return ids

def open_ivf(faiss, path, bank, tick):
    """An inverted file of the bank in 8 bits a number, made once and then mapped."""
    if not os.path.exists(path):
        lists, D = max(1, int(len(bank) ** 0.5)), bank.shape[1]
        index = faiss.IndexIVFScalarQuantizer(faiss.IndexFlatIP(D), D, lists, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT)
        index.cp.min_points_per_centroid = 1
        index.train(unit_rows(bank[::max(1, len(bank) // (64 * lists))]))
        for a, b in spans(len(bank), CHUNK):
            tick("search")
            index.add(unit_rows(bank[a:b]))
        faiss.write_index(index, path + ".tmp")
        os.replace(path + ".tmp", path)
    index = faiss.read_index(path, faiss.IO_FLAG_MMAP)
    index.nprobe = 32
    return index

def run_search_job(path):
    import faiss
    job, parent = json.loads(Path(path).read_text()), os.getppid()
    faiss.omp_set_num_threads(job["threads"])

    def tick(_phase):
        if os.getppid() != parent:                           # the trainer is gone
            sys.exit(1)

    def find(q, piece, k):
        return faiss.knn(q, piece, k, metric=faiss.METRIC_INNER_PRODUCT)
    queries, bank, k = np.load(job["queries"], mmap_mode="r"), open_npz(job["bank"])[0]["vectors"], job["k"]
    if job["ivf"]:
        index, k = open_ivf(faiss, job["ivf"], bank, tick), min(k, len(bank))
        ids = np.concatenate([index.search(np.array(queries[a:b]), k)[1] for a, b in spans(len(queries), 2048) if not tick("search")])
        sample = np.arange(0, len(queries), max(1, len(queries) // 256))
        exact = exact_search(queries[sample], bank, k, find, True, tick)
        np.save(job["recall"], np.mean([np.isin(a, b).mean() for a, b in zip(exact, ids[sample])]))
    else:
        ids = exact_search(queries, bank, k, find, True, tick)
    np.save(job["ids"], ids.astype(np.int32))
    return 0

def end_without_torch():
    """What is answered before torch is imported: the search job, --help, --version, flags that make no sense."""
    if sys.argv[1:2] == ["--search-worker"]:
        sys.exit(run_search_job(sys.argv[2]))
    try:
        make_config(parse_flags(sys.argv[1:]))
    except UserError as e:
        print(f"train: {e}", file=sys.stderr)
        sys.exit(2)

if __name__ == "__main__":
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")          # libgomp: with its long spin, two trainers on two cores stand still
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")       # code for each new shape: a growing memory bank has hundreds
    end_without_torch()

# -----------------------------------------------------------------------------
# torch from here on; towers: the query tower, and the weighted contexts that it must beat

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

BASELINES = {"last": 0.0, "exp 0.3": 0.3, "exp 0.5": 0.5, "exp 0.7": 0.7, "exp 0.9": 0.9, "mean": 1.0}

def keep_freed_memory():
    """glibc gives a large freed buffer back to the kernel, and the next one comes page by page, a tenth of a step; let it keep all it can."""
    with contextlib.suppress(OSError, AttributeError):       # not glibc
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 2 ** 25)                            # M_MMAP_THRESHOLD, at its highest
        libc.mallopt(-1, 2 ** 31 - 1)                        # M_TRIM_THRESHOLD

def give_back_memory():
    """What was freed and kept, to the kernel: between phases that need other sizes, and now and then while the memory bank grows."""
    Buffers.free.clear()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)

class Buffers:
    """The larger ones, kept by us and used again."""
    free = []

    @classmethod
    def take(cls, shape, like):
        n = int(np.prod(shape))
        for i, b in enumerate(cls.free):
            if b.dtype == like.dtype and n <= b.numel() <= 2 * n:
                return cls.free.pop(i)[:n].view(shape)
        cls.free.clear()                                     # other shapes now
        return like.new_empty(shape)

    @classmethod
    def give(cls, *buffers):
        cls.free += [b.view(-1) for b in buffers]

def time_bf16(device):
    """How many times as fast as in fp32 a multiplication is in bf16 here."""
    best = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, times = torch.ones(1024, 1024, dtype=dtype, device=device), []
        for _ in range(4):
            started = time.perf_counter()
            (a @ a)[0, 0].item()                             # waits for the device
            times.append(time.perf_counter() - started)
        best[dtype] = min(times)
    return best[torch.float32] / best[torch.bfloat16]

def align(x):
    """(B, L, D) with all-zero rows anywhere -> unit rows at the end of a shorter sequence, and which of them are valid."""
    norms = torch.linalg.vector_norm(x, dim=-1)                           # (B, L)
    valid = norms != 0                                                    # NaN is no padding
    if (valid[:, :-1] & ~valid[:, 1:]).any():                             # padding behind a vector: move it to the front
        order = valid.to(torch.uint8).argsort(dim=1, stable=True)
        x, norms, valid = x.gather(1, order[:, :, None].expand_as(x)), norms.gather(1, order), valid.gather(1, order)
    longest = int(valid.sum(1).max())
    x = x[:, -longest:] / norms[:, -longest:, None].clamp_min(1e-12)
    return x, valid[:, -longest:]                                         # (B, L', D), (B, L')

def decay_weights(decay, L):
    """(L,) by age: a vector weighs `decay` times the one after it. 0 is the last one alone, 1 the mean."""
    return torch.tensor(decay) ** torch.arange(L)

def weighted_context(x, valid, weights):
    """Unit sum of x (B, L, D) by weights (at least L,), the first of which is for the last vector."""
    weights = weights[:x.shape[1]].flip(0).to(x) * valid                  # (B, L)
    return F.normalize(torch.einsum("bl,bld->bd", weights, x), dim=-1)    # (B, D)

def roll(h, by):
    """Roll each sequence of (B, L, D) to the left by its own number of steps."""
    at = (torch.arange(h.shape[1], device=h.device) + by[:, None]) % h.shape[1]                        # (B, L)
    return h.gather(1, at[:, :, None].expand_as(h))

class BothWays(torch.autograd.Function):
    """One GRU layer on the CPU, both directions in each multiplication, weight gradients in one at the end.

    x (L, B, D); padded (2, L, B) or None says where the state stands still, each direction in its own time; w_in (2, 3H, D) with
    gates n r z, w_state (2, 3H, H) with gates r z n, biases alike -> states (2, L, B, H) and the sum (2, B, H) of those that are not padding, in fp32 at least.
    """

    @staticmethod
    def forward(ctx, x, padded, w_in, w_state, b_in, b_state):
        (L, B, D), H = x.shape, w_state.shape[2]
        both = Buffers.take((2, L, B, D), w_in)                           # each direction in its own time
        both[0].copy_(x)
        for t in range(L):
            both[1, t].copy_(both[0, L - 1 - t])
        gates = Buffers.take((2, L, B, 4 * H), both)                      # n, r, z, and the state's part of n
        for k in range(2):
            torch.mm(both[k].view(L * B, D), w_in[k].T, out=gates.view(2, L * B, 4 * H)[k, :, :3 * H])
        live = None if padded is None else (~padded)[..., None].to(both)                  # (2, L, B, 1)
        if padded is not None:
            gates[..., 2 * H:3 * H][padded] = 1e4                         # z is 1 there
        b_n, b_rz, b_s = b_in[:, None, :H], (b_in[:, H:] + b_state[:, :2 * H])[:, None], b_state[:, None, 2 * H:]
        h, step = Buffers.take((2, L + 1, B, H), both), both.new_empty(2, B, 3 * H)
        total = both.new_zeros(2, B, H, dtype=torch.promote_types(both.dtype, torch.float32))
        h[:, 0] = 0
        for t in range(L):
            n, r, z, s = gates[:, t].split(H, 2)                          # (2, B, H) each
            torch.bmm(h[:, t], w_state.transpose(1, 2), out=step)
            gates[:, t, :, H:3 * H].add_(step[:, :, :2 * H]).add_(b_rz).sigmoid_()
            torch.add(step[:, :, 2 * H:], b_s, out=s)
            n.add_(b_n).addcmul_(r, s).tanh_()
            torch.sub(h[:, t], n, out=h[:, t + 1]).mul_(z).add_(n)
            total += h[:, t + 1] if live is None else h[:, t + 1] * live[:, t]
        if not any(ctx.needs_input_grad):
            Buffers.give(gates, both)
        ctx.save_for_backward(w_in, w_state)
        ctx.both, ctx.gates, ctx.h, ctx.live = both, gates, h, live
        ctx.set_materialize_grads(False)
        return h[:, 1:], total

    @staticmethod
    def backward(ctx, d_states, d_total):
        """Each step turns its gates into their gradients, in place."""
        (w_in, w_state), both, gates, h, live = ctx.saved_tensors, ctx.both, ctx.gates, ctx.h, ctx.live
        _, L, B, H = h[:, 1:].shape
        each = torch.zeros_like(h[:, 0]) if d_total is None else d_total.to(h)
        d_bias = torch.zeros(2, 4 * H, dtype=torch.promote_types(h.dtype, torch.float32))
        dh, a, b = torch.zeros_like(h[:, 0]), torch.empty_like(h[:, 0]), torch.empty_like(h[:, 0])     # (2, B, H)
        for t in range(L - 1, -1, -1):
            n, r, z, s = gates[:, t].split(H, 2)
            dh += each if live is None else each * live[:, t]
            if d_states is not None:
                dh += d_states[:, t]
            torch.sub(h[:, t], n, out=a).mul_(dh).mul_(z)                 # dh (h - n) z
            dh -= torch.mul(dh, z, out=b)                                 # dh (1 - z); b is what goes straight to the state before
            torch.addcmul(a, a, z, value=-1, out=z)                       # z's gradient
            torch.addcmul(dh, torch.mul(dh, n, out=a), n, value=-1, out=n)                              # n's
            torch.mul(n, s, out=a).mul_(r)
            torch.mul(n, r, out=s)                                        # the state's part of n
            torch.addcmul(a, a, r, value=-1, out=r)                       # r's
            torch.bmm(gates[:, t, :, H:], w_state, out=dh).add_(b)
            d_bias += gates[:, t].sum(1)
        flat = gates.view(2, L * B, 4 * H)
        d_in = torch.stack([flat[k, :, :3 * H].T @ both[k].view(L * B, -1) for k in range(2)])
        d_state = torch.stack([flat[k, :, H:].T @ h[k, :-1].view(L * B, H) for k in range(2)])
        d_x = None
        if ctx.needs_input_grad[0]:                                       # of a lower layer's states
            ahead, back = torch.bmm(flat[:, :, :3 * H], w_in).view_as(both)
            d_x = ahead + back.flip(0)
        Buffers.give(gates, both, h)                                      # whoever used the states has had its gradient before
        return d_x, None, d_in, d_state, d_bias[:, :3 * H], d_bias[:, H:]

class QueryTower(nn.Module):
    """Bidirectional recurrent encoder of up to L vectors; with a residual it starts as the weighted context, exactly, and in eval() a share of
    the encoder is left out: what it learns holds less for unseen documents than for those it was trained on."""

    def __init__(self, D, L, cfg, dtype=None):
        super().__init__()
        self.pool, self.residual, self.share = cfg.pool, cfg.residual, cfg.encoder_share
        self.dtype = dtype                                                # of the recurrence; None = as the weights
        cell, H = {"gru": nn.GRU, "lstm": nn.LSTM}[cfg.cell], cfg.hidden_dim
        sizes = [D] + [2 * H] * (cfg.num_layers - 1)
        self.ahead = nn.ModuleList(cell(size, H, batch_first=True) for size in sizes)
        self.back = nn.ModuleList(cell(size, H, batch_first=True) for size in sizes)
        self.project = nn.Linear(2 * H, D)
        if cfg.residual != "none":
            nn.init.zeros_(self.project.weight)
            nn.init.zeros_(self.project.bias)
            self.register_buffer("weights", decay_weights(cfg.residual_decay, L), persistent=False)    # (L,)
        if cfg.residual == "learned":                                     # factors of the weights, and a map that starts as the identity
            self.log_factors = nn.Parameter(torch.zeros(L))
            self.turn = nn.Parameter(torch.eye(D))

    def recur(self, x, padding):
        """Pooled states (B, 2H), by torch's own cells. Each direction meets its padding last, so it changes nothing."""
        h, padded = x, bool(padding.any())
        for ahead, back in zip(self.ahead, self.back):
            one = ahead(roll(h, padding) if padded else h)[0]             # (B, L, H)
            h = torch.cat([roll(one, -padding) if padded else one, back(h.flip(1))[0].flip(1)], -1)    # (B, L, 2H)
        if self.pool == "mean":
            valid = torch.arange(h.shape[1], device=h.device) >= padding[:, None]                      # (B, L)
            return (h * valid[:, :, None]).sum(1) / valid.sum(1, keepdim=True)
        one, two = h.chunk(2, -1)                                         # the last state of each direction
        return torch.cat([one[:, -1], two[torch.arange(len(h), device=h.device), padding]], -1)

    def recur_both_ways(self, x, padding):
        """The same by BothWays, where a state stands still in padding: at zero before the first vector, as it is after the last one."""
        L, padded, h = x.shape[1], None, None
        if padding.any():
            time = torch.arange(L)[:, None]
            padded = torch.stack([time < padding, time >= L - padding])   # (2, L, B)
        x, dtype = x.transpose(0, 1), self.dtype or x.dtype               # (L, B, D)
        for ahead, back in zip(self.ahead, self.back):
            H, both = ahead.hidden_size, (ahead, back)
            x = x if h is None else torch.cat([h[0], h[1].flip(0)], -1)   # (L, B, D or 2H)
            weights = [torch.stack(w).to(dtype) for w in ([c.weight_ih_l0.roll(H, 0) for c in both], [c.weight_hh_l0 for c in both],
                                                               [c.bias_ih_l0.roll(H, 0) for c in both], [c.bias_hh_l0 for c in both])]
            h, total = BothWays.apply(x, padded, *weights)
        pooled = total / (L - padding)[:, None] if self.pool == "mean" else h[:, -1].to(total.dtype)   # (2, B, H)
        return torch.cat([pooled[0], pooled[1]], -1)                      # (B, 2H)

    def forward(self, x):
        x, valid = align(x)                                               # (B, L, D), (B, L)
        fast = x.device.type == "cpu" and isinstance(self.ahead[0], nn.GRU)
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype is not None and not fast):
            pooled = (self.recur_both_ways if fast else self.recur)(x, (~valid).sum(1)).to(x.dtype)
        q = self.project(pooled)                                          # (B, D)
        if self.residual != "none" and not self.training:
            q = self.share * q
        if self.residual == "exp":
            q = q + weighted_context(x, valid, self.weights)
        elif self.residual == "learned":
            q = q + weighted_context(x, valid, self.weights * self.log_factors.exp()) @ self.turn
        return F.normalize(q, dim=-1)

# -----------------------------------------------------------------------------
# memory bank: the last positives as extra negatives, and the pairs they came from

class MemoryBank(nn.Module):
    """A ring. Documents have no parameters, so a checkpoint keeps pair numbers and the vectors are read again."""

    def __init__(self, size, D, dtype=None):
        super().__init__()
        self.register_buffer("vectors", torch.zeros(size, D, dtype=dtype), persistent=False)           # (size, D)
        self.register_buffer("pairs", torch.full((size,), -1, dtype=torch.long))         # (size,)  -1 = empty slot
        self.register_buffer("head", torch.zeros((), dtype=torch.long))

    def push(self, d, pairs):
        size, head = len(self.pairs), int(self.head)
        d, pairs = d[max(0, len(d) - size):], pairs[max(0, len(pairs) - size):]
        first = min(len(pairs), size - head)                 # up to the end of the ring, the rest from its start
        for a, b, at in ((0, first, head), (first, len(pairs), 0)):
            self.vectors[at:at + b - a], self.pairs[at:at + b - a] = d[a:b], pairs[a:b]
        self.head.fill_((head + len(pairs)) % max(1, size))

    def filled(self):
        """The part in use, without a copy -> vectors (n, D), pair numbers (n,)."""
        n = int((self.pairs >= 0).sum())                     # slots fill from the start and never empty
        return self.vectors[:n], self.pairs[:n].cpu().numpy()

    def refill(self, split):
        vectors, pairs = self.filled()
        for a, b in spans(len(pairs), CHUNK):
            vectors[a:b] = torch.from_numpy(split.positives(pairs[a:b]))                 # in the bank's own dtype

# -----------------------------------------------------------------------------
# loss: InfoNCE over one set of negatives that all micro-batches of a step share

class ColumnMask:
    """Finds the columns that a query must not be compared with, by group; every kind of negative goes through here."""

    def __init__(self, groups):
        self.order = np.argsort(groups, kind="stable")
        self.sorted = groups[self.order]                                  # (N,)

    def apply(self, scores, forbidden, value):
        """Set value in scores (..., B, N) where a column's group is among a query's forbidden ones (B, F)."""
        left = np.searchsorted(self.sorted, forbidden.ravel(), "left")
        count = np.searchsorted(self.sorted, forbidden.ravel(), "right") - left                        # (B * F,)
        rows = np.repeat(np.repeat(np.arange(len(forbidden)), forbidden.shape[1]), count)
        columns = self.order[np.repeat(left, count) + np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)]
        scores[..., torch.from_numpy(rows).to(scores.device), torch.from_numpy(columns).to(scores.device)] = value

def projection(D):
    """(D, k) orthonormal columns. Two vectors are never farther apart after it than before."""
    return torch.linalg.qr(torch.randn(D, min(D, 64), generator=torch.Generator().manual_seed(0)))[0]

def find_near(d, v, projected, threshold):
    """Which v (n, D) have a cosine to d (B, D) above the threshold -> (B, n). Whole vectors are compared only where their projections are as near."""
    p = d @ projected[0]                                                  # (B, k)
    near = torch.addmm(-(projected[1] ** 2).sum(1) / 2, p, projected[1].T) > ((p ** 2).sum(1) / 2 - (1 - threshold) - 1e-3)[:, None]
    rows, columns = near.nonzero(as_tuple=True)
    if len(rows) > near.numel() // 50:                                    # on data this close the projection does not pay
        return d.to(v.dtype) @ v.T > threshold
    near[rows, columns] = (d[rows] * v[columns]).sum(1) > threshold
    return near

# what the queries of one optimizer step are compared with: by kind, vectors (n, D), their groups (n,) and (projection, projected vectors);
# and the mask of them all
Negatives = collections.namedtuple("Negatives", "blocks groups projected mask")

def collect_negatives(d, window, memory, mined, train, cfg, key):
    """The shared set: positives of the window, memory bank, random bank rows, rows mined for the window's pairs."""
    bank, (stored, pairs), like = train.bank, memory.filled(), memory.vectors
    drawn = np.random.default_rng([cfg.seed, 1, *key]).integers(len(bank.vectors), size=cfg.bank_negatives)
    hard = np.unique(mined[window]) if mined is not None else np.empty(0, np.int64)
    blocks, groups = {"window": d.to(like.dtype), "memory": stored}, {"window": train.groups[window], "memory": train.groups[pairs]}
    for name, rows in (("bank", drawn), ("mined", hard[hard >= 0])):
        blocks[name], groups[name] = torch.from_numpy(bank.documents(rows)).to(like), bank.groups[rows]
    down = projection(d.shape[1]).to(d)
    return Negatives(blocks, groups, {name: (down, (v @ down.to(v.dtype)).to(d)) for name, v in blocks.items()},
                     ColumnMask(np.concatenate(list(groups.values()))))

class SoftmaxLoss(torch.autograd.Function):
    """Sum over queries of log(sum of exp(scores / tau)) - positive / tau, the positive among the scores. One buffer (B, N), in fp32, is the
    scores, then their exponentials, which are the gradient."""

    @staticmethod
    def forward(ctx, q, positive, blocks, masked, tau):
        scores = q.new_empty(masked.shape)
        for v, part in zip(blocks, scores.split([len(v) for v in blocks], 1)):
            part.copy_(q.to(v.dtype) @ v.T)
        highest = torch.maximum(scores.masked_fill_(masked, float("-inf")).amax(1), positive) if len(scores.T) else positive     # (B,)
        scores.sub_(highest[:, None]).mul_(1 / tau).exp_()
        own = ((positive - highest) / tau).exp()
        total = scores.sum(1) + own
        ctx.save_for_backward(scores, own, total, *blocks)
        ctx.tau = tau
        return (total.log() - own.log()).sum()

    @staticmethod
    def backward(ctx, grad):
        scores, own, total, *blocks = ctx.saved_tensors
        parts = scores.split([len(v) for v in blocks], 1)
        d_q = sum((part.to(v.dtype) @ v).to(part.dtype) for v, part in zip(blocks, parts))                    # (B, D)
        scale = grad / ctx.tau
        return d_q * (scale / total)[:, None], (own / total - 1) * scale, None, None, None

def info_nce(q, d, negatives, forbidden, cfg, counts):
    """Queries (B, D), their positives (B, D) -> the sum of their losses. The margin is in cosines, before tau."""
    blocks = list(negatives.blocks.values())
    if cfg.filter_threshold < 1:
        masked = torch.cat([find_near(d, v, negatives.projected[name], cfg.filter_threshold) for name, v in negatives.blocks.items()], 1)   # (B, N)
    else:
        masked = torch.zeros(len(q), len(negatives.mask.order), dtype=torch.bool, device=q.device)
    negatives.mask.apply(masked, forbidden, True)
    for name, part in zip(negatives.blocks, masked.split([len(v) for v in blocks], 1)):
        out, before = part.count_nonzero(), counts.get(name, (0, 0))
        counts[name] = [before[0] + part.numel() - out, before[1] + out]                               # used, masked
    return SoftmaxLoss.apply(q, (q * d).sum(1) - cfg.margin, blocks, masked, cfg.tau)

# -----------------------------------------------------------------------------
# mining: hard negatives for each pair, found at the start of an epoch

def ignore_interrupts(_worker):
    signal.signal(signal.SIGINT, signal.SIG_IGN)             # Ctrl-C goes to the whole group; the trainer decides

def load_batches(split, micro_batches, workers):
    """Contexts (B, L, D) of each micro-batch, in order, the next one read while this one is used."""
    if workers:
        # spawn, not fork: a forked child of a process with OpenMP threads can wait forever in its first parallel region
        yield from torch.utils.data.DataLoader(split, sampler=micro_batches, batch_size=None, num_workers=workers,
                                               multiprocessing_context="spawn", worker_init_fn=ignore_interrupts)
        return
    with concurrent.futures.ThreadPoolExecutor(1) as reader:
        following = collections.deque()
        for idx in micro_batches:
            following.append(reader.submit(split.__getitem__, idx))
            if len(following) > 1:
                yield torch.from_numpy(following.popleft().result())
        if following:
            yield torch.from_numpy(following.popleft().result())

@torch.no_grad()
def encode(tower, split, idx, run):
    """Queries of the pairs idx, block by block (b, D)."""
    tower.eval()
    for x in load_batches(split, [idx[a:b] for a, b in spans(len(idx), 128)], 0):
        run.tick("encode")
        yield tower(x.to(run.device)).cpu().numpy()

BF16_ERROR = 2 ** -8 + 2 ** -9                              # of a cosine: both vectors rounded, then the result
SCAN = 8192                                                 # bank rows of one multiplication, and queries of one pass over the bank

def as_tensor(mapped):
    """A mapped array as a tensor, without a copy; only to be read."""
    with warnings.catch_warnings(action="ignore"):           # that it can't be written to
        return torch.from_numpy(mapped)

def unit_blocks(vectors, size, device, dtype=torch.float32):
    """Mapped rows, `size` at a time -> (a, b, unit rows (b - a, D) in the same memory each time, their norms (b - a, 1))."""
    unit = torch.empty(min(size, len(vectors)), vectors.shape[1], device=device)
    out = unit.to(dtype)
    for a, b in spans(len(vectors), size):
        rows = unit[:b - a].copy_(as_tensor(vectors[a:b]))
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(1e-12)
        yield a, b, out[:b - a].copy_(rows.div_(norms)), norms

def find_above(scores, bar):
    """Where scores (n, Q) reach a positive bar (Q,) -> rows, columns, scores. Groups of 16 rows are looked at by their highest one first,
    in integers: those of positive numbers are in the same order, those of negative ones below."""
    size = math.gcd(len(scores), 16)
    grouped = scores.view(-1, size, len(bar))
    group, column = (grouped.view(torch.int16).amax(1) >= bar.view(torch.int16)).nonzero(as_tuple=True)
    found = grouped[group, :, column]                                                    # (hits, size)
    hit, member = (found >= bar[column, None]).nonzero(as_tuple=True)
    return group[hit] * size + member, column[hit], found[hit, member]

@torch.no_grad()
def scan_search(queries, vectors, k, run):
    """Top-k rows (n, k) by a scan in bf16 that passes on all that could be among them, which are then scored in fp32; and the few queries
    for which that is not certain."""
    M, k, unsure = len(vectors), min(k, len(vectors)), []
    ids, every, mapped = np.empty((len(queries), k), np.int32), max(1, M // CHUNK), as_tensor(vectors)
    sample = torch.cat([v.clone() for _, _, v, _ in unit_blocks(vectors[::every], CHUNK, run.device, torch.bfloat16)])
    share = k * len(sample) / M
    rank = k if every == 1 else min(len(sample), int(1.2 * share + 3 * share ** 0.5 + 3))
    for first, last in spans(len(queries), SCAN):
        give_back_memory()
        q = torch.from_numpy(np.array(queries[first:last])).to(run.device)
        parts, norms = list(spans(last - first, 2048)), torch.empty(M)
        half, bars, found = q.to(torch.bfloat16), [], [[] for _ in parts]
        memory = half.new_empty(SCAN * 2048)
        for a, b in parts:                                   # a score that somewhat more than k rows reach, going by the sample
            run.tick("search")
            bars.append((half[a:b] @ sample.T).topk(rank).values[:, -1].float().sub(2 * BF16_ERROR).clamp_min(1e-3).to(torch.bfloat16))
        for c, d, documents, length in unit_blocks(vectors, SCAN, run.device, torch.bfloat16):
            norms[c:d] = length[:, 0].cpu()
            for (a, b), bar, hits in zip(parts, bars, found):
                run.tick("search")
                scores = memory[:(d - c) * (b - a)].view(d - c, b - a)
                rows, owners, reached = find_above(torch.mm(documents, half[a:b].T, out=scores), bar)
                hits.append((owners.to(torch.int16).cpu(), (rows + c).to(torch.int32).cpu(), reached.cpu()))
        for (a, b), bar, hits in zip(parts, bars, found):
            owners, rows, reached = (torch.cat(x) for x in zip(*hits))
            hits.clear()
            order = torch.from_numpy(np.argsort(owners.numpy(), kind="stable"))
            owners, count = owners[order].long(), torch.bincount(owners.long(), minlength=b - a)
            place = torch.arange(len(owners)) - (count.cumsum(0) - count)[owners]
            shape = (b - a, max(k, int(count.max())))
            table = torch.full(shape, float("-inf")).index_put_((owners, place), reached[order].float())
            names = torch.zeros(shape, dtype=torch.int32).index_put_((owners, place), rows[order])
            table, best = table.sort(1, descending=True)
            names, lowest = names.gather(1, best), table[:, k - 1:k] - 2 * BF16_ERROR    # (b - a, 1) what the k-th best could be
            unsure += (first + a + ((count < k) | (lowest[:, 0] < bar.float().cpu())).nonzero()[:, 0]).tolist()
            for e, f in spans(b - a, 16):
                run.tick("search")
                width = max(k, int((table[e:f] >= lowest[e:f]).sum(1).max()))
                near = names[e:f, :width].long()
                whole = mapped.index_select(0, near.view(-1)).float().view(*near.shape, -1)            # (f - e, width, D)
                exact = whole.mul_(q[a + e:a + f, None].cpu()).sum(2) / norms[near]
                exact[table[e:f, :width] == float("-inf")] = float("-inf")
                ids[first + a + e:first + a + f] = near.gather(1, exact.topk(k).indices).numpy()
    return ids, np.array(unsure, np.int64)

def search_bank(blocks, n, k, bank, cfg, run):
    """Top-k bank rows of n queries, given in blocks (b, D) -> (ids (n, k), who found them). A worker that dies costs a line, not the run."""
    with mendable(run.folder, "make room, then start this again", OSError), tempfile.TemporaryDirectory(prefix="search.", dir=run.folder) as folder:
        folder = Path(folder).resolve()
        with open(folder / "queries.npy", "wb") as f:        # written, not mapped: on a full disk a write fails, a mapped one kills
            np.lib.format.write_array_header_1_0(f, {"descr": "<f4", "fortran_order": False, "shape": (n, bank.vectors.shape[1])})
            for block in blocks:
                f.write(block.tobytes())
        queries = np.load(folder / "queries.npy", mmap_mode="r")
        give_back_memory()
        if run.device == "mps":
            torch.mps.empty_cache()

        def find(q, piece, k):
            top = (torch.from_numpy(q).to(run.device) @ torch.from_numpy(piece).to(run.device).T).topk(k)
            return top.values.cpu().numpy(), top.indices.cpu().numpy()
        backend = cfg.search if cfg.search != "auto" else "bf16" if run.precision == "bf16" else "faiss"
        if backend == "bf16":
            ids, unsure = scan_search(queries, bank.vectors, k, run)
            ids[unsure] = exact_search(queries[unsure], bank.vectors, k, find, False, run.tick)
        if backend == "torch":
            ids = exact_search(queries, bank.vectors, k, find, False, run.tick)
        if backend in ("bf16", "torch"):
            return ids, backend
        job = {"bank": str(bank.path.resolve()), "k": k, "threads": torch.get_num_threads(),
               "ivf": str(run.folder.resolve() / "index.ivf") if backend == "ivf" else None} | {
                   name: str(folder / f"{name}.npy") for name in ("queries", "ids", "recall")}
        (folder / "job.json").write_text(json.dumps(job))
        with open(folder / "stderr", "w+") as errors:
            # a session of its own: Ctrl-C reaches the trainer alone, which then ends the worker
            worker = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--search-worker", str(folder / "job.json")],
                                      stderr=errors, start_new_session=True)
            try:
                while worker.poll() is None:
                    run.tick("search")
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        worker.wait(0.2)
            finally:
                worker.kill()
                worker.wait()
            if worker.returncode == 0:
                recall = f", which found {100 * float(np.load(job['recall'])):.1f}% of the exact answer on a sample" if backend == "ivf" else ""
                return np.load(job["ids"]), backend + recall
            errors.seek(0)
            how = signal.Signals(-worker.returncode).name if worker.returncode < 0 else f"exit code {worker.returncode}"
            why = (errors.read().strip().splitlines() or ["no message"])[-1]
        run.say(f"search | the worker died ({how}, {why}); searching with torch instead")
        run.event("guard", what=f"search worker died: {how}", rows=[])
        return exact_search(queries, bank.vectors, k, find, False, run.tick), "torch"

def mine_negatives(tower, train, rule, epoch, cfg, run):
    """(N, count) bank rows by pair, -1 where the window holds too few. Ranks count candidates only."""
    started, bank, N, let_through = time.time(), train.bank, len(train), 0
    no_candidates = 8 + train.forbidden(np.arange(1), cfg.keep_context).shape[1]         # some of what is found, with its duplicates
    k = (rule.high if rule.kind == "rank" else 256) + no_candidates
    ids, backend = search_bank(encode(tower, train, np.arange(N), run), N, k, bank, cfg, run)
    mined = np.full((N, rule.count), -1, np.int32)
    for a, b in spans(N, 64):
        run.tick("mine")
        pairs, rows = np.arange(a, b), ids[a:b]                                          # (n, k)
        allowed = (rows >= 0) & ~(bank.groups[rows][:, :, None] == train.forbidden(pairs, cfg.keep_context)[:, None, :]).any(2)      # -1: IVF found no more
        if rule.kind == "rank":                              # near-duplicates are looked for among twice what is needed
            place = np.cumsum(allowed, 1)
            allowed &= (place >= rule.low) & (place <= rule.high)
        draw = np.where(allowed, np.random.default_rng([cfg.seed, 2, epoch, a]).random(allowed.shape), 2.0)
        tried = np.argsort(draw, 1, kind="stable")[:, :2 * rule.count if rule.kind == "rank" else k]
        rows, allowed = np.take_along_axis(rows, tried, 1), np.take_along_axis(draw, tried, 1) < 2       # (n, tried)
        cosine = np.einsum("nkd,nd->nk", bank.documents(rows.ravel()).reshape(*rows.shape, -1), train.positives(pairs))
        allowed &= (cosine <= cfg.filter_threshold) | (cfg.filter_threshold == 1)
        if rule.kind == "cosine":
            allowed &= (cosine >= rule.low) & (cosine <= rule.high)
        let_through += int(allowed.sum())
        chosen = np.argsort(~allowed, 1, kind="stable")[:, :rule.count]                  # the first that passed, in the drawn order
        mined[a:b, :chosen.shape[1]] = np.where(np.take_along_axis(allowed, chosen, 1), np.take_along_axis(rows, chosen, 1), -1)
    filled, seconds = float((mined >= 0).mean()), time.time() - started
    run.say(f"mine epoch {epoch:<5} | {rule.count} each from {rule.kind} {rule.low:g} to {rule.high:g} | filled {100 * filled:.1f}% | {backend} | {seconds:.1f} s")
    if filled == 0:
        run.say("mine   | warning: the window is empty on this data; widen it in --mine-schedule")
    run.event("mine", filled=filled, passed=let_through / N, seconds=seconds, backend=backend)
    return mined

# -----------------------------------------------------------------------------
# evaluation: ranks by counting over the whole bank, for the tower and the trivial baselines alike

@torch.no_grad()
def count_ranks(queries, split, idx, keep_context, run):
    """(m, n, D) queries of m methods for the pairs idx -> (m, n) ranks: 1 + the candidates that score at least as high.
    Rows that equal the target do not count, rows of the context do not where they are known; a tie counts against the target."""
    bank, forbidden, n = split.bank, split.forbidden(idx, keep_context), len(idx)
    give_back_memory()
    q = torch.from_numpy(queries).to(run.device)
    target = (q * torch.from_numpy(split.positives(idx)).to(run.device)).sum(-1)         # (m, n)
    above, size = torch.zeros_like(target, dtype=torch.long), max(1, 1024 // len(q))     # queries at a time
    memory = q.new_empty(len(q) * min(size, n) * min(CHUNK, len(bank.vectors)))
    for a, b, documents, _ in unit_blocks(bank.vectors, CHUNK, run.device):
        mask = ColumnMask(bank.groups[a:b])
        for c, d in spans(n, size):
            run.tick("evaluate")
            scores = memory[:len(q) * (d - c) * (b - a)].view(len(q), d - c, b - a)
            torch.mm(q[:, c:d].flatten(0, 1), documents.T, out=scores.flatten(0, 1))
            mask.apply(scores, forbidden[c:d], float("-inf"))
            for e, f in spans(d - c, 64):                    # a sum makes integers of them first: of few, they stay in the cache
                above[:, c + e:c + f] += (scores[:, e:f] >= target[:, c + e:c + f, None]).sum(-1)
    above[~target.isfinite()] = len(bank.vectors)            # NaN is above nothing, and must not look like rank 1
    return 1 + above.cpu()

def metric_values(ranks, metric):
    """(n,) ranks -> (n,) what each query adds to the metric."""
    return 1 / ranks.double() if metric == "mrr" else (ranks <= int(metric.partition("@")[2])).double()

def summarize(ranks):
    return {name: float(metric_values(ranks, name).mean()) for name in METRICS} | {"median_rank": float(ranks.double().quantile(0.5))}

def paired_interval(differences, draws=2000):
    """95% bootstrap interval of the mean of per-query differences (n,), or of each column of (n, k)."""
    rng, differences = np.random.default_rng(0), differences.numpy()
    means = [differences[rng.integers(len(differences), size=len(differences))].mean(0) for _ in range(draws)]
    return np.percentile(means, [2.5, 97.5], axis=0).T.tolist()

def sample_validation(val, cfg):
    if not 0 < cfg.eval_queries < len(val):
        return np.arange(len(val))
    return np.sort(np.random.default_rng(0).choice(len(val), cfg.eval_queries, replace=False))

@torch.no_grad()
def rank_baselines(val, idx, cfg, run):
    """Ranks by name, for weighted contexts and the oracle, whose query is the answer: what it misses, nothing can find."""
    queries = np.empty((len(BASELINES) + 1, len(idx), val.bank.vectors.shape[1]), np.float32)
    for a, b in spans(len(idx), 256):
        x, valid = align(torch.from_numpy(val[idx[a:b]]))
        for i, decay in enumerate(BASELINES.values()):
            queries[i, a:b] = weighted_context(x, valid, decay_weights(decay, x.shape[1])).numpy()
        queries[-1, a:b] = val.positives(idx[a:b])
    return dict(zip([*BASELINES, "oracle"], count_ranks(queries, val, idx, cfg.keep_context, run)))

def judge(ranks, baselines, metric):
    """The tower's ranks against the best baseline's -> the fields of an eval event."""
    scores = {name: summarize(r) for name, r in baselines.items()}
    best = {m: max(scores.keys() - {"oracle"}, key=lambda name: (scores[name][m], name)) for m in METRICS}
    differences = torch.stack([metric_values(ranks, m) - metric_values(baselines[best[m]], m) for m in METRICS], 1)     # (n, metrics)
    compared = {m: {"best_baseline": best[m], "difference": float(difference.mean()), "interval": interval, "above_baseline": interval[0] > 0}
                for m, difference, interval in zip(METRICS, differences.T, paired_interval(differences))}
    return summarize(ranks) | {"baselines": scores, "metric": metric, "compared": compared} | compared[metric]

def difference_text(r, metric):
    scale, unit = (1, ".4f") if metric == "mrr" else (100, ".1f")
    difference, low, high = (scale * v for v in (r["compared"][metric]["difference"], *r["compared"][metric]["interval"]))
    return f"{difference:+{unit}} [{low:+{unit}}, {high:+{unit}}]"

def eval_line(epoch, r):
    best = r["baselines"][r["best_baseline"]][r["metric"]]
    return (f"eval epoch {epoch:<5} | r@10 {100 * r['recall@10']:.1f} | r@500 {100 * r['recall@500']:.1f} | mrr {r['mrr']:.4f} | best baseline "
            f"{r['metric'].replace('recall', 'r')} {f'{best:.4f}' if r['metric'] == 'mrr' else f'{100 * best:.1f}'} ({r['best_baseline']}) | "
            f"{difference_text(r, r['metric'])}{'' if r['above_baseline'] else ' | not above the baseline yet'}")

# -----------------------------------------------------------------------------
# guards and heartbeat: the run's folder, its lock, what it says and records, and how it is stopped

class Stopped(Exception):
    """The run must end early, with what is to be recorded, said and returned; raised only where all state is whole."""

def private_mb():
    """Private memory of this process; mapped files do not count."""
    try:
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) for line in f if line.startswith("RssAnon")) / 1024
    except OSError:                                          # macOS has no /proc: the highest resident size, in bytes there
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** 20

class Run:
    """One run's folder. Without a folder (--dry-run) it only prints."""

    def __init__(self, folder, cfg, device, precision="fp32"):
        self.folder, self.device, self.precision, self.progress, self.signum, self.bar = folder, device, precision, Progress(), None, None
        self.events, self.heartbeat, self.log, self.pending, self.beats, self.files = None, None, None, b"", 0, []
        self.fault = os.environ.get("TWOTOWER_FAULT")        # tests only: PHASE:STEP:FILE, run at that heartbeat
        if folder is None:
            return
        with mendable(folder, "give an --out and a --log-dir that can be written", OSError):
            for sub in ("checkpoints", "crash"):
                (folder / sub).mkdir(parents=True, exist_ok=True)
            self.files.append(lock_folder(folder))
            if evidence := os.environ.get("TWOTOWER_EVIDENCE"):          # the supervisor asks which folder this run has
                with contextlib.suppress(OSError):
                    Path(evidence, "run").write_text(str(folder.resolve()))
            for left in folder.glob("search.*"):             # by a search that was killed
                shutil.rmtree(left)
            self.events = self.open(folder / "events.jsonl", os.O_APPEND)
            self.heartbeat = self.open(folder / "crash" / "heartbeat")
            crash = self.open(folder / "crash" / "faulthandler.log", os.O_APPEND)
            with contextlib.suppress(OSError):
                os.write(crash, f"pid {os.getpid()} started {time.time():.3f}\n".encode())
            faulthandler.enable(crash)
            faulthandler.register(signal.SIGUSR1, crash)     # where is it? all stacks, and the run goes on
            if cfg.log_dir != "none":
                Path(cfg.log_dir).mkdir(parents=True, exist_ok=True)
                self.log = self.open(Path(cfg.log_dir) / time.strftime(f"twotower_{folder.name}_%Y%m%d_%H%M%S.log"), os.O_APPEND)
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(s, self.on_signal)

    def open(self, path, mode=0):
        self.files.append(os.open(path, os.O_WRONLY | os.O_CREAT | mode, 0o644))
        return self.files[-1]

    def close(self):
        """Let go of the folder and of the signals, for a caller that lives on."""
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(s, signal.SIG_DFL if s != signal.SIGINT else signal.default_int_handler)
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()
        for fd in self.files:
            os.close(fd)

    def on_signal(self, signum, _frame):
        if self.signum:
            os._exit(128 + signum)
        self.signum = signum
        with contextlib.suppress(OSError):                   # a terminal that is closed
            os.write(2, f"\ntrain: {signal.Signals(signum).name}: finishing the step, then saving; once more ends at once\n".encode())

    def check_stop(self):
        if self.signum:
            name = signal.Signals(self.signum).name
            raise Stopped("interrupted", f"stopped by {name} at step {self.progress.updates}", 128 + self.signum)

    def beat(self, phase):
        """Where the run is, in one unbuffered write that survives a kill; the last 64 are kept."""
        if self.heartbeat is not None:
            line = f"{time.time():.3f} pid {os.getpid()} epoch {self.progress.epoch} step {self.progress.updates} {phase}"
            with contextlib.suppress(OSError):
                os.pwrite(self.heartbeat, f"{line:<79}\n".encode(), self.beats % 64 * 80)
            self.beats += 1
            if self.fault and self.fault.startswith(f"{phase}:{self.progress.updates}:"):
                exec(Path(self.fault.split(":", 2)[2]).read_text(), {"run": self})

    def tick(self, phase):
        self.beat(phase)
        self.check_stop()

    def say(self, line):
        try:
            tqdm.write(line) if self.bar else print(line, flush=True)
        except OSError as e:                                 # whoever read the output is gone: save where all is whole, then stop
            if e.errno not in (errno.EPIPE, errno.EIO):
                raise
            self.signum = self.signum or signal.SIGPIPE
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if self.log is not None:
            with contextlib.suppress(OSError):               # a full disk ends the run at a checkpoint, with a line of its own
                os.write(self.log, (time.strftime("%H:%M:%S ") + line + "\n").encode())

    def event(self, name, **fields):
        """One line of events.jsonl; what a full disk refuses is tried again with the next one."""
        if self.events is None:
            return
        common = {"event": name, "t": time.time(), "epoch": self.progress.epoch, "step": self.progress.updates, "phase": name, "mem_mb": round(private_mb(), 1)}
        self.pending += (json.dumps(common | fields) + "\n").encode()
        with contextlib.suppress(OSError):
            self.pending = self.pending[os.write(self.events, self.pending):]

def lock_folder(folder):
    """Hold the folder for this process; the kernel lets go of it when the process ends, however it ends."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{folder}: process {os.read(lock, 20).decode() or '?'} is training in it; wait for it, or give another --out") from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    return lock

def find_bad_rows(train, window, negatives):
    """Which inputs of a step are not finite, by name."""
    bad = [f"{train.context_key}[{i}]" for i in window if not np.isfinite(train[[i]]).all()]
    bad += [f"{train.target_key}[{i}]" for i in window if not np.isfinite(train.positives([i])).all()]
    for name in ("bank", "mined"):
        bad += [f"vectors[{row}]" for row in negatives.groups[name][~negatives.blocks[name].isfinite().all(1).cpu().numpy()]]
    return bad

# -----------------------------------------------------------------------------
# checkpoint: all that the next step depends on, in one file with its SHA-256

@dataclasses.dataclass
class Progress:
    """Where a run is. Saved whole."""
    epoch: int = 1
    position: int = 0                                        # training pairs done in this epoch
    updates: int = 0                                         # optimizer steps done
    bad_in_row: int = 0
    loss_sum: float = 0.0                                    # of this epoch, and the pairs it is of
    loss_pairs: int = 0
    counts: dict = dataclasses.field(default_factory=dict)   # of this epoch: kind of negative -> used, masked
    best: float = -1.0
    best_epoch: int = 0
    history: list = dataclasses.field(default_factory=list)  # one evaluation a dict
    baselines: dict = dataclasses.field(default_factory=dict)     # name -> ranks (n,)
    mined_epoch: int = 0
    mined: object = None                                     # (N, count) bank rows by pair

def pack_checkpoint(state):
    """torch's own format, with the SHA-256 in the zip archive's comment: torch.load reads the file as it is."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    body = buffer.getvalue()[:-2]                            # the last two bytes are the length of an empty comment
    comment = b"sha256:" + hashlib.sha256(body).hexdigest().encode()
    return body + struct.pack("<H", len(comment)) + comment

def read_checkpoint(path, say):
    """The newest whole generation of a checkpoint."""
    for candidate in (path, previous_generation(path)):
        if candidate.is_file():
            data = candidate.read_bytes()
            if data[-71:-64] == b"sha256:" and hashlib.sha256(data[:-73]).hexdigest().encode() == data[-64:]:
                return torch.load(io.BytesIO(data), weights_only=True)
            say(f"resume | {candidate} is damaged (its SHA-256 does not match); trying the generation before it")
    raise UserError(f"{path}: no whole checkpoint is left; start again with another --out")

# -----------------------------------------------------------------------------
# train: the step, the epoch, the run

class Trainer:
    def __init__(self, cfg, run, train, val):
        self.cfg, self.run, self.train, self.val, self.progress = cfg, run, train, val, run.progress
        D, L = train.bank.vectors.shape[1], max(train.C.shape[1], val.C.shape[1])
        dtype = torch.bfloat16 if run.precision == "bf16" else None
        torch.manual_seed(cfg.seed)
        self.tower = QueryTower(D, L, cfg, dtype).to(run.device)
        self.memory = MemoryBank(cfg.memory_bank_size, D, dtype).to(run.device)
        self.optimizer = torch.optim.AdamW(self.tower.parameters(), lr=cfg.lr, weight_decay=cfg.wd, fused=True)
        self.effective = cfg.bs * cfg.accum
        self.micro = micro_batch(cfg, min(self.effective, len(train)), L, D, run.device, run.precision)
        self.steps_per_epoch = -(-len(train) // self.effective)
        self.total = min(cfg.epochs * self.steps_per_epoch, cfg.max_steps or sys.maxsize)
        self.eval_idx = sample_validation(val, cfg)
        self.saved_at, self.failed_saves, self.spoke_at = time.time(), 0, 0.0

    def disk_bytes(self):
        """Two generations, the best one and one being written; each the weights and their two moments."""
        return 4 * 3 * 4 * sum(w.numel() for w in self.tower.parameters())

    def fit(self):
        p, run = self.progress, self.run
        if not p.baselines:
            p.baselines = rank_baselines(self.val, self.eval_idx, self.cfg, run)
            for name, s in ((name, summarize(ranks)) for name, ranks in p.baselines.items()):
                run.say(f"baseline {name:<7} | r@10 {100 * s['recall@10']:.1f} | r@100 {100 * s['recall@100']:.1f} | r@500 {100 * s['recall@500']:.1f} | "
                        f"mrr {s['mrr']:.4f} | median rank {s['median_rank']:.0f}")
            free, need = shutil.disk_usage(run.folder).free / 1e6, self.disk_bytes() / 1e6
            require(free > need, f"{run.folder}: {free:.1f} MB are free, checkpoints need about {need:.1f} MB; make room, or give another --out")
            self.save(required=True)                         # before hours are spent: the disk takes a checkpoint
        while p.epoch <= self.cfg.epochs and (p.updates < self.total or p.position):     # or: trained, and not judged yet
            if self.cfg.patience and p.epoch - 1 - p.best_epoch >= self.cfg.patience:
                run.say(f"stop   | {self.cfg.metric} has not risen for {self.cfg.patience} evaluations")
                break
            self.epoch()
        self.save(required=True)

    def epoch(self):
        cfg, run, p = self.cfg, self.run, self.progress
        rule = rule_for(cfg, p.epoch)
        if rule and p.mined_epoch != p.epoch:
            p.mined, p.mined_epoch = torch.from_numpy(mine_negatives(self.tower, self.train, rule, p.epoch, cfg, run)), p.epoch
        p.mined = p.mined if rule else None
        give_back_memory()
        order = np.random.default_rng([cfg.seed, 0, p.epoch]).permutation(len(self.train))[p.position:]
        windows = [order[a:b] for a, b in spans(len(order), self.effective)][:max(0, self.total - p.updates)]
        batches = load_batches(self.train, [w[a:b] for w in windows for a, b in spans(len(w), self.micro)], cfg.workers)
        with tqdm(total=self.steps_per_epoch, initial=self.steps_per_epoch - len(windows), desc=f"epoch {p.epoch}", leave=False,
                  disable=not sys.stderr.isatty()) as bar:
            run.bar = None if bar.disable else bar
            for window in windows:
                run.check_stop()
                self.step(window, batches)
                p.position += len(window)
                if time.time() - self.saved_at >= cfg.ckpt_seconds:
                    self.save()
            run.bar = None
        self.judge_epoch()

    def step(self, window, batches):
        """Accumulate the gradient of the window's mean loss; update, unless a number is not finite."""
        cfg, run, p, started = self.cfg, self.run, self.progress, time.time()
        rate = learning_rate(cfg, p.updates, self.total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        run.beat("load")
        d = torch.from_numpy(self.train.positives(window)).to(run.device)                # (W, D)
        mined = p.mined if p.mined is None else p.mined.numpy()
        negatives = collect_negatives(d, window, self.memory, mined, self.train, cfg, (p.epoch, p.position))
        total, counts = torch.zeros((), device=run.device), {}
        self.tower.train()
        self.optimizer.zero_grad()
        for a, b in spans(len(window), self.micro):
            run.beat("load")
            x = next(batches).to(run.device)                                             # (B, L, D)
            run.beat("forward")
            loss = info_nce(self.tower(x), d[a:b], negatives, self.train.forbidden(window[a:b], cfg.keep_context), cfg, counts)
            run.beat("backward")
            (loss / len(window)).backward()                  # by what the window holds: the last one may be shorter
            total += loss.detach()
        grad_norm = nn.utils.clip_grad_norm_(self.tower.parameters(), cfg.grad_clip or float("inf"))
        total, grad_norm = torch.stack([total, grad_norm]).tolist()       # the step's one wait for the device
        if not np.isfinite([total, grad_norm]).all():        # nothing has changed yet: bank, schedule and checkpoint never see it
            return self.skip_step("gradient" if np.isfinite(total) else "loss", window, negatives)
        run.beat("step")
        self.optimizer.step()
        self.memory.push(d, torch.from_numpy(window).to(run.device))
        if p.updates % 16 == 15:
            give_back_memory()
        p.updates, p.bad_in_row, p.loss_sum, p.loss_pairs = p.updates + 1, 0, p.loss_sum + total, p.loss_pairs + len(window)
        p.counts = {name: [int(x) + y for x, y in zip(new, p.counts.get(name, (0, 0)))] for name, new in counts.items()}
        self.tell_step(total / len(window), grad_norm, rate, time.time() - started, len(window))

    def skip_step(self, what, window, negatives):
        self.optimizer.zero_grad()
        self.progress.bad_in_row += 1
        rows = find_bad_rows(self.train, window, negatives)
        named = f"because of {', '.join(rows[:5])}" if rows else f"with finite inputs, in pairs {window[:5].tolist()} and on"
        self.run.say(f"guard  | step skipped: non-finite {what} {named}")
        self.run.event("guard", what=f"non-finite {what}", rows=rows[:20], pairs=window[:20].tolist())
        if self.cfg.max_bad_steps and self.progress.bad_in_row >= self.cfg.max_bad_steps:
            raise Stopped("diverged", f"diverged: {self.progress.bad_in_row} steps in a row had a non-finite {what}; lower --lr, or mend the rows named", 3)

    def tell_step(self, loss, grad_norm, rate, seconds, pairs):
        p, run = self.progress, self.run
        run.event("step", loss=loss, grad_norm=grad_norm, lr=rate, pairs_per_s=pairs / seconds)
        if run.bar:
            run.bar.set_postfix_str(f"loss {loss:.4f} gnorm {grad_norm:.2f} {pairs / seconds:.0f} pairs/s")
            run.bar.update()
        elif time.time() - self.spoke_at > 5 or p.updates in (1, self.total):
            self.spoke_at = time.time()
            run.say(f"step {p.updates:05d}/{self.total:05d} | loss {loss:.4f} | gnorm {grad_norm:.2f} | lr {rate:.1e} | "
                    f"bank {len(self.memory.filled()[1]):,} | {1000 * seconds:.0f} ms | {pairs / seconds:.0f} pairs/s")

    def judge_epoch(self):
        """Evaluate, keep what is best; the progress it leaves is the start of the next epoch."""
        p, run, cfg = self.progress, self.run, self.cfg
        queries = np.concatenate(list(encode(self.tower, self.val, self.eval_idx, run)))                  # (n, D)
        ranks = count_ranks(queries[None], self.val, self.eval_idx, cfg.keep_context, run)[0]
        result, pairs = judge(ranks, p.baselines, cfg.metric), max(1, p.loss_pairs)
        run.say("negatives a query | " + " | ".join(f"{name} {used / pairs:,.0f} ({masked / pairs:.1f} masked)"
                                                    for name, (used, masked) in p.counts.items() if used + masked))
        run.say(eval_line(p.epoch, result))
        run.event("eval", **result, loss=p.loss_sum / pairs, negatives=p.counts)
        p.history.append({"epoch": p.epoch, "step": p.updates, "loss": p.loss_sum / pairs} | result)
        improved = result[cfg.metric] > p.best
        if improved:
            p.best, p.best_epoch = result[cfg.metric], p.epoch
        p.epoch, p.position, p.loss_sum, p.loss_pairs, p.counts = p.epoch + 1, 0, 0.0, 0, {}
        if improved:
            self.save("best.pt")
            self.keep("ranks_val.npy", lambda f: np.save(f, ranks.numpy()))
        self.keep("history.json", json.dumps(p.history, indent=1).encode())
        self.save()

    def keep(self, name, data):
        """A file for people: one that can't be written costs a line, for the checkpoint has what it says."""
        try:
            Disk.replace(self.run.folder / name, data)
        except OSError as e:
            self.run.say(f"save   | {self.run.folder / name}: {e.strerror}")

    def save(self, name="last.pt", required=False):
        """One checkpoint. A failed one is tried again at the next turn; three in a row, or a required one, end the run."""
        self.run.beat("checkpoint")
        path, started = self.run.folder / "checkpoints" / name, time.time()
        data = pack_checkpoint({"format": 4, "model": self.tower.state_dict(), "optimizer": self.optimizer.state_dict(),
                                "memory": self.memory.state_dict(), "progress": vars(self.progress), "config": json.dumps(vars(self.cfg))})
        self.saved_at = time.time()
        try:
            Disk.replace(path, data, keep_previous=name == "last.pt")
        except OSError as e:
            self.failed_saves += 1
            self.run.say(f"save   | {path}: {e.strerror}; the one before it is whole")
            if required or self.failed_saves >= 3:
                raise UserError(f"{path}: can't be saved ({e.strerror}); make room, then: {resume_command(self.run.folder)}") from None
            return
        self.failed_saves = 0
        self.run.event("checkpoint", file=name, bytes=len(data), seconds=time.time() - started)

    def restore(self, state):
        stored = json.loads(state["config"])
        for name in STATE_FLAGS:
            mine = getattr(self.cfg, name)
            require(stored[name] == mine, f"{option(name)} {mine}: the checkpoint has {stored[name]}; leave the flag out to resume")
        self.tower.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.memory.load_state_dict(state["memory"])
        self.memory.refill(self.train)
        vars(self.progress).update(state["progress"])

# -----------------------------------------------------------------------------
# main: which folder, the plan, and how a run ends

def resume_command(folder):
    return f"python train_twotower_v4.py --resume {folder}"

def describe_files(cfg):
    return {f"{name}_{what}": value for name in ("pairs", "bank")
             for what, value in (("hash", fingerprint(getattr(cfg, name))), ("bytes", os.path.getsize(getattr(cfg, name))))}

def describe_machine(device, precision):
    """What bits depend on besides the flags and the data."""
    return {"version": VERSION, "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
               "platform": platform.platform(), "device_used": device, "precision_used": precision, "threads_used": torch.get_num_threads()}

def is_finished(folder):
    """Whether the last start of a run ended with all of it done."""
    last = b""
    with contextlib.suppress(FileNotFoundError), open(folder / "events.jsonl", "rb") as f:
        for line in f:
            if line.startswith((b'{"event": "start"', b'{"event": "end"')):
                last = line
    return b'"status": "done"' in last

def choose_folder(cfg, files):
    """--out and --resume -> (folder, checkpoint or None, a line to say). A folder that holds a run is gone on with, or left alone."""
    def numbered(n):
        return Path(cfg.out if n == 1 else f"{cfg.out}_{n}")
    n = 1
    while numbered(n).exists():
        n += 1
    new, folder = numbered(n), numbered(max(1, n - 1))       # the first free one, and the newest run
    if cfg.resume:
        folder, checkpoint = find_resume(cfg.resume)
        stored = read_config(folder / "config.yaml")
        for name in ("pairs", "bank"):
            same = stored[f"{name}_hash"] == files[f"{name}_hash"]
            require(same, f"{getattr(cfg, name)}: not the {name} that {folder} was trained on; restore the file, or begin a new run")
        if checkpoint.name == "last.pt":
            return folder, checkpoint, f"resume | {folder}"
        return new, checkpoint, f"resume | from {checkpoint}, in the new folder {new}"
    if not (folder / "config.yaml").exists():
        strange = folder.is_dir() and {x.name for x in folder.iterdir()} - {"lock", "checkpoints", "crash", "events.jsonl"}
        return (new, None, f"folder | {folder} holds other files; this run goes to {new}") if strange else (folder, None, f"folder | {folder}")
    if is_finished(folder):
        return new, None, f"folder | {folder} is a finished run; this one goes to {new}"
    stored, now = read_config(folder / "config.yaml"), vars(cfg) | files
    changed = [f"{k} {stored.get(k)} -> {v}" for k, v in now.items() if k not in NOT_IDENTITY and stored.get(k) != v]
    if changed:
        return new, None, (f"folder | {folder} is unfinished, with other settings ({', '.join(changed[:3])}); this run goes to {new}; "
                           f"to go on with that one: {resume_command(folder)}")
    checkpoint = folder / "checkpoints" / "last.pt"
    there = checkpoint.is_file() or previous_generation(checkpoint).is_file()
    return folder, checkpoint if there else None, f"resume | {folder} is unfinished; going on with it"

def resolve_targets(split, cfg, run):
    """Dense targets that equal no bank row: the nearest row, if it is a near-duplicate; else the target is a document of its own."""
    bank, missing = split.bank, np.flatnonzero(split.rows < 0)
    if not len(missing):
        return
    key = hashlib.sha256(f"{fingerprint(split.path)} {fingerprint(bank.path)} {cfg.filter_threshold}".encode()).hexdigest()[:12]
    cache = split.path.with_name(f".{split.path.name}.{key}.{split.name}_targets.npy")
    if cache.exists():
        nearest = np.load(cache)
    else:
        blocks = (split.positives(missing[a:b]) for a, b in spans(len(missing), CHUNK))
        nearest = search_bank(blocks, len(missing), 1, bank, cfg, run)[0][:, 0]
        for a, b in spans(len(missing), CHUNK):
            cosine = (bank.documents(nearest[a:b]) * split.positives(missing[a:b])).sum(1)
            nearest[a:b][cosine < cfg.filter_threshold] = -1
        with contextlib.suppress(OSError):                   # data on a read-only disk: found again next time
            Disk.replace(cache, lambda f: np.save(f, nearest))
    known = nearest >= 0
    split.rows[missing[known]], split.groups[missing[known]] = nearest[known], bank.groups[nearest[known]]
    run.say(f"data   | {len(missing):,} of {len(split):,} rows of {split.target_key} equal no bank row: {known.sum():,} have a near-duplicate there, "
            f"{(~known).sum():,} are documents of their own")

def tell_plan(trainer, gain):
    """What this run is going to be, before it costs anything."""
    cfg, run, train, val = trainer.cfg, trainer.run, trainer.train, trainer.val
    (M, D), L, W = train.bank.vectors.shape, train.C.shape[1], min(trainer.effective, len(train))
    weights = sum(w.numel() for w in trainer.tower.parameters())
    reach = sum(learning_rate(cfg, u, trainer.total) for u in range(trainer.total))        # Adam moves a weight by about the rate
    gain_text = f" (--precision bf16 multiplies {gain:.1f} times as fast here)" if run.precision == "fp32" and gain > 1.1 else ""
    mined = W * max((r.count for r in parse_schedule(cfg.mine_schedule, cfg.epochs) if r.first <= cfg.epochs), default=0) * (not cfg.no_mining)
    columns = W + cfg.memory_bank_size + cfg.bank_negatives + mined
    size = 2 if run.precision == "bf16" else 4
    states = trainer.micro * L * (12 * D + 10 * size * cfg.hidden_dim * cfg.num_layers)
    memory = (16 * weights + size * D * columns + states + trainer.micro * 9 * columns) / 1e9 + 0.3
    run.say(f"data   | {len(train):,} training and {len(val):,} validation pairs, {'indexed' if train.indexed else 'dense'}, {L} x {D} | "
            f"bank {M:,} rows, {M - len(train.bank.keys):,} equal to an earlier one")
    run.say(f"tower  | {cfg.cell}, {cfg.num_layers} x {cfg.hidden_dim} each way, pool {cfg.pool}, residual {cfg.residual} | {weights:,} parameters | "
            f"{run.device}, {run.precision}, {torch.get_num_threads()} threads{gain_text}")
    run.say(f"plan   | {cfg.bs} x {cfg.accum} = {trainer.effective} pairs a step | {trainer.total:,} updates, {cfg.epochs} epochs of {trainer.steps_per_epoch:,} | "
            f"learning rates sum to {reach:.3g}")
    if reach < (need := (3 if cfg.residual == "none" else 0.3) / cfg.hidden_dim ** 0.5):
        run.say(f"plan   | warning: no weight can move farther than that, and this tower needs about {need:.2g}: it will stay near where it starts; "
                "give more --epochs, a higher --lr, or fewer pairs a step")
    run.say(f"plan   | negatives a query up to {W - 1:,} window + {cfg.memory_bank_size:,} memory + {cfg.bank_negatives:,} bank + {mined:,} mined | "
            f"memory about {memory:.1f} GB private | disk about {trainer.disk_bytes() / 1e9:.2f} GB")
    if shared := int(train.seen_groups()[val.groups[val.rows >= 0]].sum()):
        run.say(f"data   | warning: {shared:,} of {len(val):,} validation targets stand in training pairs too; the result flatters the tower, "
                "split by document")

def dry_run(cfg, device, gain):
    """Check, plan, and time three steps of a tower that is thrown away."""
    with tempfile.TemporaryDirectory(prefix="twotower.") as cache:
        run, times = Run(None, cfg, device, precision_rules(cfg.precision, device, gain)), []
        train, val = open_data(cfg, Path(cache))
        cfg = set_epochs(cfg, len(train))
        trainer = Trainer(cfg, run, train, val)
        tell_plan(trainer, gain)
        for _ in range(3):
            started, window = time.time(), np.arange(min(trainer.effective, len(train)))
            trainer.step(window, load_batches(train, [window[a:b] for a, b in spans(len(window), trainer.micro)], 0))
            times.append(time.time() - started)
        run.say(f"plan   | {1000 * np.median(times):.0f} ms a step: {np.median(times) * trainer.total / 60:.1f} minutes of steps, evaluation and mining "
                f"not counted | {private_mb():,.0f} MB private now")
        run.say("dry run: nothing was written")
    return 0

def tell_end(run, cfg):
    p, best = run.progress, run.progress.history[run.progress.best_epoch - 1]
    run.event("end", status="done", best_epoch=p.best_epoch, best=p.best)
    run.say(f"done   | best epoch {p.best_epoch}, {cfg.metric} {p.best:.4f} | {run.folder / 'checkpoints' / 'best.pt'}")
    run.say("done   | it, against the best baseline of each: " + " | ".join(f"{m.replace('recall', 'r')} {difference_text(best, m)}"
                                                                        for m in ("recall@10", "recall@100", "recall@500", "mrr")))
    if not best["above_baseline"]:
        run.say(f"done   | this tower is not above the baseline {best['best_baseline']}: use that, or train longer")

def start_run(cfg, device, gain):
    """Train in a folder of its own, and record how it ended."""
    files, trainer, precision = describe_files(cfg), None, precision_rules(cfg.precision, device, gain)
    train, val = open_data(cfg)                              # before the folder: bad input leaves none behind
    cfg = set_epochs(cfg, len(train))
    folder, checkpoint, line = choose_folder(cfg, files)
    if checkpoint and cfg.precision == "auto":               # as the run was begun, whatever the timing says today
        precision = read_config(checkpoint.parent.parent / "config.yaml").get("precision_used", precision)
    run, machine = Run(folder, cfg, device, precision), describe_machine(device, precision)
    run.say(line)
    try:
        for split in (train, val):
            resolve_targets(split, cfg, run)
        trainer = Trainer(cfg, run, train, val)
        if checkpoint:
            trainer.restore(read_checkpoint(checkpoint, run.say))
            stored = read_config(checkpoint.parent.parent / "config.yaml")
            if other := [f"{k} {stored.get(k)} -> {v}" for k, v in machine.items() if stored.get(k) != v]:
                run.say(f"resume | warning: the same bits are not promised here: {', '.join(other)}")
        with mendable(folder, "make room, then start this again", OSError):
            write_config(folder / "config.yaml", vars(cfg) | {"out": str(folder), "resume": ""} | files | machine)
        run.event("start", phase="load", pid=os.getpid(), resumed=bool(checkpoint), argv=sys.argv[1:], **machine)
        tell_plan(trainer, gain)
        trainer.fit()
        tell_end(run, cfg)
        return 0
    except Stopped as e:
        status, reason, code = e.args
        if trainer:
            trainer.save(required=True)
        run.event("end", status=status, reason=reason, signal=signal.Signals(code - 128).name if code > 128 else None)
        run.say(f"end    | {reason}{'; saved' if trainer else ''}; go on with: {resume_command(folder)}")
        return code
    except BaseException as e:
        run.event("end", status="failed", error=f"{type(e).__name__}: {e}")
        raise
    finally:
        run.close()

def main(argv=None):
    try:
        cfg = make_config(parse_flags(sys.argv[1:] if argv is None else argv))
        there = {"mps": torch.backends.mps.is_available(), "cuda": torch.cuda.is_available()}
        device, warnings = device_rules(cfg.device, cfg.accum, {name for name in there if there[name]})
        for warning in warnings:
            print(f"train: warning: {warning}", file=sys.stderr)
        if cfg.threads:
            torch.set_num_threads(cfg.threads)
        keep_freed_memory()
        return (dry_run if cfg.dry_run else start_run)(cfg, device, time_bf16(device) if device != "mps" else 0)
    except UserError as e:
        print(f"train: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("train: stopped before training began; nothing was written", file=sys.stderr)
        return 130

if __name__ == "__main__":
    sys.exit(main())
