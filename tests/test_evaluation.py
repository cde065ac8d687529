"""Ranks against a brute force in float64, metrics against pytrec_eval, the verdict against known differences."""
import dataclasses

import numpy as np
import pytest
import pytrec_eval
import torch

import train_twotower_v4 as T


class Quiet:
    device = "cpu"

    def tick(self, phase):
        pass


def open_lab(lab, tmp_path, change=lambda bank, pairs: None, **flags):
    bank, pairs = np.load(lab.bank)["vectors"].copy(), dict(np.load(lab.pairs))
    change(bank, pairs)
    np.savez(tmp_path / "bank.npz", vectors=bank)
    np.savez(tmp_path / "pairs.npz", **pairs)
    cfg = dataclasses.replace(T.Config(pairs=str(tmp_path / "pairs.npz"), bank=str(tmp_path / "bank.npz")), **flags)
    return cfg, *T.open_data(cfg)


def brute_rank(val, i, query, keep_context):
    """The definition, one document at a time."""
    bank = val.bank.vectors.astype(np.float64)
    bank = bank / np.linalg.norm(bank, axis=1, keepdims=True)
    target, query = bank[val.rows[i]], query.astype(np.float64)
    score, rank = query @ target, 1
    for row, document in enumerate(bank):
        in_context = not keep_context and any((val.bank.vectors[row] == val.bank.vectors[c]).all() for c in val.C[i] if c >= 0)
        equal = (val.bank.vectors[row] == val.bank.vectors[val.rows[i]]).all()
        if not in_context and not equal and query @ document >= score:
            rank += 1
    return rank


def repeat_rows(bank, pairs):
    bank[pairs["T_val"][3]] = bank[pairs["C_val"][3, -2]]                 # the target equals a context row
    bank[7] = bank[pairs["T_val"][5]]                                     # the target stands in the bank twice
    bank[11] = bank[pairs["C_val"][6, -1]]                                # a context row stands there twice


@pytest.mark.parametrize("keep_context", [False, True])
def test_ranks_equal_brute_force_with_duplicates_and_context(lab, tmp_path, keep_context, monkeypatch):
    cfg, _, val = open_lab(lab, tmp_path, repeat_rows)
    idx = np.arange(12)
    rng = np.random.default_rng(0)
    queries = T.unit_rows(np.stack([val.positives(idx) + s * rng.standard_normal((12, 16)).astype(np.float32) for s in (0.05, 0.3)]).reshape(24, 16)).reshape(2, 12, 16)
    expected = [[brute_rank(val, i, queries[m, i], keep_context) for i in idx] for m in range(2)]
    for chunk in (16_384, 100, 7):                                        # the bank in one piece, or in many
        monkeypatch.setattr(T, "CHUNK", chunk)
        assert T.count_ranks(queries, val, idx, keep_context, Quiet()).tolist() == expected


def test_ranks_do_not_depend_on_how_many_are_counted_at_a_time(lab, tmp_path):
    cfg, _, val = open_lab(lab, tmp_path)
    n, rng = 150, np.random.default_rng(0)
    idx = np.arange(n) % len(val)
    queries = T.unit_rows(rng.standard_normal((20 * n, 16)).astype(np.float32)).reshape(20, n, 16)
    together = T.count_ranks(queries, val, idx, False, Quiet())
    for m, i in ((0, 0), (3, 50), (7, 51), (11, 63), (12, 64), (19, n - 1)):               # on both sides of each seam
        assert together[m, i] == T.count_ranks(queries[m:m + 1, i:i + 1], val, idx[i:i + 1], False, Quiet()).item()


def test_a_query_that_says_nothing_or_nan_gets_the_worst_rank_not_the_best(lab, tmp_path):
    _, _, val = open_lab(lab, tmp_path)
    queries = np.stack([np.zeros((2, 16), np.float32), np.full((2, 16), np.nan, np.float32)])
    ranks = T.count_ranks(queries, val, np.arange(2), True, Quiet())
    assert (ranks >= len(val.bank.vectors)).all()


def test_target_that_the_bank_lacks_is_ranked_by_counting(lab, tmp_path):
    _, _, val = open_lab(lab, tmp_path)
    val.indexed, val.T = False, val.positives(np.arange(len(val))) + 0.01
    val.groups = len(val.bank.vectors) + np.arange(len(val))
    query = T.unit_rows(val.T[:1])
    scores, score = T.unit_rows(val.bank.vectors) @ query[0], float(query[0] @ T.unit_rows(val.T[:1])[0])
    assert T.count_ranks(query[None], val, np.arange(1), True, Quiet()).item() == 1 + int((scores >= score).sum())


def test_metrics_equal_pytrec_eval():
    ranks = torch.from_numpy(np.random.default_rng(0).integers(1, 1500, size=60))
    qrels = {str(i): {"target": 1} for i in range(60)}
    run = {str(i): {("target" if r == rank else f"d{r}"): float(-r) for r in range(1, 1501)} for i, rank in enumerate(ranks.tolist())}
    measured = pytrec_eval.RelevanceEvaluator(qrels, {"recall.1,10,100,500,1000", "recip_rank"}).evaluate(run)
    summary = T.summarize(ranks)
    for k in (1, 10, 100, 500, 1000):
        assert summary[f"recall@{k}"] == pytest.approx(np.mean([m[f"recall_{k}"] for m in measured.values()]))
    assert summary["mrr"] == pytest.approx(np.mean([m["recip_rank"] for m in measured.values()]))
    assert summary["median_rank"] == np.median(ranks.numpy())


def test_interval_covers_the_true_difference_about_95_times_in_100():
    rng, covered = np.random.default_rng(1), 0
    for _ in range(200):
        low, high = T.paired_interval(torch.from_numpy(rng.choice([-1.0, 0.0, 1.0], p=[0.1, 0.7, 0.2], size=300)), draws=400)
        covered += low <= 0.1 <= high
    assert 175 <= covered <= 199


def test_verdict_says_above_only_when_the_interval_excludes_zero():
    rng = np.random.default_rng(2)
    base = torch.from_numpy(rng.integers(1, 1000, size=400))
    better, same = torch.clamp(base // 2, min=1), base.clone()
    same[:4] = 1                                                          # a few better ones: within what chance does
    for ranks, above in ((better, True), (same, False), (base * 2, False)):
        result = T.judge(ranks, {"worse": base * 3, "best": base}, "recall@500")
        assert result["best_baseline"] == "best" and result["above_baseline"] is above
        assert ("not above the baseline yet" in T.eval_line(1, result)) is not above


def test_each_metric_is_compared_with_its_own_best_baseline():
    base = np.r_[np.full(200, 5), np.full(200, 2000)]
    steady, sharp = torch.from_numpy(np.full(400, 400)), torch.from_numpy(base)             # best at recall@500; best at mrr and recall@10
    ranks = torch.from_numpy(np.r_[np.full(200, 1), np.full(150, 450), np.full(50, 2000)])
    compared = T.judge(ranks, {"steady": steady, "sharp": sharp, "oracle": torch.ones(400).long()}, "mrr")["compared"]
    assert compared["recall@500"]["best_baseline"] == "steady" and not compared["recall@500"]["above_baseline"]
    assert compared["mrr"]["best_baseline"] == "sharp" and compared["mrr"]["above_baseline"]
    assert compared["recall@500"]["difference"] == pytest.approx(-50 / 400)
    alone = T.paired_interval(T.metric_values(ranks, "mrr") - T.metric_values(sharp, "mrr"))
    assert compared["mrr"]["interval"] == pytest.approx(alone)


def test_validation_sample_is_fixed_and_of_the_asked_size(lab, tmp_path):
    cfg, _, val = open_lab(lab, tmp_path, eval_queries=20)
    one, two = T.sample_validation(val, cfg), T.sample_validation(val, dataclasses.replace(cfg, seed=5))
    assert (one == two).all() and len(set(one)) == 20
    assert len(T.sample_validation(val, dataclasses.replace(cfg, eval_queries=0))) == len(val)


def test_shuffled_targets_leave_no_baseline_standing(lab, tmp_path):
    """What a wrong pairing does: the baselines fall to chance. A trainer that pairs by accident can't look good."""
    cfg, _, val = open_lab(lab, tmp_path)
    (tmp_path / "wrong").mkdir()
    _, _, wrong = open_lab(lab, tmp_path / "wrong", lambda bank, pairs: np.random.default_rng(0).shuffle(pairs["T_val"]))
    right, shuffled = (T.summarize(T.rank_baselines(v, np.arange(len(v)), cfg, Quiet())["exp 0.7"])["median_rank"] for v in (val, wrong))
    assert right < 100 < shuffled
