from __future__ import annotations

import dataclasses

import pytest

from lowtide import ConfigError, Settings


def test_the_defaults():
    assert dataclasses.asdict(Settings()) == {
        "timeout": 60.0, "check_every": None, "alone": "plain", "start": "copy", "scale_last": False,
    }  # fmt: skip


def test_settings_are_given_by_name_and_stay_as_they_are():
    with pytest.raises(TypeError):
        Settings(60.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().timeout = 1.0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"timeout": 0}, "timeout must be positive, not 0\nhint: it is in seconds; 60 is usual"),
        ({"timeout": -2.5}, "timeout must be positive, not -2.5\nhint: it is in seconds; 60 is usual"),
        ({"timeout": float("nan")}, "timeout must be positive, not nan\nhint: it is in seconds; 60 is usual"),
        ({"check_every": -1}, "check_every must be at least 0, not -1\nhint: 0 switches the check off"),
        ({"alone": "Method"}, "unknown value of alone 'Method'; known: method, plain\nhint: did you mean 'method'?"),
        ({"start": "chek"}, "unknown value of start 'chek'; known: check, copy\nhint: did you mean 'check'?"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(wrong, said):
    with pytest.raises(ConfigError) as refused:
        Settings(**wrong)
    assert str(refused.value) == said
