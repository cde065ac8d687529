"""Opening data: mapped in place, checked, grouped; bad input gets one line and exit code 2."""
import io
import os
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from conftest import ROOT, SMALL

import make_tiny_pairs
import train_twotower_v4 as T


def vectors(n, D, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal((n, D)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64])
def test_mapped_arrays_equal_numpy_load(tmp_path, dtype):
    arrays = {"a": vectors(7, 5).astype(dtype),
              "long_name_" * 6: vectors(3, 2).astype(dtype), "f": np.asfortranarray(vectors(4, 6)).astype(dtype), "e": np.empty((0, 3), dtype)}
    np.savez(tmp_path / "x.npz", **arrays)
    mapped, path = T.open_npz(tmp_path / "x.npz")
    assert path == tmp_path / "x.npz" and all(isinstance(mapped[k], np.memmap) for k in arrays if k != "e")
    for name, array in np.load(tmp_path / "x.npz").items():
        np.testing.assert_array_equal(mapped[name], array)


def test_compressed_file_is_unpacked_once_and_again_only_when_it_changes(tmp_path):
    path = tmp_path / "x.npz"
    np.savez_compressed(path, vectors=vectors(50, 8))
    first, where = T.open_npz(path)
    np.testing.assert_array_equal(first["vectors"], vectors(50, 8))
    written = os.stat(where).st_mtime_ns
    assert T.open_npz(path)[1] == where and os.stat(where).st_mtime_ns == written
    np.savez_compressed(path, vectors=vectors(50, 8, seed=1))
    again, where_again = T.open_npz(path)
    np.testing.assert_array_equal(again["vectors"], vectors(50, 8, seed=1))
    assert where_again != where and not where.exists()


def test_zip_bomb_is_refused_before_it_is_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as z, z.open("vectors.npy", "w", force_zip64=True) as f:
        np.lib.format.write_array_header_1_0(f, {"descr": "<f4", "fortran_order": False, "shape": (2 ** 16, 1024)})
        for _ in range(256):
            f.write(bytes(2 ** 20))
    with pytest.raises(T.UserError, match="zip bomb"):
        T.open_npz(tmp_path / "bomb.npz")
    assert os.listdir(tmp_path) == ["bomb.npz"]


def mapped_mb():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("RssFile")) / 1024


def test_large_pairs_file_opens_without_being_read_or_copied(tmp_path):
    path, D = tmp_path / "pairs.npz", 768
    bank = vectors(64, D)
    np.savez(tmp_path / "bank.npz", vectors=bank)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as z:
        for name, array in (("Y_train", bank[np.arange(10_000) % 64]), ("X_val", bank[None, :5]), ("Y_val", bank[5:6])):
            buffer = io.BytesIO()
            np.save(buffer, array)
            z.writestr(f"{name}.npy", buffer.getvalue())
        with z.open("X_train.npy", "w", force_zip64=True) as f:
            np.lib.format.write_array_header_1_0(f, {"descr": "<f4", "fortran_order": False, "shape": (10_000, 100, D)})
            block = np.ascontiguousarray(np.broadcast_to(bank[0], (100, 100, D)))
            for _ in range(100):
                f.write(block)
    assert os.path.getsize(path) > 3e9
    private, mapped = T.private_mb(), mapped_mb()
    arrays, _ = T.open_npz(path)
    split = T.Split(path, "train", arrays, T.Bank(tmp_path / "bank.npz"))
    assert T.private_mb() - private < 64 and mapped_mb() - mapped < 300, "of 3.1 GB, only a sample is looked at"
    np.testing.assert_array_equal(split[[9_999]][0, 0], bank[0])
    assert split.rows[70] == 6


def test_groups_and_lookup_equal_brute_force():
    rng = np.random.default_rng(3)
    for dtype in (np.float32, np.float16):
        base = vectors(40, 9, dtype=dtype)
        rows = rng.integers(40, size=200)
        bank = object.__new__(T.Bank)
        data = base[rows]
        data[rows == 0] *= -1
        data[5], data[6] = 0.0, -0.0                                      # equal values, other bits
        bank.keys, bank.first, inverse = np.unique(T.row_keys(data), return_index=True, return_inverse=True)
        expected = [next(j for j in range(200) if (data[j] == data[i]).all()) for i in range(200)]
        assert bank.first[inverse].tolist() == expected
        queries = np.concatenate([data[::7].astype(np.float32), vectors(5, 9, seed=9)])
        assert bank.find(queries).tolist() == expected[::7] + [-1] * 5


def test_unmatched_dense_targets_find_their_near_duplicate_or_stand_alone(tmp_path, lab):
    bank = np.load(lab.bank)["vectors"]
    pairs = dict(np.load(lab.pairs))
    arrays = {}
    for name in ("train", "val"):
        C, Y = pairs[f"C_{name}"], bank[pairs[f"T_{name}"]].copy()
        Y[0], Y[1] = Y[0] * 1.7 + 1e-4, vectors(1, 16, seed=5)[0]         # a near-duplicate, and a document the bank lacks
        arrays |= {f"X_{name}": np.where(C[..., None] >= 0, bank[C], 0).astype(np.float32), f"Y_{name}": Y}
    np.savez(tmp_path / "dense.npz", **arrays)
    cfg = T.make_config({"pairs": str(tmp_path / "dense.npz"), "bank": str(lab.bank)})
    train, _ = T.open_data(cfg)
    assert (train.rows[:2] == -1).all() and (train.rows[2:] == pairs["T_train"][2:]).all()
    (tmp_path / "run").mkdir()
    for again in (False, True):                                           # the second time from the cache, without a search
        run = T.Run(None, cfg, "cpu")
        run.folder = tmp_path / ("run" if not again else "no such folder")
        train, _ = T.open_data(cfg)
        T.resolve_targets(train, cfg, run)
        assert train.rows[0] == pairs["T_train"][0] and train.rows[1] == -1 and train.groups[1] == len(bank) + 1


# bad input ---------------------------------------------------------------------------------------------------------

def save(path, **arrays):
    np.savez(path, **arrays)
    return path


def good():
    bank = vectors(30, 6)
    return bank, {"X_train": bank[np.arange(20)[:, None] + np.arange(3)], "Y_train": bank[3:23], "X_val": bank[None, 24:27], "Y_val": bank[27:28]}


def with_fault(array, at, value):
    array = array.copy()
    array[at] = value
    return array


def indexed(**changes):
    return {"C_train": np.arange(60).reshape(20, 3) % 30, "T_train": np.arange(20), "C_val": np.array([[1, 2, 3]]), "T_val": np.array([4])} | changes


BAD = {
    "missing pairs file": (lambda d, p: os.remove(p), {}, "No such file"),
    "missing key": (lambda d, p: save(p, X_train=d["X_train"], Y_train=d["Y_train"], X_val=d["X_val"]), {}, "no key 'Y_val'"),
    "truncated": (lambda d, p: p.write_bytes(p.read_bytes()[:-100]), {}, "not a whole NPZ"),
    "garbage": (lambda d, p: p.write_bytes(os.urandom(5000)), {}, "not a whole NPZ"),
    "empty file": (lambda d, p: p.write_bytes(b""), {}, "not a whole NPZ"),
    "wrong rank": (lambda d, p: save(p, **d | {"X_train": d["X_train"][:, 0]}), {}, "X_train is (20, 6), expected (N, L, D)"),
    "wrong dtype": (lambda d, p: save(p, **d | {"Y_train": d["Y_train"].astype(np.float64)}), {}, "Y_train is float64"),
    "wrong D": (lambda d, p: save(p, **d | {"Y_train": d["Y_train"][:, :5]}), {}, "Y_train has D = 5, the bank has D = 6"),
    "other lengths": (lambda d, p: save(p, **d | {"Y_train": d["Y_train"][:9]}), {}, "X_train has 20 rows, Y_train has 9"),
    "pickled objects": (lambda d, p: save(p, **d | {"Y_val": np.array([{}], dtype=object)}), {}, "Y_val holds pickled"),
    "NaN row": (lambda d, p: save(p, **d | {"X_train": with_fault(d["X_train"], (7, 1), np.nan)}), {}, "X_train has NaN or Inf in rows [7]"),
    "Inf target": (lambda d, p: save(p, **d | {"Y_val": with_fault(d["Y_val"], (0, 2), np.inf)}), {}, "Y_val has NaN or Inf in rows [0]"),
    "zero target": (lambda d, p: save(p, **d | {"Y_train": with_fault(d["Y_train"], 11, 0)}), {}, "Y_train has only zeros in rows [11]"),
    "empty context": (lambda d, p: save(p, **d | {"X_train": with_fault(d["X_train"], 13, 0)}), {}, "X_train has only zeros in rows [13]"),
    "no pairs": (lambda d, p: save(p, **d | {"X_val": d["X_val"][:0], "Y_val": d["Y_val"][:0]}), {}, "X_val is (0, 3, 6): it has no rows"),
    "context row out of range": (lambda d, p: save(p, **indexed(C_train=with_fault(indexed()["C_train"], (8, 2), 30))), {}, "C_train row 8 names a document outside"),
    "negative target": (lambda d, p: save(p, **indexed(T_train=with_fault(indexed()["T_train"], 5, -1))), {}, "T_train row 5 names a document outside"),
    "only padding": (lambda d, p: save(p, **indexed(C_val=np.array([[-1, -1, -1]]))), {}, "C_val row 0 has no context"),
    "float rows": (lambda d, p: save(p, **indexed(T_val=np.array([4.0]))), {}, "T_val is float64, expected integers"),
    "damaged inside": (lambda d, p: damage(d, p), {}, "damaged inside"),
    "bank without vectors": (lambda d, p: save(p.with_name("bank.npz"), docs=d["Y_train"]), {}, "no key 'vectors', only ['docs']"),
    "bank NaN": (lambda d, p: save(p.with_name("bank.npz"), vectors=with_fault(vectors(30, 6), 29, np.nan)), {}, "vectors has NaN or Inf in rows [29]"),
    "bank zero row": (lambda d, p: save(p.with_name("bank.npz"), vectors=with_fault(vectors(30, 6), 4, 0)), {}, "vectors has only zeros in rows [4]"),
    "bank is a folder": (lambda d, p: (p.with_name("bank.npz").unlink(), p.with_name("bank.npz").mkdir()), {}, "Is a directory"),
    "schedule with a gap": (None, {"--mine-schedule": "1-2:none;4-9:8@r1-9"}, "gap"),
    "--bs 0": (None, {"--bs": "0"}, "--bs is 0, expected at least 1"),
    "--accum 0": (None, {"--accum": "0"}, "--accum is 0, expected at least 1"),
    "--tau nan": (None, {"--tau": "nan"}, "--tau is nan"),
    "--lr text": (None, {"--lr": "fast"}, "--lr: invalid float value"),
    "unwritable --out": (None, {"--out": "pairs.npz/run"}, "Not a directory"),
    "missing --resume": (None, {"--resume": "runs/none"}, "--resume runs/none: there is no checkpoint"),
}


def damage(data, path):
    np.savez_compressed(path, **data)
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_line_and_exit_code_2(name, tmp_path, capsys, monkeypatch):
    change, flags, expected = BAD[name]
    bank, arrays = good()
    save(tmp_path / "bank.npz", vectors=bank)
    save(tmp_path / "pairs.npz", **arrays)
    if change:
        change(arrays, tmp_path / "pairs.npz")
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir(tmp_path))
    given = {"--pairs": "pairs.npz", "--bank": "bank.npz", "--out": "run"} | flags
    code = T.main([x for pair in given.items() for x in pair] + ["--log-dir", "none"])
    lines = capsys.readouterr().err.strip().splitlines()
    assert code == 2 and len(lines) == 1 and lines[0].startswith("train: ") and expected in lines[0], lines
    assert sorted(os.listdir(tmp_path)) == before, "bad input must leave nothing behind"


def test_large_files_are_checked_in_a_sample(tmp_path, monkeypatch):
    bank, arrays = good()
    monkeypatch.setattr(T, "SCAN_LIMIT", 0)
    save(tmp_path / "pairs.npz", **arrays | {"X_train": with_fault(arrays["X_train"], 0, np.nan)})
    save(tmp_path / "bank.npz", vectors=bank)
    with pytest.raises(T.UserError, match=r"rows \[0\]"):                 # row 0 is in the sample
        T.Split(tmp_path / "pairs.npz", "train", T.open_npz(tmp_path / "pairs.npz")[0], T.Bank(tmp_path / "bank.npz"))


# make_tiny_pairs ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("form", ["indexed", "dense"])
def test_cut_takes_the_first_rows_of_each_array(tmp_path, form, lab):
    assert make_tiny_pairs.main(["--out", str(tmp_path / "d"), "--form", form, *lab.make]) == 0
    assert make_tiny_pairs.main(["--from", str(tmp_path / "d" / "pairs.npz"), "--n", "17", "--out", str(tmp_path / "cut.npz")]) == 0
    whole, cut = np.load(tmp_path / "d" / "pairs.npz"), np.load(tmp_path / "cut.npz")
    assert set(whole) == set(cut) and len(whole) == 4
    for name in whole:
        np.testing.assert_array_equal(cut[name], whole[name][:17])


def test_synthetic_splits_share_no_document(lab):
    pairs = np.load(lab.pairs)
    train = set(pairs["C_train"].ravel()) | set(pairs["T_train"])
    val = set(pairs["C_val"].ravel()) | set(pairs["T_val"])
    assert train & val == {-1}
    assert (pairs["T_train"] == pairs["C_train"][:, -1] + 1).all()


def test_index_gives_the_rows_back_also_where_vectors_repeat(tmp_path, lab, capsys):
    """Row 7 stands again at row 300; a run of equal rows follows it. Neighbours decide which one is meant."""
    bank, pairs = np.load(lab.bank)["vectors"].astype(np.float16), dict(np.load(lab.pairs))
    C, target = pairs["C_train"], pairs["T_train"]
    again = C[100, -3]                                                    # in mid-context of a training pair
    bank[again], bank[target[40]], bank[C[60, -1]] = bank[3], bank[5], bank[again]
    dense = {}
    for name in ("train", "val"):
        rows = pairs[f"C_{name}"]
        dense |= {f"X_{name}": np.where(rows[..., None] >= 0, bank[rows], 0).astype(np.float32), f"Y_{name}": bank[pairs[f"T_{name}"]].astype(np.float32)}
    dense["X_val"][2, -4] += 0.25                                         # equals no row
    dense["Y_val"][3] += 0.25
    np.savez(tmp_path / "dense.npz", **dense)
    np.savez(tmp_path / "bank.npz", vectors=bank)
    assert make_tiny_pairs.main(["--index", str(tmp_path / "dense.npz"), "--bank", str(tmp_path / "bank.npz"), "--out", str(tmp_path / "back.npz")]) == 0
    said, back = capsys.readouterr().out, np.load(tmp_path / "back.npz")
    np.testing.assert_array_equal(back["C_train"], C)
    np.testing.assert_array_equal(back["T_train"], target)
    kept = np.arange(len(pairs["T_val"])) != 3
    expected = pairs["C_val"].copy()
    expected[2, -4] = -1
    np.testing.assert_array_equal(back["C_val"], expected[kept])
    np.testing.assert_array_equal(back["T_val"], pairs["T_val"][kept])
    assert "1 context rows had no match" in said and "1 targets had no match" in said


@pytest.mark.parametrize("flags, expected", [(["--from", "none.npz"], "none.npz: No such file"), (["--index", "x.npz"], "needs --bank"), (["--n", "0"], "--n is 0")])
def test_make_tiny_pairs_says_what_is_wrong_in_one_line(flags, expected, tmp_path, capsys):
    assert make_tiny_pairs.main([*flags, "--out", str(tmp_path / "o.npz")]) == 2
    assert expected in capsys.readouterr().err.strip() and not os.listdir(tmp_path)


# two forms, one result ---------------------------------------------------------------------------------------------

def losses(lab, *flags):
    done = lab.train(*flags)
    assert done.returncode == 0, done.stderr
    return [e["loss"] for e in lab.events(flags[flags.index("--out") + 1], "step")]


def test_dense_and_indexed_forms_train_to_the_same_losses(lab):
    made = [sys.executable, str(ROOT / "make_tiny_pairs.py"), "--out", "dense", "--form", "dense", *lab.make]
    subprocess.run(made, cwd=lab.folder, check=True, capture_output=True)
    one = losses(lab, "--keep-context", "--out", "form/indexed")
    two = losses(lab, "--pairs", "dense/pairs.npz", "--bank", "dense/bank.npz", "--out", "form/dense")
    masked = losses(lab, "--out", "form/masked")
    assert one == two and len(one) == 20
    assert masked != one, "context rows must be masked where they are known"
    assert "--keep-context" not in SMALL
