"""Flags, schedules, rates and device rules: pure functions and what the command line says."""
import subprocess
import sys

import pytest
from conftest import ROOT

import train_twotower_v4 as T


def config(**flags):
    return T.make_config({"pairs": "p.npz", "bank": "b.npz"} | flags)


@pytest.mark.parametrize("schedule, epochs, word", [
    ("1-5:none;7-10:8@r10-100", 10, "gap"), ("2-10:none", 10, "gap"), ("1-5:none;5-10:none", 10, "overlap"), ("1-5:none", 10, "gap"),
    ("1-:8@r100-10", 3, "empty window"), ("1-:8@0.9-0.9", 3, "empty window"), ("1-:8@r0-10", 3, "empty window"), ("1-:0@r1-10", 3, "empty window"),
    ("1-:8@0.9-1.2", 3, "empty window"), ("1-:8", 3, "can't read"), ("", 3, "can't read"), ("5-1:none", 3, "gap"), ("1-:8@r1.5-3", 3, "can't read")])
def test_schedules_with_gaps_overlaps_or_empty_windows_are_refused(schedule, epochs, word):
    with pytest.raises(T.UserError, match=word):
        config(mine_schedule=schedule, epochs=epochs)


def test_documented_schedule_gives_each_epoch_its_rule():
    cfg = config(mine_schedule="1-5:none;6-10:8@r10-100;11-30:16@0.82-0.92", epochs=30)
    rules = [T.rule_for(cfg, e) for e in range(1, 31)]
    assert rules[:5] == [None] * 5
    assert {(r.count, r.kind, r.low, r.high) for r in rules[5:10]} == {(8, "rank", 10, 100)}
    assert {(r.count, r.kind, r.low, r.high) for r in rules[10:]} == {(16, "cosine", 0.82, 0.92)}
    assert T.rule_for(config(no_mining=True, mine_schedule="1-:8@r1-9"), 3) is None


def test_learning_rate_warms_up_and_falls_by_optimizer_step():
    cfg = config(lr=1e-3, lr_min=1e-5, warmup_steps=10)
    rates = [T.learning_rate(cfg, u, 100) for u in range(100)]
    assert rates[:10] == pytest.approx([1e-4 * (i + 1) for i in range(10)])
    assert rates[10] == pytest.approx(1e-3) and rates[-1] == pytest.approx(1e-5)
    assert all(a > b for a, b in zip(rates[10:], rates[11:]))            # a schedule by epoch would stand still in between
    assert max(T.learning_rate(cfg, u, 6) for u in range(6)) == pytest.approx(1e-3), "a short run must reach its highest rate"


def test_device_rules_for_mps_hold_on_any_machine():
    assert T.device_rules("cpu", 64, set()) == ("cpu", [])
    assert T.device_rules("mps", 4, {"mps"}) == ("mps", [])
    device, warnings = T.device_rules("mps", 5, {"mps"})
    assert device == "mps" and "117" in warnings[0] and "launch_v4_mps_safe.sh" in warnings[0]
    assert T.device_rules("auto", 32, {"mps"})[0] == "mps" and T.device_rules("auto", 1, {"mps"})[1] == []
    assert T.device_rules("auto", 1, set())[0] == "cpu"
    with pytest.raises(T.UserError, match="launch_v4_cpu.sh"):
        T.device_rules("mps", 1, {"cuda"})


def test_epochs_are_enough_for_few_pairs_and_few_for_many():
    assert [T.set_epochs(config(), n).epochs for n in (1_000, 10_000, 25_000, 1_000_000)] == [75, 8, 4, 3]
    assert T.set_epochs(config(bs=24, accum=4), 25_000).epochs == 3 and T.set_epochs(config(epochs=30), 1_000).epochs == 30
    with pytest.raises(T.UserError, match="gap"):
        T.set_epochs(config(mine_schedule="1-5:none"), 1_000)


def test_precision_is_bf16_where_it_pays_and_never_on_mps():
    assert T.precision_rules("auto", "cpu", 4.0) == "bf16" and T.precision_rules("auto", "cpu", 1.2) == "fp32"
    assert T.precision_rules("auto", "mps", 4.0) == "fp32" and T.precision_rules("fp32", "cpu", 4.0) == "fp32"
    assert T.precision_rules("bf16", "cpu", 0.5) == "bf16"
    with pytest.raises(T.UserError, match="MPS"):
        T.precision_rules("bf16", "mps", 4.0)


def test_micro_batch_is_the_flag_on_mps_and_even_parts_that_fit_on_the_cpu():
    for bs, accum in ((8, 64), (32, 16), (512, 1)):
        cfg = config(bs=bs, accum=accum)
        assert T.micro_batch(cfg, 512, 100, 768, "mps", "fp32") == bs
        assert T.micro_batch(cfg, 512, 100, 768, "cpu", "fp32") == 128 and T.micro_batch(cfg, 512, 100, 768, "cpu", "bf16") == 171
    assert T.micro_batch(config(memory_bank_size=500), 512, 10, 16, "cpu", "fp32") == 512
    assert T.micro_batch(config(hidden_dim=8192), 512, 4000, 1024, "cpu", "fp32") == 1


@pytest.mark.parametrize("flags", [["--help"], ["--version"], ["--bs", "0"], ["--no-such-flag"]])
def test_answers_before_torch_is_imported(flags):
    code = f"import sys, runpy; sys.argv = ['train_twotower_v4.py'] + {flags!r}\ntry: runpy.run_path({str(ROOT / 'train_twotower_v4.py')!r}, run_name='__main__')\n" \
           "finally: assert 'torch' not in sys.modules and 'faiss' not in sys.modules, 'imported'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "imported" not in done.stderr
    assert done.returncode == (0 if flags[0] in ("--help", "--version") else 2), done.stderr


def test_each_flag_of_the_documents_is_in_the_help_and_states_its_off_value():
    text = " ".join(subprocess.run([sys.executable, ROOT / "train_twotower_v4.py", "--help"], capture_output=True, text=True).stdout.split())
    for name in "pairs bank out epochs bs accum lr lr-min warmup-steps wd tau margin grad-clip seed cell hidden-dim num-layers pool residual " \
                "memory-bank-size bank-negatives filter-threshold mine-schedule no-mining search device threads workers resume ckpt-seconds " \
                "max-bad-steps max-steps dry-run keep-context version".split():
        assert f"--{name} " in text, name
    for f in T.FIELDS:                                                    # what can be switched off says how
        if f.metadata["low"] == 0 and f.name != "seed" or isinstance(f.default, bool):
            assert "0 =" in f.metadata["help"] or "off =" in f.metadata["help"], f.name


def test_config_file_reads_back_and_is_plain_yaml_lines(tmp_path):
    values = {"a": 1, "b": "x: y # z", "c": None, "d": [1, "ä"], "e": 1e-5, "f": True}
    T.write_config(tmp_path / "config.yaml", values)
    assert T.read_config(tmp_path / "config.yaml") == values
    assert all(line.split(": ", 1)[0].isidentifier() for line in (tmp_path / "config.yaml").read_text().splitlines())
