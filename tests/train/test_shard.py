from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.train.loops import Run, net, rank, sgd
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lowtide import ConfigError, StateError, attach, simulate
from lowtide.train.shard import Cursor, Shard


def loader(length=40, batch=3, *, shuffle=True, **options):
    return DataLoader(range(length), batch_size=batch, shuffle=shuffle, **options)


def shards(make, size, seed=0, cursors=None):
    return [Shard(make(), cursors[r] if cursors else Cursor(), r, size, seed) for r in range(size)]


def samples(batches) -> list[int]:
    return [int(sample) for batch in batches for sample in batch]


@given(
    length=st.integers(1, 60),
    batch=st.integers(1, 5),
    size=st.integers(2, 5),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
)
def test_an_epoch_is_dealt_out_without_overlap_and_in_equal_parts(length, batch, size, shuffle, seed):
    if length < batch * size:
        with pytest.raises(ConfigError, match=f"{length} samples do not give {size} replicas a batch of {batch}"):
            shards(lambda: loader(length, batch, shuffle=shuffle), size, seed)
        return
    parts = [list(shard) for shard in shards(lambda: loader(length, batch, shuffle=shuffle), size, seed)]
    assert {len(part) for part in parts} == {length // (batch * size)}
    used = [sample for part in parts for sample in samples(part)]
    assert len(set(used)) == len(used) == length // (batch * size) * batch * size
    if not shuffle:
        assert sorted(used) == list(range(len(used)))


def test_replicas_share_one_order_that_changes_with_epoch_and_seed():
    def epochs(seed):
        parts = shards(loader, 2, seed)
        return [sorted(samples(part)) for _ in range(2) for part in parts]

    first = epochs(0)
    assert first == epochs(0)
    assert len({tuple(part) for part in first}) == 4
    assert first != epochs(1)


def test_the_order_of_a_world_of_replicas_draws_nothing_from_the_global_generator():
    before = torch.get_rng_state()
    one, _ = shards(loader, 2)
    iterator = iter(one)
    drawn = torch.get_rng_state()
    list(iterator)
    # what a loader itself draws at its start is all
    torch.set_rng_state(before)
    list(loader(shuffle=False))
    assert torch.equal(torch.get_rng_state(), drawn) or torch.equal(before, drawn)


def test_a_break_keeps_the_place_and_the_next_loop_goes_on_there():
    part, _ = shards(loader, 2)
    whole, _ = shards(loader, 2)
    expected = [samples([batch]) for batch in whole]
    found = []
    for batch in part:
        found.append(samples([batch]))
        if len(found) == 2:
            break
    assert part.cursor.position == 2 * 2 * 3
    assert len(part) == len(expected) - 2
    found += [samples([batch]) for batch in part]
    assert found == expected
    assert (part.cursor.epoch, part.cursor.position) == (1, 0)


@given(
    first=st.integers(1, 5),
    second=st.integers(1, 5),
    done=st.integers(0, 6),
    batches=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    shuffle=st.booleans(),
)
def test_in_another_world_every_sample_of_the_epoch_is_used_at_most_once(first, second, done, batches, shuffle):
    """Any number of replicas, one too, and even another batch."""
    used, saved = [], []
    for shard in shards(lambda: loader(61, batches[0], shuffle=shuffle), first):
        iterator = iter(shard)
        for _ in range(done):
            used += samples([next(iterator)]) if len(shard) >= 0 and shard.cursor.position < 61 - 4 * first else []
        saved.append(shard.cursor.state_dict())
    cursors = [Cursor.from_state(saved[min(r, first - 1)]) for r in range(second)]
    epoch = cursors[0].epoch
    for shard in shards(lambda: loader(61, batches[1], shuffle=shuffle), second, cursors=cursors):
        iterator = iter(shard)
        for batch in iterator:
            if shard.cursor.epoch != epoch:
                break
            used += samples([batch])
    assert len(used) == len(set(used))


@pytest.mark.parametrize("generator", [None, 5])
@pytest.mark.parametrize("shuffle", [True, False])
def test_alone_the_place_in_the_loaders_own_order_is_kept(shuffle, generator):
    def fresh():
        own = {} if generator is None else {"generator": torch.Generator().manual_seed(generator)}
        return loader(shuffle=shuffle, **own)

    torch.manual_seed(1)
    plain = fresh()
    expected = [[samples([batch]) for batch in plain] for _ in range(2)]
    after = torch.get_rng_state(), None if generator is None else plain.generator.get_state()

    torch.manual_seed(1)
    here = Shard(fresh(), Cursor(), 0, 1, 0)
    found = []
    for batch in here:
        found.append(samples([batch]))
        if len(found) == 5:
            break
    state = here.cursor.state_dict(), torch.get_rng_state()
    own = None if generator is None else here._loader.generator.get_state()

    # another process
    torch.manual_seed(77)
    resumed = fresh()
    there = Shard(resumed, Cursor.from_state(state[0]), 0, 1, 0)
    torch.set_rng_state(state[1])
    if own is not None:
        resumed.generator.set_state(own)
    assert len(there) == len(expected[0]) - 5
    found += [samples([batch]) for batch in there]
    assert found == expected[0]
    assert [samples([batch]) for batch in there] == expected[1]
    assert torch.equal(torch.get_rng_state(), after[0])


def test_what_was_shuffled_by_one_replica_is_not_gone_through_again_by_several(caplog):
    alone = Shard(loader(), Cursor(), 0, 1, 0)
    next(iter(alone))
    for shard in shards(loader, 2, cursors=[Cursor.from_state(alone.cursor.state_dict()) for _ in range(2)]):
        assert len(list(shard)) == 6
        assert shard.cursor.epoch == 2
    said = {record.getMessage() for record in caplog.records}
    assert said == {"the rest of epoch 0 is skipped: one replica has another order than several"}


def test_an_iterable_is_read_by_all_and_each_takes_its_turn():
    parts = [list(shard) for shard in shards(lambda: range(11), 3)]
    assert parts == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_an_iterable_dataset_is_shared_by_batches():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(20))

    parts = [[batch.tolist() for batch in shard] for shard in shards(lambda: DataLoader(Stream(), batch_size=3), 2)]
    assert parts == [[[0, 1, 2], [6, 7, 8], [12, 13, 14]], [[3, 4, 5], [9, 10, 11], [15, 16, 17]]]


@given(done=st.integers(0, 3), first=st.integers(1, 4), second=st.integers(1, 4))
def test_a_place_in_an_iterable_is_for_any_number_of_replicas(done, first, second):
    cursors = []
    for shard in shards(lambda: range(40), first):
        iterator = iter(shard)
        for _ in range(done):
            next(iterator)
        cursors.append(shard.cursor.state_dict())
    place = done * first
    again = shards(lambda: range(40), second, cursors=[Cursor.from_state(cursors[0]) for _ in range(second)])
    assert [next(iter(shard)) for shard in again] == [place + r for r in range(second)]


def test_the_loaders_own_ways_are_kept():
    def collate(items):
        return ("mine", items)

    one, _ = shards(lambda: loader(collate_fn=collate, num_workers=0), 2)
    assert next(iter(one))[0] == "mine"


@pytest.mark.slow
def test_workers_do_not_run_ahead_of_the_place():
    one, _ = shards(lambda: loader(num_workers=2, prefetch_factor=4), 2)
    whole, _ = shards(loader, 2)
    expected = [samples([batch]) for batch in whole]
    iterator = iter(one)
    found = [samples([next(iterator)]) for _ in range(2)]
    assert one.cursor.position == 2 * 2 * 3
    again, _ = shards(loader, 2, cursors=[Cursor.from_state(one.cursor.state_dict()) for _ in range(2)])
    assert found + [samples([batch]) for batch in again] == expected


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: loader(batch=None), "batch_size=None and this RandomSampler"),
        (
            lambda: DataLoader(range(9), batch_size=2, sampler=WeightedRandomSampler([1.0] * 9, 9)),
            "batch_size=2 and this WeightedRandomSampler",
        ),
        (
            lambda: DataLoader(range(9), batch_size=2, sampler=RandomSampler(range(9), replacement=True)),
            "batch_size=2 and this RandomSampler",
        ),
        (
            lambda: DataLoader(range(9), batch_size=2, sampler=RandomSampler(range(9), num_samples=4)),
            "batch_size=2 and this RandomSampler",
        ),
        (
            lambda: DataLoader(range(9), batch_sampler=BatchSampler(SequentialSampler(range(9)), 2, False)),
            "batch_size=None and this SequentialSampler",
        ),
    ],
    ids=["no batch", "weighted", "with replacement", "part", "batch sampler"],
)
def test_a_loader_whose_order_cannot_be_dealt_out_is_refused(make, said):
    with pytest.raises(ConfigError) as refused:
        Shard(make(), Cursor(), 0, 2, 0)
    assert str(refused.value) == (
        f"cannot deal out a loader with {said}\n"
        "hint: pass a DataLoader with shuffle=True or False, or shard it yourself by sync.rank"
    )
    # alone nothing is dealt out
    assert len(list(Shard(make(), Cursor(), 0, 1, 0))) > 0


@pytest.mark.parametrize("wrong", [{"epoch": -1, "position": 0}, {"epoch": 0, "position": -5}])
def test_a_damaged_place_is_refused(wrong):
    with pytest.raises(StateError, match="a data cursor cannot stand at epoch") as refused:
        Cursor.from_state({**wrong, "drawn": None})
    assert str(refused.value).endswith("\nhint: the checkpoint is damaged")


def test_each_name_has_a_place_of_its_own():
    def worker():
        sync = Run("ddp").sync
        train, valid = sync.shard(loader(40)), sync.shard(loader(24), name="valid")
        iterator = iter(train)
        next(iterator)
        assert len(list(valid)) == 4
        return {name: (cursor.epoch, cursor.position) for name, cursor in sync.cursors.items()}

    assert simulate(worker, replicas=2).returns == ({"train": (0, 6), "valid": (1, 0)},) * 2


def test_two_loaders_under_one_name_are_refused():
    sync = Run("ddp").sync
    sync.shard(loader(40))
    sync.shard(loader(40))
    with pytest.raises(ConfigError) as refused:
        sync.shard(loader(24))
    assert str(refused.value) == (
        "a loader of length 8 cannot share the place of one of length 14\n"
        "hint: name each loader: sync.shard(loader, name='valid')"
    )


def test_a_loader_made_anew_for_each_epoch_goes_on():
    def worker():
        sync = Run("ddp").sync
        return [samples(sync.shard(loader(12, 2))) for _ in range(3)]

    epochs = list(zip(*simulate(worker, replicas=2).returns, strict=True))
    for parts in epochs:
        assert sorted(parts[0] + parts[1]) == list(range(12))
    assert len({tuple(parts[0]) for parts in epochs}) == 3


def test_a_checkpoint_moves_the_shards_that_exist_already():
    def worker():
        run = Run("ddp")
        shard = run.sync.shard(loader())
        iterator = iter(shard)
        first = [samples([next(iterator)]) for _ in range(3)]
        rest = [samples([batch]) for batch in shard.__class__(loader(), Cursor(0, 18), rank(), 2, 0)]
        buffer = io.BytesIO()
        torch.save(run.sync.state_dict(), buffer)
        buffer.seek(0)
        model = net()
        again = attach(model, sgd(model), "ddp")
        there = again.shard(loader())
        again.load_state_dict(torch.load(buffer, weights_only=True))
        assert [samples([batch]) for batch in there] == rest
        return sum(map(len, first))

    assert simulate(worker, replicas=2).returns == (9, 9)
