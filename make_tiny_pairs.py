#!/usr/bin/env python3
"""Data for the trainer: the first rows of a real file, synthetic pairs with something to learn, or a dense file indexed.

    python make_tiny_pairs.py --from pairs.npz --n 100 --out pairs_tiny.npz
    python make_tiny_pairs.py --out artifacts/demo
    python make_tiny_pairs.py --index pairs.npz --bank bank.npz --out pairs_indexed.npz

Exit codes: 0 done; 2 something the user can mend, said in one line.
"""
import argparse
import sys
import zipfile
from pathlib import Path

import numpy as np


def write_npz(path, arrays):
    """Stream arrays, or functions that write one, into an uncompressed NPZ that appears whole or not at all."""
    def write(f):
        with zipfile.ZipFile(f, "w", zipfile.ZIP_STORED) as out:
            for name, array in arrays.items():
                with out.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.ascontiguousarray(array))
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        trainer.Disk.replace(path, write)
    except OSError as e:
        raise trainer.UserError(f"{path}: {e.strerror}") from None
    print(f"{path}: " + ", ".join(f"{name} {array.shape} {array.dtype}" for name, array in arrays.items()))


def cut(source, n, out):
    """The first n rows of each array, without reading the others."""
    arrays, _ = trainer.open_npz(source)
    if not arrays:
        raise trainer.UserError(f"{source}: has no arrays")
    write_npz(out, {name: array[:n] for name, array in arrays.items()})


def make_sequences(args, rng):
    """Documents of vectors (sequences, length, D): a state that a fixed rotation moves on a little at each step, under noise.

    The last vector is close to the next one, but noisy; a mean of the context is quiet, but lags behind. A tower that learns
    the rotation has both: a quiet estimate, turned forward. No weighted sum of context vectors can do that."""
    D, S = args.dim, args.sequences
    basis, _ = np.linalg.qr(rng.standard_normal((D, D)))
    turn = np.eye(D)
    for i, angle in zip(range(0, D - 1, 2), np.radians(rng.uniform(3, 12, size=D // 2))):             # one angle for each plane
        turn[i:i + 2, i:i + 2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    topics = unit(rng.standard_normal((args.topics, D)))
    state = unit(topics[rng.integers(args.topics, size=S)] + unit(rng.standard_normal((S, D))))
    vectors = np.empty((S, args.context + args.targets, D), np.float32)
    for t in range(vectors.shape[1]):
        vectors[:, t] = unit(state + args.noise * unit(rng.standard_normal((S, D))))
        state = state @ (basis @ turn @ basis.T)
    return vectors


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def make_synthetic(args):
    rng = np.random.default_rng(args.seed)
    sequences = make_sequences(args, rng)                                            # (S, T, D)
    S, T, D = sequences.shape
    bank = sequences.reshape(S * T, D)                                               # (M, D)
    starts = np.arange(S)[:, None] * T + np.arange(args.targets)                     # (S, targets) first context row of each pair
    shown = rng.integers(max(1, args.context // 2), args.context + 1, size=starts.shape)
    position = np.arange(args.context)
    C = np.where(position >= args.context - shown[..., None], starts[..., None] + position, -1)        # padding at the front
    held_out = max(1, round(S * args.val_share))                                     # whole sequences: no validation document is trained on
    arrays = {}
    for name, part in (("train", slice(held_out, S)), ("val", slice(0, held_out))):
        rows, targets = C[part].reshape(-1, args.context).astype(np.int32), (starts[part] + args.context).ravel().astype(np.int32)
        if args.form == "indexed":
            arrays |= {f"C_{name}": rows, f"T_{name}": targets}
        else:
            arrays |= {f"X_{name}": np.where(rows[..., None] >= 0, bank[rows], np.float32(0)), f"Y_{name}": bank[targets]}
    write_npz(Path(args.out) / "bank.npz", {"vectors": bank})
    write_npz(Path(args.out) / "pairs.npz", arrays)


def index_pairs(source, bank_path, out):
    """A dense pairs file as bank rows, by exact match; of several equal rows, the one that continues its neighbours."""
    bank = trainer.Bank(bank_path)
    arrays, _ = trainer.open_npz(source)
    members = np.argsort(bank.groups, kind="stable")                                 # rows of a group stand together
    group_start = np.searchsorted(bank.groups[members], np.arange(len(members)))
    group_size = np.bincount(bank.groups, minlength=len(members))
    result = {}
    for name in ("train", "val"):
        split = trainer.Split(source, name, arrays, bank)
        if split.indexed:
            raise trainer.UserError(f"{source}: {split.context_key} is indexed already")
        rows = np.empty((len(split), split.C.shape[1] + 1), np.int64)                # contexts, then the target
        for a, b in trainer.spans(len(split), 256):
            block = np.concatenate([split.C[a:b], split.T[a:b, None]], 1).astype(np.float32)           # (n, L + 1, D)
            found = bank.find(block.reshape(-1, block.shape[-1])).reshape(block.shape[:2])
            rows[a:b] = np.where((block != 0).any(-1), found, -2)                    # -1 = no equal row, -2 = padding
        unmatched, lost = int((rows[:, :-1] == -1).sum()), rows[:, -1] == -1
        ambiguous = continue_neighbours(rows, members, group_start, group_size)
        if lost.all():
            raise trainer.UserError(f"{source}: no {split.target_key} equals a row of {bank_path}; is this its bank?")
        result |= {f"C_{name}": np.maximum(rows[~lost, :-1], -1).astype(np.int32), f"T_{name}": rows[~lost, -1].astype(np.int32)}
        print(f"{name}: {len(rows):,} pairs; {unmatched:,} context rows had no match and became padding; "
              f"{int(lost.sum()):,} targets had no match and their pairs were left out; {ambiguous:,} rows had several matches")
    write_npz(out, result)


def continue_neighbours(rows, members, group_start, group_size):
    """Where a vector stands in the bank more than once, take the row after the one before it, or before the one after it."""
    several = (rows >= 0) & (group_size[np.maximum(rows, 0)] > 1)
    ambiguous = int(several.sum())
    for step in (1, -1):                                                             # first left to right, then what is left, backwards
        columns = range(rows.shape[1]) if step == 1 else range(rows.shape[1] - 1, -1, -1)
        for j in columns:
            if not 0 <= j - step < rows.shape[1]:
                continue
            for i in np.flatnonzero(several[:, j] & (rows[:, j - step] >= 0) & ~several[:, j - step]):
                choices = members[group_start[rows[i, j]]:][:group_size[rows[i, j]]]
                if rows[i, j - step] + step in choices:
                    rows[i, j], several[i, j] = rows[i, j - step] + step, False
    return ambiguous


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--from", dest="source", metavar="NPZ", help="pairs file, dense or indexed, to take the first rows of; none = synthetic data")
    what.add_argument("--index", metavar="NPZ", help="dense pairs file to turn into the indexed form; needs --bank")
    parser.add_argument("--out", required=True, help="NPZ to write; for synthetic data the folder of pairs.npz and bank.npz")
    parser.add_argument("--n", type=int, default=100, help="rows of each array to take with --from [%(default)s]")
    parser.add_argument("--bank", metavar="NPZ", help="bank of --index")
    made = parser.add_argument_group("synthetic data")
    made.add_argument("--form", choices=("indexed", "dense"), default="indexed")
    for name, default, text in (("sequences", 1000, "documents"), ("targets", 20, "pairs of each"), ("context", 20, "context vectors of a pair"),
                                ("dim", 64, "dimensions"), ("topics", 20, "topics that documents share"), ("seed", 0, "of all that is random")):
        made.add_argument(f"--{name}", type=int, default=default, help=f"{text} [%(default)s]")
    made.add_argument("--noise", type=float, default=1.5, help="length of the random part of a vector; 0 = none [%(default)s]")
    made.add_argument("--val-share", type=float, default=0.15, help="share of documents held out for validation [%(default)s]")
    return parser.parse_args(argv)


def check_args(args):
    if args.index and not args.bank:
        raise trainer.UserError("--index needs --bank, the bank that the vectors are rows of")
    for name in ("n", "sequences", "targets", "context", "dim", "topics"):
        if getattr(args, name) < (2 if name == "sequences" else 1):
            raise trainer.UserError(f"--{name} is {getattr(args, name)}, expected at least {2 if name == 'sequences' else 1}")
    if not 0 < args.val_share < 1 or args.noise < 0 or args.seed < 0:
        raise trainer.UserError("--val-share must be between 0 and 1, --noise and --seed not below 0")


def main(argv=None):
    global trainer
    args = parse_args(argv)                                                          # first: --help needs no torch
    import train_twotower_v4 as trainer
    try:
        check_args(args)
        if args.index:
            index_pairs(args.index, args.bank, args.out)
        elif args.source:
            cut(args.source, args.n, args.out)
        else:
            make_synthetic(args)
    except trainer.UserError as e:
        print(f"make_tiny_pairs: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
