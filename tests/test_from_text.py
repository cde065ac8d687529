"""Text files to pairs and bank: the test knows each sentence it wrote, and loops over them are the reference."""
import hashlib
import os
import random
import re
import shutil
import subprocess
import sys
import textwrap
import time
import tracemalloc
import types

import numpy as np
import pytest
from conftest import ROOT, SMALL

import make_tiny_pairs

WORDS = "river stone garden winter letter music harbour window silver teacher mountain engine paper island market shadow bridge candle".split()
EMBED = """
import hashlib
import numpy as np

def words(sentences):
    rows = np.zeros((len(sentences), 24), np.float32)
    for row, sentence in zip(rows, sentences):
        for word in sentence.lower().split():
            h = hashlib.md5(word.encode()).digest()
            row[h[0] % 24] += h[1] - 127.5
    return rows

def short(sentences): return words(sentences)[:-1]
def flat(sentences): return words(sentences)[:, 0]
def other(sentences): return words(sentences)[:, :len(sentences)]
def ragged(sentences): return [[1.0] * (i % 2 + 1) for i in range(len(sentences))]
def alike(sentences): return np.ones((len(sentences), 4))
def jitter(sentences): return words(sentences) + np.arange(len(sentences))[:, None]
def nothing(sentences): return None
def nan(sentences): return np.where(np.arange(len(sentences))[:, None] == 3, np.nan, words(sentences))
def zero(sentences): return np.where(np.arange(len(sentences))[:, None] == 3, 0, words(sentences))
def wrong(sentences): raise RuntimeError("out of\\nluck")
number = 5
"""


def reference_vector(sentence):
    row = np.zeros(24)
    for word in sentence.lower().split():
        h = hashlib.md5(word.encode()).digest()
        row[h[0] % 24] += h[1] - 127.5
    return row / np.sqrt((row ** 2).sum())


def write_documents(folder, sizes, seed=0):
    """Files of sentences that the test makes up, hard-wrapped, in paragraphs of a few -> {path: sentences}."""
    rng, documents = random.Random(seed), {}
    folder.mkdir(exist_ok=True)
    for i, size in enumerate(sizes):
        sentences = [f"Document {i} has {' '.join(rng.choices(WORDS, k=rng.randint(3, 25)))} at {j} of them{rng.choice('.!?')}" for j in range(size)]
        path, paragraphs = folder / f"note{i:02}.txt", [sentences[a:a + 4] for a in range(0, size, 4)]
        path.write_text("\n\n".join(textwrap.fill(" ".join(p), 60) for p in paragraphs) + "\n")
        documents[path] = sentences
    return documents


@pytest.fixture
def notes(tmp_path, monkeypatch):
    (tmp_path / "my_embedding.py").write_text(EMBED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield write_documents(tmp_path / "notes", [40, 3, 5, 6, 31, 60, 25, 44, 18, 90, 33, 27, 52, 36, 21])
    sys.modules.pop("my_embedding", None)


def make(*files, model="my_embedding:words", more=("--context", "12")):
    return make_tiny_pairs.main(["--from-text", *map(str, files), "--model", model, "--out", "out", *more])


def document_of_each_row(documents):
    return [i for i, sentences in enumerate(documents.values()) for _ in sentences]


def test_bank_rows_are_the_unit_vectors_of_the_sentences_in_order(notes):
    assert make(*notes, more=["--batch", "7"]) == 0
    expected = [s for sentences in notes.values() for s in sentences]
    assert open("out/sentences.txt").read().split("\n") == [*expected, ""]
    vectors = np.load("out/bank.npz")["vectors"]
    assert vectors.dtype == np.float16 and np.load("out/pairs.npz")["C_val"].shape[1] == 100, "the default context"
    np.testing.assert_allclose(vectors.astype(float), [reference_vector(s) for s in expected], atol=1e-3)


def test_contexts_are_the_sentences_before_the_target_in_its_file(notes):
    assert make(*notes) == 0
    pairs, document = np.load("out/pairs.npz"), document_of_each_row(notes)
    found = {}
    for name in ("train", "val"):
        assert pairs[f"C_{name}"].dtype == pairs[f"T_{name}"].dtype == np.int32
        assert (np.diff(pairs[f"T_{name}"]) > 0).all(), "in the order of the files"
        found |= dict(zip(pairs[f"T_{name}"].tolist(), pairs[f"C_{name}"].tolist()))
    expected = {}
    for row in range(len(document)):
        before = [r for r in range(row) if document[r] == document[row]]
        if len(before) >= 5:
            expected[row] = [-1] * (12 - len(before)) + before[-12:]
    assert found == expected and len(found) == len(pairs["T_train"]) + len(pairs["T_val"])


def test_train_and_validation_share_no_document_not_even_as_a_copy(notes, capsys):
    files = list(notes)
    copies = [shutil.copy(f, f.with_name(f"copy_of_{f.name}")) for f in files]
    for seed in range(8):
        assert make(*files, *copies, files[0], more=["--seed", str(seed)]) == 0
        pairs, document = np.load("out/pairs.npz"), document_of_each_row(notes)
        said = capsys.readouterr().err.splitlines()
        assert len(open("out/sentences.txt").readlines()) == len(document)
        assert len(said) == len(files) + 1 and f"copy_of_note00.txt: has the sentences of {files[0]}, skipped" in said[0]
        train, val = ({document[r] for r in {*pairs[f"T_{name}"], *pairs[f"C_{name}"].ravel()} - {-1}} for name in ("train", "val"))
        assert train and val and not train & val and len(train | val) == 13, "the two short ones have no targets"


def test_equal_sentences_have_equal_rows_whatever_the_batch_did_to_them(notes, tmp_path):
    for (path, sentences), at in zip(list(notes.items())[4:6], (3, 8)):
        sentences[at] = "The same sentence again."
        path.write_text("\n\n".join(sentences))
    assert make(*notes, model="my_embedding:jitter", more=["--batch", "16"]) == 0
    rows, vectors = open("out/sentences.txt").read().splitlines(), np.load("out/bank.npz")["vectors"]
    same = vectors[[i for i, s in enumerate(rows) if s == "The same sentence again."]]
    assert len(same) == 2 and (same[0] == same[1]).all() and len(np.unique(vectors, axis=0)) == len(rows) - 1


def test_a_sentence_that_stands_in_a_training_document_is_no_validation_target(notes, tmp_path, capsys):
    """The shorter document is held out. Of the two sentences in both, one is too early in the other to be a target there, but it is context."""
    documents = write_documents(tmp_path / "same", [30, 40])
    for (path, sentences), both, early in zip(documents.items(), (12, 20), (9, 3)):
        sentences[both], sentences[early] = "This one stands in both of them.", "This one is early in the second."
        path.write_text("\n\n".join(sentences))
    assert make(*documents) == 0 and "1 held out, without 2 targets that stand in training documents too" in capsys.readouterr().out
    pairs, (held_out, other) = np.load("out/pairs.npz"), documents.values()
    rows = [*held_out, *other]
    assert [rows[t] for t in pairs["T_val"]] == [s for s in held_out[5:] if not s.startswith("This one")]
    assert [rows[t] for t in pairs["T_train"]] == other[5:]
    assert (pairs["C_val"][:, -1] == pairs["T_val"] - 1).all()


def test_held_out_documents_are_near_their_share_and_the_seed_chooses_them(tmp_path, notes):
    documents = write_documents(tmp_path / "more", [20 + i % 30 for i in range(60)])
    choices = set()
    for share in (0.1, 0.15, 0.5):
        for seed in (0, 1, 0):
            assert make(*documents, more=["--val-share", str(share), "--seed", str(seed)]) == 0
            pairs = np.load("out/pairs.npz")
            held = len(pairs["T_val"]) / (len(pairs["T_val"]) + len(pairs["T_train"]))
            assert abs(held - share) < 0.02
            choices.add((share, seed, pairs["T_val"].tobytes()))
    assert len(choices) == 6 and len({c[2] for c in choices}) == 6


@pytest.mark.parametrize("share", ["0.001", "0.999"])
def test_each_split_has_a_document_however_few_there_are(notes, share):
    assert make(*list(notes)[4:6], more=["--val-share", share]) == 0
    pairs = np.load("out/pairs.npz")
    assert sorted((len(pairs["T_train"]), len(pairs["T_val"]))) == [26, 55]


SPLITS = {
    "abbreviations": ("Mr. Smith met Dr. J. R. R. Tolkien, e.g. in the U.S. Senate on Jan. 3. He left soon after. See Fig. 3 and No. 5 here. They said so.",
                      ["Mr. Smith met Dr. J. R. R. Tolkien, e.g. in the U.S. Senate on Jan. 3.", "He left soon after.", "See Fig. 3 and No. 5 here.", "They said so."]),
    "a no is a no": ("The answer was no. He did not ask again.", ["The answer was no.", "He did not ask again."]),
    "numbers": ("It rose by 2.5 percent in 1999. Then it fell to 1.4 again.", ["It rose by 2.5 percent in 1999.", "Then it fell to 1.4 again."]),
    "numbered": ("The first is this one. 2. The second is that one.", ["The first is this one.", "2. The second is that one."]),
    "quotes": ('"Stop it right now!" he cried. "I never will," she said. (He had gone by then.) “We know that.” Then came another.',
               ['"Stop it right now!" he cried.', '"I never will," she said.', "(He had gone by then.)", "“We know that.”", "Then came another."]),
    "ellipsis": ("He waited for... something else. And later on… Nothing at all came.", ["He waited for... something else.", "And later on…", "Nothing at all came."]),
    "wrapped lines": ("It is hard-\nwrapped at pre- and\r\npost-war lines. It goes\non here.", ["It is hard-wrapped at pre- and post-war lines.", "It goes on here."]),
    "paragraphs": ("One without an end\n\nAnother without an end\n \t\nAnd the third one", ["One without an end", "Another without an end", "And the third one"]),
    "headings": ("# The First Part\nText follows it.\nThe Second Part\n===============\nMore text here\n#hashtags are text",
                 ["The First Part", "Text follows it.", "The Second Part", "More text here #hashtags are text"]),
    "lists": ("Buy these things:\n- apples and pears\n  of the season\n* bread of yesterday\n1. Go to the market\n2. Come home again",
              ["Buy these things:", "apples and pears of the season", "bread of yesterday", "1. Go to the market", "2. Come home again"]),
    "quotations": ("> She wrote that all\n> of it was lost. So\n> it would be.", ["She wrote that all of it was lost.", "So it would be."]),
    "short pieces": ("Yes. It was there in time. Oh! The others were not.\n\nChapter 1\n\n* * *\n\n12", ["Yes. It was there in time. Oh!", "The others were not."]),
    "fenced code": ("Run this command:\n```\n# make all of it. Now.\n```\nThen wait a while.\n\n# ```\n# ---\n", ["Run this command:", "Then wait a while."]),
    "no spaces": ("这是一个很长的句子，它有很多字。这是另一个很长的句子，它也有很多字！", ["这是一个很长的句子，它有很多字。", "这是另一个很长的句子，它也有很多字！"]),
    "odd line ends": ("A sentence\x85over\u2028several\x0clines of\x1ctext.", ["A sentence over several lines of text."]),
    "nothing": (" \n\n--\n", []),
}


@pytest.mark.parametrize("name", SPLITS)
def test_sentences_end_where_a_reader_ends_them(name):
    text, expected = SPLITS[name]
    assert make_tiny_pairs.split_text(text) == expected


def test_no_text_is_lost_or_made_up_between_the_sentences():
    """Random marks between random words: what is not dropped as too short is the text, in order."""
    rng = random.Random(1)
    for _ in range(300):
        text = " ".join(rng.choice(WORDS + ["Mr", "No", "I", "He", "Yes", "7", "U.S"]) + rng.choice(["", "", ".", "!", "?", "...", '."', ",", ".)"]) for _ in range(80))
        assert " ".join(make_tiny_pairs.split_text("Beginning now. " + text + " the very last one")) == "Beginning now. " + text + " the very last one"


@pytest.mark.parametrize("unit", ["A. ", "x! Y! ", ".", ".\"", "a", "Mr. X ", "- a\n", "> ", "#\n", "-\n", "1. ", "(“'", "Sentence number one is here. "])
def test_a_megabyte_of_anything_is_split_in_seconds(unit):
    began = time.process_time()
    make_tiny_pairs.split_text("Begin" + unit * (1_000_000 // len(unit)) + " end")
    assert time.process_time() - began < 20


def test_memory_does_not_grow_with_the_bank(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text("".join(f"Sentence {j} of the document {i}.\n\n" for j in range(2000)))
    wide = types.ModuleType("wide")
    rng = np.random.default_rng(0)
    wide.encode = lambda sentences: rng.random((len(sentences), 2048), np.float32)
    monkeypatch.setitem(sys.modules, "wide", wide)
    tracemalloc.start()
    try:
        assert make(*(f"{i}.txt" for i in range(20)), model="wide:encode", more=["--batch", "128"]) == 0
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    pairs = np.load("out/pairs.npz")
    assert (pairs["C_train"][:, -1] == pairs["T_train"] - 1).all() and len(pairs["T_train"]) > 30_000
    assert os.path.getsize("out/bank.npz") > 160e6 and peak < 80e6, f"{peak / 1e6:.0f} MB"


def test_trainer_takes_what_the_command_makes(notes, tmp_path):
    files = [str(p.relative_to(tmp_path)) for p in notes]
    made = subprocess.run([sys.executable, str(ROOT / "make_tiny_pairs.py"), "--from-text", *files, "--model", "my_embedding:words", "--out", "out"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0 and not made.stderr, made.stderr
    assert re.search(r"sentences.txt: 491 sentences of 15 documents; \d+ held out, without 0 targets that stand in training documents too", made.stdout)
    done = subprocess.run([sys.executable, str(ROOT / "train_twotower_v4.py"), "--pairs", "out/pairs.npz", "--bank", "out/bank.npz", "--dry-run", *SMALL],
                          cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir("out")) == ["bank.npz", "pairs.npz", "sentences.txt"]


# what goes wrong -----------------------------------------------------------------------------------------------------

def test_files_without_text_are_named_and_skipped_and_bad_bytes_replaced(notes, tmp_path, capsys):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "rule.txt").write_text("\n---\n\n12\n")
    (tmp_path / "latin.txt").write_bytes(b"\xef\xbb\xbfThe caf\xe9 opened late today.\n")
    assert make("empty.txt", *notes, "rule.txt", "latin.txt") == 0
    assert capsys.readouterr().err.splitlines() == ["make_tiny_pairs: empty.txt: has no sentences, skipped", "make_tiny_pairs: rule.txt: has no sentences, skipped",
                                                    "make_tiny_pairs: latin.txt: 1 characters can't be read as UTF-8, replaced"]
    assert open("out/sentences.txt").read().splitlines()[-1] == "The caf\ufffd opened late today."


BAD = {
    "no model": ("", [], [], "--from-text needs --model"),
    "no such folder": ("models/none", [], [], "--model models/none: no such folder"),
    "no such module": ("no_such_module:encode", [], [], "No module named 'no_such_module'"),
    "no such callable": ("my_embedding:absent", [], [], "has no attribute 'absent'"),
    "module that fails": ("broken:encode", [], [], "--model broken:encode: ZeroDivisionError"),
    "not callable": ("my_embedding:number", [], [], "'int' object is not callable"),
    "callable that fails": ("my_embedding:wrong", [], [], "--model my_embedding:wrong: RuntimeError in"),
    "too few rows": ("my_embedding:short", [], [], "gave (511, 24) for 512 sentences"),
    "one dimension": ("my_embedding:flat", [], ["--batch", "24"], "gave (24,) for 24 sentences"),
    "another D": ("my_embedding:other", [], ["--batch", "20"], "gave (18, 18) for 18 sentences"),
    "ragged": ("my_embedding:ragged", [], [], "ValueError in"),
    "nothing": ("my_embedding:nothing", [], [], "gave"),
    "NaN": ("my_embedding:nan", [], [], "gave NaN or Inf for sentence 3: 'Document 0 has"),
    "zeros": ("my_embedding:zero", [], [], "gave only zeros for sentence 3: 'Document 0 has"),
    "missing file": ("my_embedding:words", ["absent.txt"], [], "absent.txt: No such file"),
    "folder as a file": ("my_embedding:words", ["notes"], [], "notes: Is a directory"),
    "no text": ("my_embedding:words", ["binary.txt"], [], "binary.txt: has zero bytes"),
    "--batch 0": ("my_embedding:words", [], ["--batch", "0"], "--batch is 0"),
    "--context 0": ("my_embedding:words", [], ["--context", "0"], "--context is 0"),
    "--val-share 1": ("my_embedding:words", [], ["--val-share", "1"], "--val-share must be"),
    "--out in a file": ("my_embedding:words", [], ["--out", "binary.txt/out"], "Not a directory"),
    "no package": ("notes", [], [], "pip install sentence-transformers, or give module:callable"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_one_line_and_nothing_is_left_behind(name, notes, tmp_path, monkeypatch, capsys):
    model, files, flags, expected = BAD[name]
    (tmp_path / "binary.txt").write_bytes(b"PK\0\0")
    (tmp_path / "broken.py").write_text("1 / 0")
    write_documents(tmp_path / "notes", [49] * 22)                                       # 1,078 sentences: more than two batches
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)                      # as if it were not installed
    assert make(*sorted((tmp_path / "notes").iterdir()), *files, model=model, more=flags) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("make_tiny_pairs: ") and expected in lines[0], lines
    assert not os.path.exists("out") or not os.listdir("out")


@pytest.mark.parametrize("sizes", [[30], [30, 5], [4, 5, 1]])
def test_too_few_documents_to_hold_one_out_is_one_line(sizes, notes, tmp_path, capsys):
    assert make(*write_documents(tmp_path / "few", sizes)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "expected at least 2" in lines[0] and not os.path.exists("out")


def test_vectors_that_are_all_alike_are_refused(notes, capsys):
    assert make(*notes, model="my_embedding:alike") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "each target held out equals a sentence to train on" in lines[0] and not os.path.exists("out/pairs.npz")


def test_a_folder_is_a_sentence_transformers_model(notes, tmp_path, monkeypatch, capsys):
    """The package is not among the test tools: a stand-in with its interface shows what it is asked."""
    class SentenceTransformer:
        def __init__(self, path):
            if not os.listdir(path):
                raise ValueError(f"no model in {path}\nlong advice")

        def encode(self, sentences, show_progress_bar):
            return np.array([reference_vector(s) for s in sentences])
    monkeypatch.setitem(sys.modules, "sentence_transformers", types.SimpleNamespace(SentenceTransformer=SentenceTransformer))
    (tmp_path / "model").mkdir()
    assert make(*notes, model="model") == 2
    assert capsys.readouterr().err == "make_tiny_pairs: --model model: no sentence-transformers model: no model in model long advice\n"
    (tmp_path / "model" / "config.json").write_text("{}")
    assert make(*notes, model="model") == 0
    expected = [reference_vector(s) for sentences in notes.values() for s in sentences]
    np.testing.assert_allclose(np.load("out/bank.npz")["vectors"].astype(float), expected, atol=1e-3)
