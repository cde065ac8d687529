"""Negatives, masks, the memory bank and the gradient, each against a loop that does it the slow way."""
import dataclasses

import numpy as np
import pytest
import torch

import train_twotower_v4 as T


def config(**flags):
    return dataclasses.replace(T.Config(pairs="p", bank="b", hidden_dim=16, memory_bank_size=300, bank_negatives=50, warmup_steps=2, epochs=3), **flags)


def data(lab, **flags):
    cfg = config(pairs=str(lab.pairs), bank=str(lab.bank), **flags)
    return cfg, *T.open_data(cfg)


def make_trainer(lab, **flags):
    cfg, train, val = data(lab, **flags)
    return T.Trainer(cfg, T.Run(None, cfg, "cpu", "bf16" if cfg.precision == "bf16" else "fp32"), train, val)


def fill(trainer, pairs):
    trainer.memory.push(torch.from_numpy(trainer.train.positives(pairs)), torch.from_numpy(pairs))


def test_masked_columns_equal_brute_force():
    rng = np.random.default_rng(0)
    for _ in range(20):
        groups, forbidden = rng.integers(30, size=rng.integers(1, 60)), rng.integers(-1, 30, size=(5, 4))
        found = torch.zeros(5, len(groups), dtype=torch.bool)
        T.ColumnMask(groups).apply(found, forbidden, True)
        assert found.tolist() == [[g in row for g in groups] for row in forbidden.tolist()]


def slow_loss(trainer, window, q, d, mined):
    """InfoNCE by Python loops over documents, from the definition."""
    cfg, train, bank = trainer.cfg, trainer.train, trainer.train.bank
    drawn = np.random.default_rng([cfg.seed, 1, 1, 0]).integers(len(bank.vectors), size=cfg.bank_negatives)
    documents = [(train.positives([i])[0], train.groups[i]) for i in window]
    documents += [(train.positives([i])[0], train.groups[i]) for i in trainer.memory.filled()[1]]
    documents += [(bank.documents([r])[0], bank.groups[r]) for r in drawn]
    documents += [(bank.documents([r])[0], bank.groups[r]) for r in sorted({int(r) for r in mined[window].ravel()} - {-1})]
    losses = []
    for i, query, positive in zip(window, q.double(), d.double()):
        out = {int(train.groups[i])} | ({int(bank.groups[c]) for c in train.C[i] if c >= 0} if not cfg.keep_context else set())
        kept = [torch.from_numpy(v).double() for v, g in documents if int(g) not in out and float(torch.from_numpy(v).double() @ positive) <= cfg.filter_threshold]
        logits = torch.stack([query @ positive - cfg.margin] + [query @ v for v in kept]) / cfg.tau
        losses.append(torch.logsumexp(logits, 0) - logits[0])
    return torch.stack(losses).sum()


@pytest.mark.parametrize("flags", [{}, {"keep_context": True}, {"margin": 0.2, "tau": 0.1}, {"filter_threshold": 0.3}])
def test_loss_equals_the_definition_written_as_loops(lab, flags):
    trainer = make_trainer(lab, **flags)
    window, stored = np.arange(40, 60), np.r_[0:80, 45:50]                # own positives of the window are in the memory bank
    fill(trainer, stored)
    mined = np.random.default_rng(1).integers(-1, len(trainer.train.bank.vectors), size=(len(trainer.train), 3))
    mined[50] = trainer.train.rows[50]                                    # even a positive that got in is masked
    d = torch.from_numpy(trainer.train.positives(window))
    q = torch.nn.functional.normalize(d + torch.randn(d.shape, generator=torch.Generator().manual_seed(0)), dim=-1)
    counts = {}
    negatives = T.collect_negatives(d, window, trainer.memory, mined, trainer.train, trainer.cfg, (1, 0))
    loss = T.info_nce(q, d, negatives, trainer.train.forbidden(window, trainer.cfg.keep_context), trainer.cfg, counts)
    assert float(loss) == pytest.approx(float(slow_loss(trainer, window, q, d, mined)), rel=1e-5)
    columns = sum(len(v) for v in negatives.blocks.values())
    assert sum(used + masked for used, masked in counts.values()) == columns * len(window)


def test_own_positive_in_a_full_memory_bank_is_masked_even_as_a_duplicate(lab, tmp_path):
    """Bank larger than the pairs, as documented; another pair's target has the same vector under another row number."""
    bank, pairs = np.load(lab.bank)["vectors"].copy(), dict(np.load(lab.pairs))
    bank[pairs["T_train"][9]] = bank[pairs["T_train"][4]]
    np.savez(tmp_path / "bank.npz", vectors=bank)
    cfg = config(pairs=str(lab.pairs), bank=str(tmp_path / "bank.npz"), memory_bank_size=900, bank_negatives=0, filter_threshold=1.0, keep_context=True)
    trainer = T.Trainer(cfg, T.Run(None, cfg, "cpu"), *T.open_data(cfg))
    every = np.arange(len(trainer.train))
    fill(trainer, np.r_[every, every])
    window = np.array([4])
    d = torch.from_numpy(trainer.train.positives(window))
    negatives = T.collect_negatives(d, window, trainer.memory, None, trainer.train, cfg, (1, 0))
    counts = {}
    T.info_nce(d, d, negatives, trainer.train.forbidden(window, True), cfg, counts)
    assert counts["memory"][1] == 4                                       # pairs 4 and 9, twice each
    assert counts["window"] == [0, 1]


def test_margin_is_in_cosines_before_the_temperature(lab):
    trainer = make_trainer(lab, margin=0.1, tau=0.05)
    window = np.arange(30)
    d = torch.from_numpy(trainer.train.positives(window))
    forbidden = trainer.train.forbidden(window, False)
    negatives = T.collect_negatives(d, window, trainer.memory, None, trainer.train, trainer.cfg, (1, 0))
    with_margin = T.info_nce(d, d, negatives, forbidden, trainer.cfg, {})
    shifted = torch.cat([q @ v.T for q in [d] for v in negatives.blocks.values()], 1)
    negatives.mask.apply(shifted, forbidden, float("-inf"))
    near = torch.cat([d @ v.T for v in negatives.blocks.values()], 1) > trainer.cfg.filter_threshold
    shifted[near] = float("-inf")
    pos = (d * d).sum(1, keepdim=True)
    expected = [torch.nn.functional.cross_entropy(torch.cat([p, shifted], 1) / 0.05, torch.zeros(30, dtype=torch.long), reduction="sum") for p in (pos - 0.1, pos)]
    assert float(with_margin) == pytest.approx(float(expected[0]), rel=1e-5) and abs(float(expected[0] - expected[1])) > 0.1


def gradient(lab, bs, accum, window, **flags):
    trainer = make_trainer(lab, bs=bs, accum=accum, grad_clip=0.0, **flags)
    trainer.micro = bs                                                    # as on a device where --bs is what is encoded at a time
    torch.nn.init.normal_(trainer.tower.project.weight, std=0.1, generator=torch.Generator().manual_seed(1))
    fill(trainer, np.arange(200))
    trainer.progress.mined = torch.from_numpy(np.random.default_rng(1).integers(0, 500, size=(len(trainer.train), 4)))
    trainer.optimizer.step = lambda: None                                 # keep the weights: the gradient is what is compared
    batches = T.load_batches(trainer.train, [window[a:b] for a, b in T.spans(len(window), bs)], 0)
    trainer.step(window, batches)
    return torch.cat([p.grad.ravel() for p in trainer.tower.parameters()]), trainer


@pytest.mark.parametrize("bs, accum", [(8, 32), (32, 8), (100, 3)])
def test_gradient_is_the_same_however_the_window_is_split(lab, bs, accum):
    window = np.random.default_rng(2).permutation(300)[:256]
    whole, _ = gradient(lab, 256, 1, window)
    split, _ = gradient(lab, bs, accum, window)
    assert float((split - whole).norm() / whole.norm()) < 1e-5 and float(whole.norm()) > 0


def test_documented_512_pairs_have_one_gradient_at_8x64_32x16_and_512x1(lab):
    window = np.random.default_rng(2).integers(len(np.load(lab.pairs)["T_train"]), size=512)
    whole, _ = gradient(lab, 512, 1, window)
    for bs, accum in ((8, 64), (32, 16)):
        split, _ = gradient(lab, bs, accum, window)
        assert float((split - whole).norm() / whole.norm()) < 1e-5


def test_shorter_last_window_is_divided_by_what_it_holds(lab):
    """A window of 20 under --bs 8 --accum 4 (32) has the gradient of 20 pairs in one batch, not 20/32 of it."""
    window = np.arange(100, 120)
    short, _ = gradient(lab, 8, 4, window)
    whole, _ = gradient(lab, 20, 1, window)
    assert float((short - whole).norm() / whole.norm()) < 1e-5


@pytest.mark.parametrize("close", [False, True])
def test_near_duplicates_found_by_projection_equal_brute_force(close):
    """Also where all vectors are so close that the projection does not help."""
    g = torch.Generator().manual_seed(0)
    v = torch.randn(400, 200, generator=g)
    v = v * 0.1 + torch.randn(200, generator=g) if close else v
    v[200:260] = v[:60] + 0.1 * torch.randn(60, 200, generator=g)         # some on both sides of the threshold
    v = torch.nn.functional.normalize(v, dim=-1)
    down, d = T.projection(200), v[:50]
    for threshold in (0.9, 0.98, 0.995):
        expected = (d.double() @ v.double().T) > threshold
        assert torch.equal(T.find_near(d, v, (down, v @ down), threshold), expected) and expected.sum() >= 50


def test_bf16_gradient_is_near_the_fp32_one(lab):
    window = np.random.default_rng(2).permutation(300)[:256]
    whole, _ = gradient(lab, 256, 1, window)
    half, trainer = gradient(lab, 256, 1, window, precision="bf16")
    assert trainer.memory.vectors.dtype == torch.bfloat16 and all(p.dtype == torch.float32 for p in trainer.tower.parameters())
    assert 0 < float((half - whole).norm() / whole.norm()) < 0.03


def test_gradient_equals_finite_differences(lab):
    trainer = make_trainer(lab, margin=0.05, hidden_dim=4)
    tower = trainer.tower.double()
    torch.nn.init.normal_(tower.project.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    window = np.arange(12)
    d = torch.from_numpy(trainer.train.positives(window))
    negatives = T.collect_negatives(d, window, trainer.memory, None, trainer.train, trainer.cfg, (1, 0))
    negatives = negatives._replace(blocks={k: v.double() for k, v in negatives.blocks.items()},
                                   projected={k: (a.double(), b.double()) for k, (a, b) in negatives.projected.items()})
    x = torch.from_numpy(trainer.train[window]).double()

    def loss():
        return T.info_nce(tower(x), d.double(), negatives, trainer.train.forbidden(window, False), trainer.cfg, {})
    loss().backward()
    for p in tower.parameters():
        i = int(p.grad.abs().argmax())
        with torch.no_grad():
            flat = p.view(-1)
            value = float(flat[i])
            flat[i] = value + 1e-5
            up = float(loss())
            flat[i] = value - 1e-5
            down = float(loss())
            flat[i] = value
        assert float(p.grad.view(-1)[i]) == pytest.approx((up - down) / 2e-5, rel=1e-4)


def test_memory_bank_equals_a_fifo_list_and_is_written_in_place():
    rng, bank, reference = np.random.default_rng(0), T.MemoryBank(10, 3), []
    at = bank.vectors.data_ptr()
    for n in (3, 4, 5, 1, 25, 10, 2, 0, 9):
        pairs = rng.integers(1000, size=n)
        d = torch.from_numpy(np.repeat(pairs[:, None], 3, 1).astype(np.float32))
        bank.push(d, torch.from_numpy(pairs))
        reference = (reference + pairs.tolist())[-10:]
        vectors, held = bank.filled()
        assert sorted(held.tolist()) == sorted(reference) and vectors[:, 0].tolist() == held.tolist()
        if len(reference) == 10 and n:                                    # the oldest is where the next one goes
            assert held[int(bank.head)] == reference[0]
    assert bank.vectors.data_ptr() == at, "no step may copy the bank"


def test_memory_bank_of_size_zero_is_off():
    bank = T.MemoryBank(0, 3)
    bank.push(torch.ones(4, 3), torch.arange(4))
    assert len(bank.filled()[1]) == 0


def test_mined_negatives_follow_their_pair_through_any_shuffle(lab):
    """Each pair's mined row is a function of the pair; whatever the order of the window, that row is among its columns."""
    trainer = make_trainer(lab, bank_negatives=0, memory_bank_size=0)
    train = trainer.train
    mined = ((train.rows[:, None] + np.array([50, 90])) % len(train.bank.vectors)).astype(np.int32)
    for seed in range(3):
        window = np.random.default_rng(seed).permutation(len(train))[:16]
        d = torch.from_numpy(train.positives(window))
        negatives = T.collect_negatives(d, window, trainer.memory, mined, train, trainer.cfg, (1, 0))
        assert set(negatives.groups["mined"]) == {int(train.bank.groups[r]) for r in mined[window].ravel()}
        np.testing.assert_allclose(negatives.blocks["mined"].numpy(), train.bank.documents(np.unique(mined[window])))


def test_skipped_step_changes_nothing_and_names_the_rows(lab, capsys):
    trainer = make_trainer(lab, bs=16, accum=2)
    x = np.array(trainer.train.bank.vectors)
    row = int(trainer.train.C[37][-1])
    x[row] = np.nan
    trainer.train.bank.vectors = x
    before = {k: v.clone() for k, v in trainer.tower.state_dict().items()}
    window = np.arange(20, 52)
    trainer.step(window, T.load_batches(trainer.train, [window], 0))
    said = capsys.readouterr().out
    assert "C_train[37]" in said and "non-finite loss" in said
    assert all(torch.equal(before[k], v) for k, v in trainer.tower.state_dict().items())
    assert trainer.progress.updates == 0 and trainer.progress.bad_in_row == 1 and len(trainer.memory.filled()[1]) == 0
    assert not trainer.optimizer.state
