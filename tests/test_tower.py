"""The query tower against torch's own bidirectional layers and against the baselines."""
import dataclasses

import pytest
import torch

import train_twotower_v4 as T


def config(**flags):
    return dataclasses.replace(T.Config(pairs="p", bank="b"), **flags)


def sequences(B, L, D, lengths=None, seed=0):
    x = torch.randn(B, L, D, generator=torch.Generator().manual_seed(seed))
    for i, n in enumerate(lengths or []):
        x[i, :L - n] = 0
    return x


def test_documented_configuration_has_4725504_parameters():
    tower = T.QueryTower(768, 100, config(pool="mean", residual="none"))
    assert sum(p.numel() for p in tower.parameters()) == 4_725_504


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("layers", [1, 2])
def test_tower_equals_torch_bidirectional_layer(cell, layers):
    """Also with padding: torch's packed sequences are the reference."""
    tower = T.QueryTower(12, 9, config(cell=cell, num_layers=layers, hidden_dim=7, residual="none"))
    reference = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM}[cell](12, 7, layers, batch_first=True, bidirectional=True)
    for i in range(layers):
        for mine, suffix in ((tower.ahead[i], ""), (tower.back[i], "_reverse")):
            for name, value in mine.named_parameters():
                getattr(reference, name.replace("_l0", f"_l{i}") + suffix).data.copy_(value)
    lengths = [9, 4, 1, 9, 6]
    x = sequences(5, 9, 12, lengths)
    unit = torch.nn.functional.normalize(x, dim=-1)
    left = torch.stack([torch.cat([row[9 - n:], row[:9 - n]]) for row, n in zip(unit, lengths)])
    packed = torch.nn.utils.rnn.pack_padded_sequence(left, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
    out, _ = torch.nn.utils.rnn.pad_packed_sequence(reference(packed)[0], batch_first=True)                # zeros at padding
    pooled = out.sum(1) / torch.tensor(lengths)[:, None]
    expected = torch.nn.functional.normalize(tower.project(pooled), dim=-1)
    torch.testing.assert_close(tower(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pool", ["mean", "last"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_own_recurrence_equals_torch_gru_in_value_and_gradient(pool, layers, padded):
    tower = T.QueryTower(24, 30, config(num_layers=layers, hidden_dim=20, pool=pool, residual="none"))
    x, valid = T.align(sequences(6, 30, 24, [30, 3, 1, 17, 30, 29] if padded else None))
    weight, found = torch.randn(6, 40, generator=torch.Generator().manual_seed(2)), []
    for recur in (tower.recur, tower.recur_both_ways):
        tower.zero_grad()
        pooled = recur(x, (~valid).sum(1))
        (pooled * weight).sum().backward()
        found.append([pooled.detach()] + [p.grad for p in tower.parameters() if p.grad is not None])
    assert len(found[0]) == 1 + 8 * layers
    assert float((found[0][0] - found[1][0]).abs().max()) < 1e-6
    for one, two in zip(*found):
        assert float((one - two).norm() / one.norm()) < 2e-6


@pytest.mark.parametrize("pool", ["mean", "last"])
@pytest.mark.parametrize("residual", ["exp", "learned", "none"])
def test_padding_changes_nothing_wherever_it_stands(pool, residual):
    tower = T.QueryTower(8, 12, config(hidden_dim=6, pool=pool, residual=residual, num_layers=2))
    torch.nn.init.normal_(tower.project.weight)
    x = sequences(3, 5, 8)
    front = torch.cat([torch.zeros(3, 4, 8), x], 1)
    middle = torch.cat([x[:, :2], torch.zeros(3, 3, 8), x[:, 2:], torch.zeros(3, 1, 8)], 1)
    mixed = torch.cat([front, sequences(2, 9, 8, seed=1)])                # beside rows without padding
    for other in (front, middle, mixed):
        torch.testing.assert_close(tower(other)[:3], tower(x), rtol=1e-5, atol=1e-6)


def test_last_pooling_takes_the_final_state_of_each_direction():
    tower = T.QueryTower(8, 12, config(hidden_dim=6, pool="last", residual="none"))
    x = sequences(4, 5, 8)
    unit = torch.nn.functional.normalize(x, dim=-1)
    states = torch.cat([tower.ahead[0](unit)[1][0], tower.back[0](unit.flip(1))[1][0]], -1)
    torch.testing.assert_close(tower(x), torch.nn.functional.normalize(tower.project(states), dim=-1))


@pytest.mark.parametrize("decay", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("residual", ["exp", "learned"])
def test_residual_tower_starts_as_the_exponential_baseline(decay, residual):
    x = sequences(6, 7, 8, [7, 3, 1, 5, 7, 2])
    expected = []
    for row in x:                                                         # by hand: one vector at a time
        vectors = [v / v.norm() for v in row if v.any()]
        total = sum(decay ** (len(vectors) - 1 - i) * v for i, v in enumerate(vectors))
        expected.append(total / total.norm())
    tower = T.QueryTower(8, 12, config(hidden_dim=6, residual_decay=decay, residual=residual))
    torch.testing.assert_close(tower(x), torch.stack(expected), rtol=1e-5, atol=1e-6)
    aligned, valid = T.align(x)
    assert torch.equal(tower(x), torch.nn.functional.normalize(T.weighted_context(aligned, valid, T.decay_weights(decay, 7)), dim=-1))


@pytest.mark.parametrize("residual", ["exp", "learned", "none"])
def test_a_judged_query_has_a_share_of_the_encoder_and_all_of_the_residual(residual):
    towers = {share: T.QueryTower(8, 12, config(hidden_dim=6, residual=residual, encoder_share=share)) for share in (1.0, 0.25)}
    torch.nn.init.normal_(towers[1.0].project.weight)
    towers[0.25].load_state_dict(towers[1.0].state_dict())
    x = sequences(6, 7, 8, [7, 3, 1, 5, 7, 2])
    assert torch.equal(towers[0.25](x), towers[1.0](x))                   # in training there is no difference
    judged = towers[0.25].eval()(x)
    if residual != "none":
        towers[1.0].project.weight.data *= 0.25
        towers[1.0].project.bias.data *= 0.25
    torch.testing.assert_close(judged, towers[1.0].eval()(x), rtol=1e-5, atol=1e-6)


def test_mean_and_last_baselines_are_what_their_names_say():
    x = sequences(3, 4, 5, [4, 2, 1])
    aligned, valid = T.align(x)
    last = torch.nn.functional.normalize(x[:, -1], dim=-1)
    torch.testing.assert_close(T.weighted_context(aligned, valid, T.decay_weights(T.BASELINES["last"], 4)), last)
    means = torch.stack([torch.stack([v / v.norm() for v in row if v.any()]).mean(0) for row in x])
    torch.testing.assert_close(T.weighted_context(aligned, valid, T.decay_weights(T.BASELINES["mean"], 4)), torch.nn.functional.normalize(means, dim=-1))
