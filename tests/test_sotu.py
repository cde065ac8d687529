"""On real sentence embeddings: both forms, one result. Needs the data set beside the project."""
import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

SOTU = ROOT.parent / "shared" / "data" / "sotu"
pytestmark = pytest.mark.skipif(not SOTU.exists(), reason="the real data set ../shared/data/sotu is not beside this checkout")
FEW = ["--precision", "fp32", "--epochs", "1", "--max-steps", "3", "--hidden-dim", "32", "--no-mining", "--eval-queries", "50", "--log-dir", "none"]


def train(folder, *flags):
    done = subprocess.run([sys.executable, str(ROOT / "train_twotower_v4.py"), *map(str, flags), *FEW], cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    out = folder / flags[flags.index("--out") + 1]
    return [e["loss"] for e in map(json.loads, open(out / "events.jsonl")) if e["event"] == "step"]


def test_real_pairs_train_alike_in_both_forms_and_index_gives_the_rows_back(tmp_path):
    bank, pairs = np.load(SOTU / "bank.npz")["vectors"], np.load(SOTU / "pairs.npz")
    dense = {}
    for name, n in (("train", len(pairs["T_train"]) // 4), ("val", 400)):
        C = pairs[f"C_{name}"][:n]
        dense |= {f"X_{name}": np.where(C[..., None] >= 0, bank[C], 0).astype(np.float32), f"Y_{name}": bank[pairs[f"T_{name}"][:n]].astype(np.float32)}
    np.savez(tmp_path / "dense.npz", **dense)
    indexed = {k: pairs[k][:len(dense[f"Y_{k[2:]}"])] for k in pairs}
    np.savez(tmp_path / "indexed.npz", **indexed)
    one = train(tmp_path, "--pairs", "indexed.npz", "--bank", SOTU / "bank.npz", "--out", "one", "--keep-context")
    two = train(tmp_path, "--pairs", "dense.npz", "--bank", SOTU / "bank.npz", "--out", "two")
    assert one == two and len(one) == 3
    done = subprocess.run([sys.executable, str(ROOT / "make_tiny_pairs.py"), "--index", "dense.npz", "--bank", str(SOTU / "bank.npz"), "--out", "back.npz"],
                          cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    back = np.load(tmp_path / "back.npz")
    for name, array in indexed.items():
        np.testing.assert_array_equal(back[name], array)
