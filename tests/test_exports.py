"""What a user may import: the names of `lowtide` and `lowtide.parts`, and that importing them changes nothing else."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

PUBLIC = ["lowtide", "lowtide.parts"]
PROBE = """
import logging, os, random, signal, threading, warnings
import numpy, torch
def state():
    return (
        dict(os.environ), torch.get_num_threads(), torch.get_default_dtype(), torch.random.get_rng_state().tolist(),
        random.getstate(), numpy.random.get_state()[1].tolist(), list(warnings.filters), list(logging.root.handlers),
        threading.active_count(), signal.getsignal(signal.SIGINT),
    )
before = state()
import lowtide, lowtide.parts
assert state() == before
"""


def literal_all(module: ModuleType) -> list[str]:
    for node in ast.parse(Path(str(module.__file__)).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
            assert isinstance(names, list)
            return names
    pytest.fail(f"{module.__name__} has no literal __all__")


@pytest.mark.parametrize("name", PUBLIC)
def test_all_is_what_is_visible(name):
    module = importlib.import_module(name)
    names = literal_all(module)
    # rooms become attributes of the package as soon as anybody imports them; `annotations` is a __future__ feature
    visible = {
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and not isinstance(value, ModuleType) and key != "annotations"
    }
    listed = {key for key in names if not isinstance(getattr(module, key, None), ModuleType)}
    assert listed - {"__version__"} == visible


@pytest.mark.parametrize("name", PUBLIC)
def test_all_is_sorted_without_doubles_and_exists(name):
    module = importlib.import_module(name)
    names = literal_all(module)
    assert len(names) == len(set(names))
    assert [key for key in names if not hasattr(module, key)] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_module_holds_names_and_no_code(name):
    module = importlib.import_module(name)
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    body = ast.parse(Path(str(module.__file__)).read_text()).body
    assert ast.get_docstring(ast.Module(body, [])), f"{name} has no docstring"
    assert [ast.unparse(node) for node in body[1:] if not isinstance(node, allowed)] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented(name):
    module = importlib.import_module(name)
    things = {key: getattr(module, key) for key in literal_all(module)}
    callables = {key: thing for key, thing in things.items() if callable(thing)}
    assert [key for key, thing in callables.items() if not (thing.__doc__ or "").strip()] == []


def test_importing_changes_nothing_in_the_process():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
