#!/usr/bin/env python3
"""Data for the trainer: your texts, the first rows of a real file, synthetic pairs with something to learn, or a dense file indexed.

    python make_tiny_pairs.py --from-text notes/*.txt --model models/all-MiniLM-L6-v2 --out artifacts/notes
    python make_tiny_pairs.py --from pairs.npz --n 100 --out pairs_tiny.npz
    python make_tiny_pairs.py --out artifacts/demo
    python make_tiny_pairs.py --index pairs.npz --bank bank.npz --out pairs_indexed.npz

Exit codes: 0 done; 2 something the user can mend, said in one line.
"""
import argparse
import collections
import importlib
import itertools
import os
import re
import sys
import traceback
import zipfile
from pathlib import Path

import numpy as np
from tqdm import tqdm

Pieces = collections.namedtuple("Pieces", "shape dtype blocks")                      # an array that is made while it is written


def write_npz(path, arrays):
    """Stream arrays, or Pieces of one, into an uncompressed NPZ that appears whole or not at all."""
    def write(f):
        with zipfile.ZipFile(f, "w", zipfile.ZIP_STORED) as out:
            for name, array in arrays.items():
                with out.open(f"{name}.npy", "w", force_zip64=True) as member:
                    if not isinstance(array, Pieces):
                        np.lib.format.write_array(member, np.ascontiguousarray(array))
                        continue
                    header = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": array.shape}
                    np.lib.format.write_array_header_1_0(member, header)
                    for block in array.blocks:
                        member.write(np.ascontiguousarray(block, array.dtype))
    write_file(path, write)
    print(f"{path}: " + ", ".join(f"{name} {array.shape} {array.dtype}" for name, array in arrays.items()))


def write_file(path, data):
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        trainer.Disk.replace(path, data)
    except OSError as e:
        raise trainer.UserError(f"{path}: {e.strerror}") from None


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


# -----------------------------------------------------------------------------
# texts: sentences in order, one document a file; each is a row of the bank, the ones before it are its context

MIN_CONTEXT = 5                                                                      # sentences before the first target of a document
MIN_LETTERS = 10                                                                     # a shorter piece is no sentence of its own
ABBREVIATIONS = set("mr mrs ms dr prof st rev hon gen col capt lt sgt sen rep gov messrs jr sr vs cf viz eg ie approx dept ed eds inc ltd "
                    "jan feb mar apr jun jul aug sep sept oct nov dec".split())
BEFORE_NUMBER = set("no nos p pp vol vols ch chap sec sect art fig figs eq ver v".split())      # "No. 5", but "No. He left."
SENTENCE_END = re.compile(r"""(?<![.!?…])(?P<mark>[.!?…]+)["'”’»)\]*_]*\s+(?=["'“‘«(\[*_]*(?P<next>[^\s"'“‘«(\[*_]))|(?P<wide>[。！？]+[」』”’]*)\s*""")
BLOCK_START = re.compile(r"#{1,6}\s+|[-*+•]\s+|(?=\(?\d{1,2}[.)]\s)")                   # a heading or a list item, within a paragraph too


def split_text(text):
    """A text -> its sentences in order. A blank line, a heading or a list item ends a sentence; the end of a line does not."""
    return [sentence for block in blocks_of(text) for sentence in join_short(split_block(block))]


def blocks_of(text):
    """Paragraphs, headings and list items, each on one line, without their Markdown; fenced code is left out."""
    block, fenced = [], False
    for line in [*text.splitlines(), ""]:
        line = re.sub(r"^[>\s]+", "", line)                                          # a quotation's mark, an indent
        fence = line.startswith("```")
        fenced ^= fence
        start = BLOCK_START.match(line)
        rule = fence or fenced or not any(map(str.isalnum, line))                    # blank, code, or ---- under a heading
        if block and (start or rule):
            yield re.sub(r"(?<=\w-)\n(?=[a-z])", "", "\n".join(block)).replace("\n", " ")
            block = []
        if not rule:
            block.append(" ".join(line[start.end() if start else 0:].split()))
        if block and start and start[0].startswith("#"):
            yield block.pop()


def split_block(block):
    """One line of text -> pieces that end where a sentence does."""
    start = 0
    for m in SENTENCE_END.finditer(block):
        if m["mark"] == "." and is_abbreviation(block[max(start, m.start() - 40):m.start()], m["next"]) or m["mark"] and m["next"].islower():
            continue
        yield block[start:m.end()].strip()
        start = m.end()
    if start < len(block):
        yield block[start:].strip()


def is_abbreviation(before, after):
    """Whether the full stop between these two belongs to the word before it: Mr. | e.g. | J. R. R. | No. 5 | 3. as a number in front."""
    word = re.split(r"[\s(\[“‘\"'—-]", before)[-1].lower()
    return (word in ABBREVIATIONS or re.fullmatch(r"(\w\.)*[^\W\d]", word) or word in BEFORE_NUMBER and after.isdigit()
            or before.strip().isdigit())


def join_short(pieces):
    """Pieces with few letters go to the sentence before them, or after them at the start; a block of nothing else is dropped."""
    sentences = []
    for piece in pieces:
        if sentences and len(sentences[-1]) < 300 and (letters(piece) < MIN_LETTERS or letters(sentences[-1]) < MIN_LETTERS):
            sentences[-1] += " " + piece
        else:
            sentences.append(piece)
    return [s for s in sentences if letters(s) >= MIN_LETTERS]


def letters(text):
    return sum(map(str.isalpha, text))


def say(message):
    print(f"make_tiny_pairs: {message}", file=sys.stderr)


def read_documents(paths):
    """Files -> one list of sentences for each that has some; a copy of another one would be in both splits, so it is left out."""
    seen = {}
    for path in paths:
        try:
            data = Path(path).read_bytes()
        except OSError as e:
            raise trainer.UserError(f"{path}: {e.strerror}") from None
        if b"\0" in data:
            raise trainer.UserError(f"{path}: has zero bytes, so it is no UTF-8 text; convert it, or leave it out")
        text = data.decode("utf-8-sig", errors="replace")
        sentences, replaced = tuple(split_text(text)), text.count("\ufffd")
        if replaced:
            say(f"{path}: {replaced:,} characters can't be read as UTF-8, replaced")
        if not sentences or sentences in seen:
            say(f"{path}: has {f'the sentences of {seen[sentences]}' if sentences else 'no sentences'}, skipped")
        else:
            seen[sentences] = path
    return list(seen)


def hold_out(documents, share, rng):
    """Spans of bank rows -> those to train on and those held out: whole documents at random that fit into the share, the shortest if none does."""
    sizes = [stop - start for start, stop in documents]
    room, chosen = share * sum(sizes), set()
    for i in rng.permutation(len(documents)):
        if sizes[i] <= room:
            room -= sizes[i]
            chosen.add(i)
    chosen = chosen or {int(np.argmin(sizes))}
    return [d for i, d in enumerate(documents) if i not in chosen], [d for i, d in enumerate(documents) if i in chosen]


def load_encoder(model):
    """--model -> a function from a list of strings to (n, D) vectors."""
    if Path(model).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")                                 # a folder holds all of its model: nothing is fetched
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        try:
            from sentence_transformers import SentenceTransformer
            encoder = SentenceTransformer(model)
        except ImportError as e:
            raise trainer.UserError(f"--model {model}: {e}; pip install sentence-transformers, or give module:callable") from None
        except Exception as e:                                                       # the library has no error class of its own
            raise trainer.UserError(f"--model {model}: no sentence-transformers model: {' '.join(str(e).split())}") from None
        return lambda sentences: encoder.encode(sentences, show_progress_bar=False)
    module, _, name = model.partition(":")
    if not name:
        raise trainer.UserError(f"--model {model}: no such folder; give a sentence-transformers model, or module:callable")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as e:                                                           # someone else's code
        raise trainer.UserError(f"--model {model}: {type(e).__name__}: {e}") from None


def embed(sentences, encode, model, batch):
    """Blocks (n, D) of unit rows in float16; what the model returns is checked first. Equal sentences get equal rows."""
    D, first_row = None, {s: None for s, n in collections.Counter(sentences).items() if n > 1}
    with tqdm(total=len(sentences), unit=" sentences", desc="embedding", disable=not sys.stderr.isatty()) as bar:
        for a, b in trainer.spans(len(sentences), batch):
            try:
                rows = np.asarray(encode(sentences[a:b]), np.float64)
            except Exception as e:                                                   # someone else's code: say where it failed
                at = traceback.extract_tb(e.__traceback__)[-1]
                raise trainer.UserError(f"--model {model}: {type(e).__name__} in {at.filename}:{at.lineno}: {' '.join(str(e).split())}") from None
            D = D or rows.shape[-1:]
            if rows.shape != (b - a, *D) or 0 in rows.shape:
                raise trainer.UserError(f"--model {model}: gave {rows.shape} for {b - a} sentences, expected ({b - a}, D) with the same D each time")
            norms = np.linalg.norm(rows, axis=1)                                     # (n,)
            for what, bad in (("NaN or Inf", ~np.isfinite(norms)), ("only zeros", norms == 0)):
                if bad.any():
                    i = int(np.argmax(bad))
                    raise trainer.UserError(f"--model {model}: gave {what} for sentence {a + i}: {sentences[a + i][:60]!r}")
            rows = (rows / norms[:, None]).astype(np.float16)
            for i in (i for i in range(a, b) if sentences[i] in first_row):          # in another batch a model rounds differently
                if first_row[sentences[i]] is None:
                    first_row[sentences[i]] = rows[i - a].copy()
                rows[i - a] = first_row[sentences[i]]
            yield rows
            bar.update(b - a)


def targets_of(documents):
    """Spans of bank rows -> each target (N,), and where its document starts (N,)."""
    targets = [np.arange(start + MIN_CONTEXT, stop) for start, stop in documents]
    return np.concatenate(targets), np.repeat([start for start, _ in documents], [len(t) for t in targets])


def contexts(targets, starts, L):
    """Blocks (n, L) of the rows before each target, -1 in front of its document."""
    for a, b in trainer.spans(len(targets), 4096):
        rows = targets[a:b, None] + np.arange(-L, 0)
        yield np.where(rows >= starts[a:b, None], rows, -1)


def make_from_text(args):
    if not args.model:
        raise trainer.UserError("--from-text needs --model: the folder of a sentence-transformers model, or module:callable that gives (n, D) for n strings")
    texts = read_documents(args.from_text)
    sentences = list(itertools.chain.from_iterable(texts))
    stops = np.cumsum([len(text) for text in texts]).tolist()
    documents = [(stop - len(text), stop) for text, stop in zip(texts, stops) if len(text) > MIN_CONTEXT]
    if len(documents) < 2:
        raise trainer.UserError(f"--from-text: of {len(args.from_text)} files {len(documents)} have more than {MIN_CONTEXT} sentences, expected at least 2: "
                                "one to train on, one held out")
    train, val = hold_out(documents, args.val_share, np.random.default_rng(args.seed))
    blocks = embed(sentences, load_encoder(args.model), args.model, args.batch)
    first = next(blocks)
    write_npz(Path(args.out) / "bank.npz", {"vectors": Pieces((len(sentences), first.shape[1]), np.dtype(np.float16), itertools.chain([first], blocks))})
    groups = trainer.Bank(Path(args.out) / "bank.npz").groups
    (train_targets, train_starts), (targets, starts) = targets_of(train), targets_of(val)
    seen = np.concatenate([groups[start:stop] for start, stop in train])
    fresh = ~np.isin(groups[targets], seen)                                          # what stands in a training document is no test
    if not fresh.any():
        raise trainer.UserError(f"{args.out}: each target held out equals a sentence to train on; are these different documents?")
    arrays = {}
    for name, T, first in (("train", train_targets, train_starts), ("val", targets[fresh], starts[fresh])):
        arrays |= {f"C_{name}": Pieces((len(T), args.context), np.dtype(np.int32), contexts(T, first, args.context)), f"T_{name}": T.astype(np.int32)}
    write_npz(Path(args.out) / "pairs.npz", arrays)
    write_file(Path(args.out) / "sentences.txt", "".join(f"{s}\n" for s in sentences).encode())
    print(f"{Path(args.out) / 'sentences.txt'}: {len(sentences):,} sentences of {len(texts):,} documents; {len(val):,} held out, "
          f"without {int((~fresh).sum()):,} targets that stand in training documents too")


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--from-text", nargs="+", metavar="FILE", help="text files, one document each, to make pairs of; needs --model; none = synthetic data")
    what.add_argument("--from", dest="source", metavar="NPZ", help="pairs file, dense or indexed, to take the first rows of; none = synthetic data")
    what.add_argument("--index", metavar="NPZ", help="dense pairs file to turn into the indexed form; needs --bank")
    parser.add_argument("--out", required=True, help="NPZ to write; for texts and synthetic data the folder of pairs.npz and bank.npz")
    parser.add_argument("--n", type=int, default=100, help="rows of each array to take with --from [%(default)s]")
    parser.add_argument("--bank", metavar="NPZ", help="bank of --index")
    text = parser.add_argument_group("texts")
    text.add_argument("--model", help="what turns sentences into vectors: a sentence-transformers folder, or module:callable; no default")
    text.add_argument("--batch", type=int, default=512, help="sentences given to the model at a time [%(default)s]")
    made = parser.add_argument_group("synthetic data", "--context, --seed and --val-share are for texts too")
    made.add_argument("--form", choices=("indexed", "dense"), default="indexed")
    for name, default, text in (("sequences", 1000, "documents"), ("targets", 20, "pairs of each"), ("context", None, "context vectors of a pair [20; 100 for texts]"),
                                ("dim", 64, "dimensions"), ("topics", 20, "topics that documents share"), ("seed", 0, "of all that is random")):
        made.add_argument(f"--{name}", type=int, default=default, help=text if default is None else f"{text} [%(default)s]")
    made.add_argument("--noise", type=float, default=1.5, help="length of the random part of a vector; 0 = none [%(default)s]")
    made.add_argument("--val-share", type=float, default=0.15, help="share held out for validation, by whole documents [%(default)s]")
    args = parser.parse_args(argv)
    if args.context is None:
        args.context = 100 if args.from_text else 20
    return args


def check_args(args):
    if args.index and not args.bank:
        raise trainer.UserError("--index needs --bank, the bank that the vectors are rows of")
    for name in ("n", "sequences", "targets", "context", "dim", "topics", "batch"):
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
        if args.from_text:
            make_from_text(args)
        elif args.index:
            index_pairs(args.index, args.bank, args.out)
        elif args.source:
            cut(args.source, args.n, args.out)
        else:
            make_synthetic(args)
    except trainer.UserError as e:
        say(e)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
