from __future__ import annotations

import logging
from functools import partial
from itertools import pairwise

import pytest
import torch
from tests.train.loops import (
    CLASSES,
    FEATURES,
    METHODS,
    PRIVATE,
    Run,
    adamw,
    batch,
    case,
    differences,
    errors,
    net,
    rank,
    same,
    sgd,
    step_once,
)
from torch import nn

import lowtide
from lowtide import ConfigError, PeerLostError, Settings, attach, simulate
from lowtide.sync import Round
from lowtide.sync import methods as named
from lowtide.tensors import trainable
from lowtide.train.agreement import digest
from lowtide.train.attach import METHODS as BY_NAME
from lowtide.train.attach import resolve
from lowtide.transport.loopback import Loopback

ALONE = Settings(alone="method")


def plain(method: str | None, epochs: int = 2) -> dict:
    """A loop as users write it, with all that draws, counts or schedules; everything that comes out of it."""
    torch.manual_seed(3)
    model = net(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=8 * epochs)
    x = torch.randn(50, FEATURES)
    y = torch.randint(CLASSES, (50,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=6, shuffle=True)
    sync = attach(model, optimizer, method) if method else None
    losses = []
    for _ in range(epochs):
        for inputs, targets in sync.shard(loader) if sync else loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if len(losses) < 8 * epochs:
                schedule.step()
            losses.append(loss.item())
    if sync:
        sync.close()
    states = [each.state_dict() for each in (model, optimizer, schedule)]
    return {"losses": losses, "states": [dict(state) for state in states], "rng": torch.get_rng_state()}


@pytest.mark.parametrize("method", sorted(BY_NAME))
def test_alone_it_is_plain_training_bit_for_bit(method):
    assert not list(differences(plain(None), plain(method)))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_alone_if_that_is_wanted(name):
    run = case(name, settings=ALONE).train(1, 9)
    assert run.sync.stats().rounds > 0
    run.sync.close()
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())
    assert run.sync.stats().sent == 0


@pytest.mark.parametrize(("name", "exact"), [("ddp", True), ("local_sgd", False)])
def test_a_mean_over_one_replica_changes_nothing(name, exact):
    runs = [case(name, settings=settings) for settings in (Settings(), ALONE)]
    # the same dropout masks for both
    for run in runs:
        torch.manual_seed(1)
        run.train(1, 9)
    one, other = (list(run.model.parameters()) for run in runs)
    if exact:
        assert same(one, other)
    else:
        torch.testing.assert_close(one, other)


def test_one_simulated_replica_is_alone():
    result = simulate(lambda: (Run("diloco", {"period": 2}).train(1, 5).sync.stats().rounds, rank()), replicas=1)
    assert result.returns == ((0, 0),)


def test_all_begin_from_rank_0():
    def worker():
        run = Run("decoupled", seed=rank())
        with torch.no_grad():
            own = digest(run.model.state_dict().values())
        run.sync.detach()
        return own, digest(net(rank()).state_dict().values())

    after, before = zip(*simulate(worker, replicas=3).returns, strict=True)
    assert len(set(before)) == 3
    assert set(after) == {before[0]}


def test_frozen_parameters_and_buffers_are_copied_and_not_exchanged():
    def worker():
        model = net(rank())
        model.norm.running_mean += rank()
        model.norm.num_batches_tracked += 7 * rank()
        model.first.requires_grad_(False)
        sync = attach(model, sgd(model), "local_sgd", period=1, buffers="ignore")
        copied = digest([model.first.weight, *model.buffers()])
        model.first.weight.data += rank()
        step_once(model, sync.stepper.engine.replica.optimizers[0], 1)
        names = [entry.name for round_ in sync.engine.rounds for entry in round_.layout.entries]
        return copied, names, digest([model.second.weight]), digest([model.first.weight])

    copied, names, trained, frozen = zip(*simulate(worker, replicas=2).returns, strict=True)
    assert len(set(copied)) == 1
    assert names[0] == ["norm.weight", "norm.bias", "second.weight", "second.bias"]
    assert len(set(trained)) == 1
    assert len(set(frozen)) == 2


def test_odd_tensors_are_copied_too():
    def worker():
        model = net(0).to(memory_format=torch.preserve_format)
        model.register_buffer("mask", torch.full((3,), rank() == 0))
        model.register_buffer("phase", torch.full((2,), complex(rank(), 1)))
        model.register_buffer("nothing", torch.zeros(0, 5))
        model.register_buffer("small", torch.full((2, 2), float(rank()), dtype=torch.float16))
        model.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        nn.init.constant_(model.conv.weight, float(rank()))
        attach(model, sgd(model), "decoupled").detach()
        assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
        return digest([*model.parameters(), *model.buffers()])

    assert len(set(simulate(worker, replicas=2).returns)) == 1


def test_start_check_refuses_models_that_differ_on_every_replica():
    told = errors(lambda: Run("decoupled", seed=rank() // 2, extra={"settings": Settings(start="check")}), replicas=3)
    assert len(set(told)) == 1
    assert told[0].startswith("AgreementError: replicas differ in their first parameters: rank 0: ")
    assert errors(lambda: Run("decoupled", extra={"settings": Settings(start="check")})) == ["", ""]


def test_tied_weights_are_exchanged_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(90, 50)
            self.head = nn.Linear(50, 90, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    def worker():
        model = Tied()
        sync = attach(model, sgd(model), "decoupled", period=2, settings=Settings(check_every=1))
        optimizer = sync.engine.replica.optimizers[0]
        for step in range(4):
            tokens = torch.randint(90, (16,), generator=torch.Generator().manual_seed(10 * step + rank()))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens), tokens.flip(0)).backward()
            optimizer.step()
        assert model.head.weight is model.embed.weight
        names = [entry.name for round_ in sync.engine.rounds for entry in round_.layout.entries]
        return names, digest(model.parameters()), sorted(sync.stats().by_group)

    one, other = simulate(worker, replicas=2).returns
    assert one == other
    assert one[0] == ["embed.weight"]
    assert one[2] == ["embedding", "other"]


@pytest.mark.parametrize(
    "wrap", [partial(torch.compile, backend="eager"), nn.DataParallel], ids=["compiled", "wrapped"]
)
def test_wrapped_and_bare_models_are_the_same_model(wrap):
    def worker():
        model = net(0)
        wrapped = wrap(model) if rank() else model
        sync = attach(wrapped, sgd(model), "diloco", period=2)
        names = [entry.name for entry in sync.engine.rounds[0].layout.entries]
        sync.detach()
        return names

    assert simulate(worker, replicas=2).returns == (list(trainable(net())),) * 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_trains_as_the_bare_one():
    def worker(compiled):
        model = net(0)
        model.drop.p = 0.0
        optimizer = sgd(model)
        forward = torch.compile(model, backend="aot_eager") if compiled else model
        sync = attach(forward, optimizer, "decoupled", period=2, settings=Settings(check_every=1))
        for step in range(1, 5):
            step_once(forward, optimizer, step)
        sync.close()
        return sync.fingerprint()

    assert simulate(lambda: worker(True), replicas=2).returns == simulate(lambda: worker(False), replicas=2).returns


def test_weights_are_weights_in_the_mean():
    def worker(weights):
        run = Run("local_sgd", {"period": 2}, extra={"weight": weights[rank()]})
        step_once(run.model, run.optimizer, 1)
        start = [p.detach().clone() for p in net().parameters()]
        with torch.no_grad():
            for p, q in zip(run.model.parameters(), start, strict=True):
                p.copy_(q + 1 + rank())
                p.grad = torch.zeros_like(p)
        run.optimizer.step()
        return [(p - q).mean().item() for p, q in zip(run.model.parameters(), start, strict=True)]

    for weights, expected in (((1, 1), 1.5), ((1, 3), 1.75), ((5.0, 5.0), 1.5), ((lambda: 3.0, 1), 1.25)):
        for moved in simulate(lambda weights=weights: worker(weights), replicas=2).returns:
            assert moved == pytest.approx([expected] * 6, abs=1e-5)


def test_a_weight_function_is_asked_at_every_round():
    def worker():
        asked = []
        run = Run("decoupled", {"period": 2}, extra={"weight": lambda: asked.append(0) or 1.0})
        first = len(asked)
        run.train(1, 7)
        run.sync.close()
        return len(asked) - first

    assert simulate(worker, replicas=2).returns == (4, 4)


def test_every_method_is_found_by_its_name():
    assert sorted(BY_NAME) == sorted(named.__all__)
    assert all(getattr(lowtide, name) is function for name, function in BY_NAME.items())
    assert str(resolve("decoupled", {"period": 7})) == str(lowtide.decoupled(period=7))
    method = lowtide.diloco()
    assert resolve(method, {}) is method


def test_a_transport_that_is_given_is_used_and_left_open():
    given = Loopback()
    model = net()
    sync = attach(model, sgd(model), "ddp", transport=given, settings=ALONE)
    sync.close()
    assert sync.meter.transport is given
    # still usable: it is not ours to close
    attach(model, sgd(model), "ddp", transport=given, settings=ALONE).close()
    given.close()


def test_sessions_follow_one_another_in_a_simulation():
    def worker():
        first = Run("decoupled", {"period": 2}).train(1, 3)
        first.sync.close()
        second = Run("diloco", {"period": 2}, seed=1).train(1, 3)
        second.sync.close()
        return first.digest(), second.digest()

    one, other = simulate(worker, replicas=2).returns
    assert one == other


def test_two_models_train_side_by_side():
    def worker():
        runs = [Run("decoupled", {"period": 2}), Run("diloco", {"period": 3}, adamw, seed=1)]
        for step in range(1, 8):
            for run in runs:
                step_once(run.model, run.optimizer, step)
        for run in runs:
            run.sync.close()
        return [run.digest() for run in runs]

    one, other = simulate(worker, replicas=2).returns
    assert one == other


def test_it_says_what_runs_in_the_log(caplog):
    with caplog.at_level(logging.INFO, logger="lowtide"):
        simulate(lambda: Run("local_sgd", {"period": 5}), replicas=2)
    count = sum(p.numel() for p in net().parameters())
    assert [record.getMessage() for record in caplog.records] == [
        f"local_sgd(period=5), replica {number} of 2, {count} parameters" for number in range(2)
    ]


def test_double_precision_is_warned_of_since_rounds_are_single(caplog):
    model = net().double()
    attach(model, sgd(model), "local_sgd")
    assert [record.getMessage() for record in caplog.records] == [
        "first.weight is float64, but replicas agree in float32: each round rounds it"
    ]


def test_peers_hear_of_a_replica_that_cannot_attach(monkeypatch):
    start = Round.start

    def fails(self, replica, device):
        if rank() == 1:
            raise MemoryError("no room for an anchor")
        start(self, replica, device)

    monkeypatch.setattr(Round, "start", fails)

    def worker():
        try:
            Run("decoupled", {"period": 2}).train(1, 4)
        except (MemoryError, PeerLostError) as error:
            return str(error)
        return ""

    one, other = simulate(worker, replicas=2).returns
    assert other == "no room for an anchor"
    assert "rank 1 stopped: could not attach: MemoryError('no room for an anchor')" in one


def test_a_failed_attach_leaves_no_hook():
    model = net()
    optimizer = sgd(model)
    with pytest.raises(ConfigError, match="unknown buffers policy 'mean'"):
        attach(model, optimizer, buffers="mean")
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("name", METHODS)
def test_replicas_end_as_one_model(name):
    def worker():
        run = case(name).train(1, 7)
        run.sync.close()
        return run.digest(), run.sync.fingerprint(), digest(run.model.buffers())

    result = simulate(worker, replicas=3)
    assert len(set(result.returns)) == 1
    assert len(set(result.fingerprints)) == 1


@pytest.mark.parametrize("name", [name for name in METHODS if name not in PRIVATE])
def test_a_simulation_can_be_repeated_bit_for_bit(name):
    def worker():
        run = case(name).train(1, 5)
        return run.digest()

    first, second = (simulate(worker, replicas=2, seed=4) for _ in range(2))
    assert first.returns == second.returns
    assert first.fingerprints == second.fingerprints


def test_more_replicas_see_more_data():
    def worker():
        run = Run("ddp").train(1, 30)
        x, y = (torch.cat(part) for part in zip(*(batch(999, source) for source in range(100, 120)), strict=True))
        run.model.eval()
        with torch.no_grad():
            return nn.functional.cross_entropy(run.model(x), y).item()

    losses = [simulate(worker, replicas=replicas).returns[0] for replicas in (1, 8)]
    assert all(after < before for before, after in pairwise(losses))


def test_a_rule_that_takes_its_own_share_for_one_of_n_refuses_weights():
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"eager uses its own part as 1/N .*\nhint: leave out weight, or use diloco"):
        attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "eager", weight=2.0)
