#!/usr/bin/env python3
"""What the evidence costs: heartbeats, events and the supervisor's look at the process, as a share of a training step.

    python bench/evidence_cost.py [--steps 60]

Steps with the evidence on and off alternate in one process, so that both see the same machine; the trainer's own Run, Trainer and data
are used, with one thread, and times are the thread's own, so that a busy machine changes little. Prints ratios; exit 1 if the evidence
costs 1% of a step or more.
"""
import argparse
import dataclasses
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


class Meter:
    """Wraps a method and adds up the time that is spent in it."""

    def __init__(self, target, name):
        self.seconds, self.calls, self.inner = 0.0, 0, getattr(target, name)
        setattr(target, name, self)

    def __call__(self, *args, **kwargs):
        started = time.thread_time()
        result = self.inner(*args, **kwargs)
        self.seconds += time.thread_time() - started
        self.calls += 1
        return result


def measure(steps):
    """Steps with and without evidence, as many of each -> seconds of a step (on, off), and of the evidence in one."""
    import numpy as np

    import check_crash_cause as check
    import make_tiny_pairs
    import train_twotower_v4 as t

    t.torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_pairs.main(["--out", folder, "--sequences", "200", "--dim", "128"])
        cfg = dataclasses.replace(t.Config(), pairs=f"{folder}/pairs.npz", bank=f"{folder}/bank.npz", hidden_dim=128, log_dir="none", memory_bank_size=8192)
        train, val = t.open_data(cfg)
        run = t.Run(Path(folder, "run"), cfg, "cpu")
        run.say = lambda line: None
        trainer = t.Trainer(cfg, run, train, val)
        window = np.arange(trainer.effective)
        beat, event = Meter(run, "beat"), Meter(run, "event")
        times = {True: [], False: []}
        for i in range(2 * steps + 4):
            on = i % 2 == 0
            batches = t.load_batches(train, [window[a:b] for a, b in t.spans(len(window), trainer.micro)], 0)
            run.beat, run.event = (beat, event) if on else (lambda phase: None, lambda name, **fields: None)
            started = time.thread_time()
            trainer.step(window, batches)
            if i >= 4:                                       # the first ones fill caches
                times[on].append(time.thread_time() - started)
        evidence = check.Evidence(["bench"])
        evidence.sample(os.getpid())                         # the first look reads each library once
        started = time.thread_time()
        for _ in range(10):
            evidence.sample(os.getpid())
        look = (time.thread_time() - started) / 10          # seconds a look; there is one each second
        shutil.rmtree(evidence.temporary)
        run.close()
    n = steps + 2                                            # steps with evidence
    return {"pairs": trainer.effective, "micro_batches": -(-trainer.effective // trainer.micro), "on": float(np.median(times[True])),
            "off": float(np.median(times[False])), "beats": beat.calls / n, "beat_seconds": beat.seconds / n, "events": event.calls / n,
            "event_seconds": event.seconds / n, "look": look}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="timed steps of each kind [%(default)s]")
    m = measure(parser.parse_args().steps)
    on, off, beat, event = m["on"], m["off"], m["beat_seconds"], m["event_seconds"]
    share = (beat + event) / off
    print(f"step of {m['pairs']} pairs, {m['micro_batches']} micro-batches: {1000 * off:.1f} ms without evidence, ratio with / without {on / off:.4f} (medians)")
    print(f"heartbeats: {m['beats']:.0f} a step, {1e6 * beat / m['beats']:.1f} us each, {beat / off:.5f} of a step")
    print(f"events: {m['events']:.1f} a step, {1e6 * event / max(1, m['events']):.1f} us each, {event / off:.5f} of a step")
    print(f"supervisor: {1000 * m['look']:.1f} ms of another core each second, {m['look']:.5f} of the time")
    print(f"evidence in the trainer / step: {share:.5f} ({'under' if share < 0.01 else 'NOT under'} 0.01)")
    return share >= 0.01


if __name__ == "__main__":
    sys.exit(main())
