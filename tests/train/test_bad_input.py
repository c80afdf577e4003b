"""Whatever users may get wrong, in one table: the exact words, on every replica that can know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.train.loops import Run, errors, net, rank, sgd, step_once
from torch import nn

import lowtide
from lowtide import Settings, attach, parts


def run(method="decoupled", **options: Any) -> Callable[[], object]:
    return lambda: Run(method, options)


def by_rank(method="decoupled", *, first=None, second=None, **extra: Any) -> Callable[[], object]:
    """Other options on rank 1."""
    return lambda: Run(method, (second if rank() else first) or {}, extra=extra)


def model_with(change: Callable[[nn.Module], object]) -> Callable[[], object]:
    def worker():
        model = net()
        change(model)
        attach(model, sgd(model))

    return worker


def embedding_loop(method: str) -> Callable[[], object]:
    def worker():
        model = nn.Sequential(nn.Embedding(30, 8, sparse=True), nn.Linear(8, 30))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attach(model, optimizer, method, **({} if method == "ddp" else {"period": 1}))
        nn.functional.cross_entropy(model(torch.arange(4)), torch.arange(4)).backward()
        optimizer.step()

    return worker


def stepping(change: Callable[[Run], object], method="decoupled") -> Callable[[], object]:
    def worker():
        one = Run(method).train(1, 2)
        change(one)
        step_once(one.model, one.optimizer, 3)

    return worker


def replaced(one: Run) -> None:
    one.model.first.bias = nn.Parameter(torch.zeros(40))


def strange_group(one: Run) -> None:
    one.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def half_optimizer() -> None:
    model = net()
    attach(model, torch.optim.SGD(model.first.parameters(), lr=0.1))


def other_optimizer() -> None:
    attach(net(), sgd(nn.Linear(3, 3)))


def another_world() -> None:
    one = Run("noloco", {"group": 3 if rank() else 2})
    one.train(1, 2)


def meta() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    attach(model, sgd(model))


def complex_parameter(model: nn.Module) -> None:
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


CHANGED = "hint: close the session, change requires_grad or parameters, then attach again"
PARAMETERS = "hint: build the same model everywhere, and freeze the same parts before you attach"
METHOD = "hint: give every replica the same method and options"
ALL_METHODS = ", ".join(sorted(lowtide.train.attach.METHODS))

# what is done, and what every replica is told
CASES: dict[str, tuple[Callable[[], object], str]] = {
    "density": (
        run(density=1.5),
        "ConfigError: density must be in (0, 1], not 1.5\nhint: density=1/32 keeps 128 of 4096 coefficients",
    ),
    "density of sparta": (
        run("sparta", density=0.0),
        "ConfigError: density must be in (0, 1], not 0.0\nhint: density=1/32 keeps 128 of 4096 coefficients",
    ),
    "k larger than a chunk": (
        lambda: Run(lowtide.Method("mine", (mine(parts.top_k(count=5000)),))),
        "ConfigError: top_k(count=5000) of tiles with 4096 elements\nhint: at most 4096 of a tile can be kept",
    ),
    "period not a multiple of fragments": (
        run("streaming_diloco", period=10, fragments=3),
        ("ConfigError: period must be a multiple of the fragment count: period=10, fragments=3\n"
        "hint: period=12 is the next valid value"),
    ),
    "more fragments than tensors": (
        run("streaming_diloco", period=14, fragments=7),
        "ConfigError: 6 tensors do not divide into 7 fragments\nhint: fragments=6 is the most that they give",
    ),
    "delay as long as a beat": (
        run("streaming_diloco", period=12, fragments=3, delay=4),
        ("ConfigError: delay must be shorter than a fragment's beat: delay=4, period/fragments=4\n"
        "hint: one fragment at a time is on its way"),
    ),
    "period": (
        run(period=0),
        "ConfigError: period must be a whole number of at least 1, not 0\nhint: it counts optimizer steps",
    ),
    "half a period": (
        run(period=2.5),
        "ConfigError: period must be a whole number of at least 1, not 2.5\nhint: it counts optimizer steps",
    ),
    "bits": (
        run(bits=3),
        ("ConfigError: no quantiser has bits=3\n"
        "hint: bits is one of 1 (sign), 2 (sym2), 4 (stat(16)), 8 (int8), 16 (bf16), 32 (fp32)"),
    ),
    "outer rate": (
        run(outer_lr=-1.0),
        "ConfigError: outer_lr must be positive, not -1.0\nhint: 0.8 is usual without momentum, 0.7 with 0.9",
    ),
    "momentum": (
        run("diloco", momentum=1.0),
        "ConfigError: momentum must be in [0, 1), not 1.0\nhint: 0.9 needs many rounds, 0.6 to 0.8 few",
    ),
    "feedback": (
        run(feedback=1.5),
        "ConfigError: feedback must be in [0, 1], not 1.5\nhint: 0.9 is the usual value; 1 forgets nothing",
    ),
    "unknown method": (
        run("dilocco"),
        f"ConfigError: unknown method 'dilocco'; known: {ALL_METHODS}\nhint: did you mean 'diloco'?",
    ),
    "unknown option": (
        run("diloco", preiod=3),
        ("ConfigError: unknown option of diloco 'preiod'; known: bits, momentum, outer_lr, period\n"
        "hint: did you mean 'period'?"),
    ),
    "unknown preset": (
        run(preset="author"),
        "ConfigError: unknown preset 'author'; known: authors, nesterov, resync\nhint: did you mean 'authors'?",
    ),
    "unknown transform": (
        run(transform="fft"),
        "ConfigError: unknown transform 'fft'; known: dct, none",
    ),
    "unknown buffers policy": (
        lambda: Run(extra={"buffers": "avrage"}),
        "ConfigError: unknown buffers policy 'avrage'; known: average, ignore, rank0\nhint: did you mean 'average'?",
    ),
    "options beside a method": (
        lambda: Run(lowtide.diloco(), {"period": 3}),
        ("ConfigError: options ['period'] beside a finished "
        "diloco(period=30, outer_lr=0.7, momentum=0.9, bits=32)\nhint: give them to the method instead"),
    ),
    "no weight": (
        lambda: Run(extra={"weight": 0.0}),
        "ConfigError: weight must be positive, not 0.0\nhint: samples or steps since the last round, for example",
    ),
    "a negative weight": (
        lambda: Run(extra={"weight": lambda: -2}),
        "ConfigError: weight must be positive, not -2.0\nhint: samples or steps since the last round, for example",
    ),
    "an infinite weight": (
        lambda: Run(extra={"weight": float("inf")}),
        "ConfigError: weight must be positive, not inf\nhint: samples or steps since the last round, for example",
    ),
    "float16": (
        model_with(lambda model: model.half()),
        ("ModelError: first.weight is float16, and updates would be lost in its rounding\n"
        "hint: keep float32 parameters and train under torch.autocast, or use bfloat16"),
    ),
    "meta": (meta, "ModelError: weight has no data yet (device meta)\nhint: load the weights before you attach"),
    "complex": (
        model_with(complex_parameter),
        "ModelError: phase has dtype torch.complex64; only real floating-point parameters can be averaged",
    ),
    "nothing to train": (
        model_with(lambda model: model.requires_grad_(False)),
        "ModelError: the model has no trainable parameter\nhint: set requires_grad before you attach",
    ),
    "an optimizer of a part": (
        half_optimizer,
        ("ModelError: no optimizer given steps norm.weight, norm.bias, second.weight and 1 more\n"
        "hint: pass all optimizers of this model, or freeze what is not trained"),
    ),
    "an optimizer of another model": (
        other_optimizer,
        ("ModelError: no optimizer given steps first.weight, first.bias, norm.weight and 3 more\n"
        "hint: pass all optimizers of this model, or freeze what is not trained"),
    ),
    "frozen after attach": (
        stepping(lambda one: one.model.first.weight.requires_grad_(False)),
        f"ModelError: the trained parameters have changed since attach: first.weight\n{CHANGED}",
    ),
    "replaced after attach": (
        stepping(replaced),
        f"ModelError: the trained parameters have changed since attach: first.bias\n{CHANGED}",
    ),
    "replaced under a method on gradients": (
        stepping(replaced, "ddp"),
        f"ModelError: the trained parameters have changed since attach: first.bias\n{CHANGED}",
    ),
    "add_param_group": (
        stepping(strange_group),
        ("ModelError: the optimizer steps 1 tensors that the model does not have, one of shape (3,)\n"
        "hint: build it from model.parameters() of the model you attach"),
    ),
    "sparse gradients": (
        embedding_loop("ddp"),
        "ModelError: 0.weight has a torch.sparse_coo gradient\nhint: build its nn.Embedding with sparse=False",
    ),
    "sparse gradients of a method on deltas": (embedding_loop("decoupled"), ""),
    "a moment that the optimizer does not keep": (
        lambda: Run("des_loc", {"period": 1, "first_period": 1}).train(1, 1),
        "ModelError: SGD keeps no 'exp_avg' for first.weight\nhint: this method needs an Adam-like inner optimizer",
    ),
    "another model on another rank": (
        lambda: attach(model := nn.Linear(3, 2 + rank()), sgd(model)),
        ("AgreementError: replicas differ in parameters: "
        f"tensor 0 is weight (2, 3) float32 on rank 0 and weight (3, 3) float32 on rank 1\n{PARAMETERS}"),
    ),
    "another part frozen on another rank": (
        model_with(lambda model: model.first.requires_grad_(rank() == 0)),
        ("AgreementError: replicas differ in parameters: tensor 0 is first.weight (40, 6) float32 on rank 0 and "
        f"first.weight (40, 6) float32 frozen on rank 1\n{PARAMETERS}"),
    ),
    "another dtype on another rank": (
        model_with(lambda model: model.bfloat16() if rank() else None),
        ("AgreementError: replicas differ in parameters: tensor 0 is first.weight (40, 6) float32 on rank 0 and "
        f"first.weight (40, 6) bfloat16 on rank 1\n{PARAMETERS}"),
    ),
    "another method on another rank": (
        lambda: Run("ddp" if rank() else "local_sgd"),
        f"AgreementError: replicas differ in method: rank 0 has local_sgd(period=20); rank 1 has ddp()\n{METHOD}",
    ),
    "another option on another rank": (
        by_rank("local_sgd", first={"period": 5}, second={"period": 6}),
        ("AgreementError: replicas differ in method: "
        f"rank 0 has local_sgd(period=5); rank 1 has local_sgd(period=6)\n{METHOD}"),
    ),
    "another group on another rank": (
        another_world,
        ("AgreementError: replicas differ in method: "
        "rank 0 has noloco(period=50, group=2, outer_lr=0.7, momentum=0.5, seed=0); "
        f"rank 1 has noloco(period=50, group=3, outer_lr=0.7, momentum=0.5, seed=0)\n{METHOD}"),
    ),
    "other settings on another rank": (
        lambda: Run(extra={"settings": Settings(check_every=3 + rank())}),
        ("AgreementError: replicas differ in settings: "
        "rank 0 has check_every=3, start=copy, scale_last=False, buffers=average; "
        "rank 1 has check_every=4, start=copy, scale_last=False, buffers=average\n"
        "hint: give every replica the same settings"),
    ),
    "another buffers policy on another rank": (
        lambda: Run(extra={"buffers": "ignore" if rank() else "average"}),
        ("AgreementError: replicas differ in settings: "
        "rank 0 has check_every=None, start=copy, scale_last=False, buffers=average; "
        "rank 1 has check_every=None, start=copy, scale_last=False, buffers=ignore\n"
        "hint: give every replica the same settings"),
    ),
}  # fmt: skip


def mine(select) -> lowtide.Plan:
    return lowtide.Plan(
        when=parts.every(2), signal=parts.delta(), exchange=parts.gathered(parts.chain(select)), outer=parts.sgd(1.0)
    )


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_said_on_every_replica(name):
    worker, said = CASES[name]
    assert errors(worker) == [said, said]


def test_parts_of_ones_own_that_differ_are_told():
    def worker():
        select = parts.top_k(1 / 8) if rank() else parts.top_k(1 / 16)
        Run(lowtide.Method("mine", (mine(select),)))

    one, other = errors(worker)
    assert one == other
    assert one.startswith("AgreementError: replicas differ in plans: rank 0 has ")
    assert one.endswith("\nhint: make the method of the same parts everywhere")


@pytest.mark.parametrize(
    ("what", "versions", "said"),
    [
        ("lowtide", ("0.1.0", "0.2.0"), "hint: install the same version everywhere"),
        ("torch", ("2.13.0", "2.12.1"), "hint: install the same version everywhere: another one may round otherwise"),
    ],
)
def test_another_version_on_another_rank(what, versions, said, monkeypatch):
    card = lowtide.train.attach._card
    monkeypatch.setattr(lowtide.train.attach, "_card", lambda *args: {**card(*args), what: versions[rank()]})
    expected = f"AgreementError: replicas differ in {what}: rank 0 has {versions[0]}; rank 1 has {versions[1]}\n{said}"
    assert errors(run()) == [expected] * 2


def test_another_build_of_the_same_torch_is_no_other_version(monkeypatch):
    def version(_):
        return "2.13.0+cu130" if rank() else "2.13.0+cpu"

    monkeypatch.setattr(torch, "__version__", type("Version", (), {"split": lambda _, mark: version(0).split(mark)})())
    assert errors(run()) == ["", ""]


def test_nothing_is_attached_where_something_was_wrong():
    model = net()
    optimizer = sgd(model)
    for wrong in ({"method": "dilocco"}, {"method": "diloco", "periods": 1}, {"weight": 0}, {"buffers": "x"}):
        with pytest.raises(lowtide.LowtideError):
            attach(model, optimizer, **wrong)
    assert not optimizer._optimizer_step_post_hooks
