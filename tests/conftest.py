"""What the tests share: a laboratory with tiny data, and the score of the fault suite."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SMALL = ["--hidden-dim", "16", "--bs", "8", "--accum", "4", "--memory-bank-size", "300", "--bank-negatives", "64", "--epochs", "2",
         "--warmup-steps", "2", "--mine-schedule", "1-1:none;2-:4@r2-20", "--threads", "1", "--precision", "fp32", "--log-dir", "none"]


class Lab:
    """A folder with tiny data, in which the real trainer runs as a process of its own."""

    def __init__(self, folder):
        import make_tiny_pairs
        self.folder = folder
        self.pairs, self.bank = folder / "data" / "pairs.npz", folder / "data" / "bank.npz"
        self.make = ["--sequences", "60", "--targets", "6", "--context", "10", "--dim", "16", "--topics", "5"]
        assert make_tiny_pairs.main(["--out", str(folder / "data"), *self.make]) == 0

    def command(self, *flags, small=True):
        data = [] if "--resume" in flags else ["--pairs", str(self.pairs), "--bank", str(self.bank)]
        return [sys.executable, str(ROOT / "train_twotower_v4.py"), *data, *(SMALL if small and "--resume" not in flags else []), *map(str, flags)]

    def train(self, *flags, small=True, **more):
        return subprocess.run(self.command(*flags, small=small), cwd=self.folder, capture_output=True, text=True, timeout=120, **more)

    def events(self, run, name=None):
        lines = [json.loads(line) for line in (self.folder / run / "events.jsonl").read_text().splitlines()]
        return [e for e in lines if name in (None, e["event"])]


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))


SCORE = {"injected": {}, "recorded": {}, "not injected here": {}}            # kind -> {class or claim: right, or why not}


def pytest_unconfigure():
    """After pytest's own last line, so that the score is the end of the output."""
    if not any(SCORE.values()):
        return
    for kind in ("injected", "recorded"):
        right = sorted(key for key, good in SCORE[kind].items() if good)
        wrong = sorted(set(SCORE[kind]) - set(right))
        print(f"classes right / {kind}: {len(right)} / {len(SCORE[kind])}" + (f"   wrong: {', '.join(wrong)}" if wrong else ""))
    for key, why in SCORE["not injected here"].items():
        print(f"not injected here: {key}: {why}")
