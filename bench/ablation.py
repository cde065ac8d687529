#!/usr/bin/env python3
"""What each default is worth: runs of the trainer with one flag changed, judged on held-out training documents.

    python bench/ablation.py --pairs pairs.npz --bank bank.npz [--seeds 0,1,2] [--rows default,"--tau 0.1"]

The validation pairs of the file are not touched. Documents are found in the training pairs (indexed form): where a target does not follow
the one before it, a new one begins. Some of them are held out, the trainer trains on the others, and each row is compared with the default
of the same seed, query by query. Finished cells are not run again. Prints a Markdown table.
"""
import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

ROWS = ["default", "--pool mean --residual none --bank-negatives 0 --lr 5e-5", "--residual none", "--residual exp", "--encoder-share 1", "--memory-bank-size 0",
        "--bank-negatives 0", "--tau 0.03", "--tau 0.1", "--lr 5e-4", "--lr 2e-3", "--pool last", "--hidden-dim 256", "--mine-schedule 1-1:none;2-:8@r10-100"]


def hold_out_documents(pairs, out, share=0.15, most=2000):
    """Training pairs without some documents, and validation pairs from those alone."""
    with np.load(pairs) as z:
        C, T = z["C_train"], z["T_train"].astype(np.int64)
    document = np.cumsum(np.r_[True, np.diff(T) != 1]) - 1
    rng, sizes, held, n = np.random.default_rng(7), np.bincount(document), [], 0
    for d in rng.permutation(len(sizes)):
        if n >= share * len(T):
            break
        held.append(d)
        n += sizes[d]
    out_of_training = np.isin(document, held)
    val = np.flatnonzero(out_of_training)
    val = val if len(val) <= most else np.sort(rng.choice(val, most, replace=False))
    np.savez(out, C_train=C[~out_of_training], T_train=T[~out_of_training].astype(np.int32), C_val=C[val], T_val=T[val].astype(np.int32))
    print(f"{len(sizes)} documents, {len(held)} held out: {(~out_of_training).sum():,} pairs to train on, {len(val):,} to judge by", flush=True)


def train(folder, args, flags, seed):
    """One cell, as a process of its own with one thread -> its folder."""
    if not (folder / "ranks_val.npy").exists():
        command = [sys.executable, str(ROOT / "train_twotower_v4.py"), "--pairs", str(args.out / "pairs.npz"), "--bank", args.bank, "--out", str(folder),
                   "--log-dir", "none", "--seed", str(seed), "--threads", "1", "--epochs", str(args.epochs), *(flags.split() if flags != "default" else [])]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
        print(f"done: {flags}, seed {seed}", flush=True)
    return folder


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", required=True, help="indexed pairs; documents of its training part are held out")
    parser.add_argument("--bank", required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"), help="folder of the cells [%(default)s]")
    parser.add_argument("--seeds", default="0,1,2", help="[%(default)s]")
    parser.add_argument("--rows", help="flags of each row, with commas between; none = all")
    parser.add_argument("--epochs", type=int, default=3, help="[%(default)s]")
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time [%(default)s]")
    args = parser.parse_args()
    import torch

    import train_twotower_v4 as t
    args.out.mkdir(parents=True, exist_ok=True)
    hold_out_documents(args.pairs, args.out / "pairs.npz")
    rows, seeds = args.rows.split(",") if args.rows else ROWS, [int(s) for s in args.seeds.split(",")]
    cells = [(row, seed) for row in dict.fromkeys(["default", *rows]) for seed in seeds]
    with ThreadPoolExecutor(args.jobs) as pool:
        folders = pool.map(lambda cell: train(args.out / f"{re.sub(r'[^a-z0-9.]+', '_', cell[0]).strip('_')}.{cell[1]}", args, *cell), cells)
        ranks = {cell: torch.from_numpy(np.load(folder / "ranks_val.npy")) for cell, folder in zip(cells, folders)}
    print("| flags | R@10 | R@100 | R@500 | MRR | R@500 against the default | MRR against the default | seeds |\n|---|---|---|---|---|---|---|---|")
    for row in dict.fromkeys(row for row, _ in cells):
        mean = {m: np.mean([float(t.metric_values(ranks[row, s], m).mean()) for s in seeds]) for m in t.METRICS}
        cell = [f"`{row}`"] + [f"{100 * mean[m]:.1f}" for m in ("recall@10", "recall@100", "recall@500")] + [f"{mean['mrr']:.4f}"]
        for metric, scale, form in (("recall@500", 100, "+.1f"), ("mrr", 1, "+.4f")):
            difference = torch.stack([t.metric_values(ranks[row, s], metric) - t.metric_values(ranks["default", s], metric) for s in seeds]).mean(0)
            low, high = t.paired_interval(difference)
            cell.append("" if row == "default" else f"{scale * float(difference.mean()):{form}} [{scale * low:{form}}, {scale * high:{form}}]")
        print("| " + " | ".join([*cell, str(len(seeds))]) + " |")


if __name__ == "__main__":
    main()
