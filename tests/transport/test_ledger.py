from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import StateError
from lowtide.messages import Tag
from lowtide.transport.ledger import UNGROUPED, Entry, Ledger, Totals, split

count = st.integers(0, 10**12)
totals = st.builds(Totals, count, count, count, count, count, st.floats(0, 1e6))
groups = st.lists(st.tuples(st.sampled_from("abcde"), st.floats(0, 1)), max_size=6).map(tuple)
entries = st.builds(
    Entry,
    kind=st.just("Gather"),
    tag=st.builds(Tag, st.just("plan"), st.just(0), cause=st.sampled_from(["round", "copy"]), groups=groups),
    totals=totals,
)


@given(totals, groups)
def test_parts_by_group_sum_exactly(whole, shares):
    parts = split(whole, shares)
    for field in ("payload", "sent", "received", "dense_reference"):
        values = [getattr(part, field) for part in parts.values()]
        assert sum(values) == getattr(whole, field)
        assert all(value >= 0 for value in values)
    assert sum(part.seconds for part in parts.values()) == pytest.approx(whole.seconds)


def test_parts_are_in_proportion_and_count_the_event_for_each_group():
    parts = split(Totals(1, 1000, 3000, 600, 0, 2.0), (("matrices", 0.9), ("tail", 0.1)))
    assert parts["matrices"] == Totals(1, 900, 2700, 540, 0, 1.8)
    assert parts["tail"] == Totals(1, 100, 300, 60, 0, pytest.approx(0.2))


def test_without_groups_everything_is_other():
    whole = Totals(1, 10)
    assert split(whole, ()) == {UNGROUPED: whole}
    assert split(whole, (("a", 0.0),)) == {UNGROUPED: whole}


def test_fractions_need_not_sum_to_one_and_may_repeat_a_group():
    assert split(Totals(1, 100), (("a", 3.0), ("b", 1.0)))["a"].payload == 75
    repeated = split(Totals(2, 100), (("a", 1.0), ("b", 2.0), ("a", 1.0)))
    assert (repeated["a"].payload, repeated["b"].payload) == (50, 50)


@given(st.lists(entries, max_size=5))
def test_causes_and_groups_each_sum_to_the_total(some):
    ledger = Ledger()
    for entry in some:
        ledger = ledger.plus(entry)
    for table in (ledger.by_cause, ledger.by_group):
        for field in ("payload", "sent", "received", "dense_reference"):
            assert sum(getattr(part, field) for part in table.values()) == getattr(ledger.total, field)
    assert ledger.total.events == sum(entry.totals.events for entry in some)


@given(st.lists(entries, max_size=3), count)
def test_a_ledger_survives_json(some, reference):
    ledger = Ledger().plus_reference(reference, "round")
    for entry in some:
        ledger = ledger.plus(entry)
    assert Ledger.from_dict(json.loads(json.dumps(ledger.to_dict()))) == ledger


def test_adding_leaves_the_snapshot_before_as_it_was():
    before = Ledger()
    after = before.plus(Entry("Gather", Tag("plan", 0), Totals(1, 5)))
    assert before == Ledger()
    assert (before.by_cause, after.by_cause) == ({}, {"round": Totals(1, 5)})


@pytest.mark.parametrize(
    "state", [{}, {"total": {}, "by_cause": {}}, {"total": {"sent_bytes": 1}, "by_cause": {}, "by_group": {}}, None, 3]
)
def test_what_is_no_ledger_is_refused(state):
    with pytest.raises(StateError, match="no saved ledger"):
        Ledger.from_dict(state)


def test_the_dense_reference_is_added_to_its_cause():
    ledger = Ledger().plus_reference(70, "round").plus_reference(30, "drift")
    assert ledger.total == Totals(dense_reference=100)
    assert ledger.by_cause["drift"].to_dict()["dense_reference"] == 30
