"""Training frameworks wrap the optimizer; what steps inside is what counts."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from tests.train.loops import batch, net, rank, step_once
from torch import nn

from lowtide import ModelError, Settings, attach, simulate
from lowtide.train.agreement import digest

CHECKED = Settings(check_every=1)


class AcceleratedLike(torch.optim.Optimizer):
    """As Accelerate's wrapper: an Optimizer without a step of its own, which skips while gradients accumulate."""

    def __init__(self, optimizer, scaler=None):
        self.optimizer = optimizer
        self.scaler = scaler
        self.sync_gradients = True
        self._is_overflow = False
        # it watches whether the scaler lets the step through
        self._original = optimizer.step
        self._called = False

    @property
    def state(self):
        return self.optimizer.state

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none=None):
        if self.sync_gradients:
            self.optimizer.zero_grad()

    def step(self, closure=None):
        if not self.sync_gradients:
            return
        if self.scaler is None:
            self.optimizer.step(closure)
            return
        self._called = False

        def patched(*args, **kwargs):
            self._called = True
            return self._original(*args, **kwargs)

        self.optimizer.step = patched
        self.scaler.step(self.optimizer, closure) if closure else self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.step = self._original
        self._is_overflow = not self._called


class LightningLike:
    """As Lightning's wrapper: no Optimizer, takes over its attributes, and always steps with a closure."""

    def __init__(self, optimizer):
        self.__dict__ = {name: value for name, value in optimizer.__dict__.items() if name != "step"}
        self._optimizer = self.optimizer = optimizer

    def step(self, closure):
        return self._optimizer.step(closure)


def loss_of(model, step):
    x, y = batch(step)
    return nn.functional.cross_entropy(model(x), y)


def plain(method, options, steps):
    """What the same training gives without a framework."""

    def worker():
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sync = attach(model, optimizer, method, settings=CHECKED, **options)
        for step in range(1, steps + 1):
            step_once(model, optimizer, step)
        sync.close()
        return sync.stats().steps, sync.stats().rounds, digest(model.parameters())

    return simulate(worker, replicas=2).returns


CASES = [("decoupled", {"period": 3}), ("streaming_diloco", {"period": 6, "fragments": 2, "delay": 1}), ("ddp", {})]


@pytest.mark.parametrize(("method", "options"), CASES)
def test_a_wrapper_that_is_an_optimizer_changes_nothing(method, options):
    def worker():
        model = net()
        optimizer = AcceleratedLike(AcceleratedLike(torch.optim.AdamW(model.parameters(), lr=1e-2)))
        with attach(model, optimizer, method, settings=CHECKED, **options) as sync:
            for step in range(1, 8):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
        return sync.stats().steps, sync.stats().rounds, digest(model.parameters())

    assert simulate(worker, replicas=2).returns == plain(method, options, 7)


@pytest.mark.parametrize(("method", "options"), CASES[:2])
def test_a_wrapper_that_steps_with_a_closure_changes_nothing(method, options):
    def worker():
        model = net()
        optimizer = LightningLike(torch.optim.AdamW(model.parameters(), lr=1e-2))
        with attach(model, optimizer, method, settings=CHECKED, **options) as sync:
            for step in range(1, 8):

                def closure(step=step):
                    optimizer._optimizer.zero_grad()
                    loss = loss_of(model, step)
                    loss.backward()
                    return loss

                optimizer.step(closure)
        return sync.stats().steps, sync.stats().rounds, digest(model.parameters())

    assert simulate(worker, replicas=2).returns == plain(method, options, 7)


def test_several_wrapped_optimizers_count_together():
    def worker():
        model = net()
        halves = [
            AcceleratedLike(torch.optim.SGD(part, lr=0.1))
            for part in (list(model.first.parameters()), [*model.norm.parameters(), *model.second.parameters()])
        ]
        with attach(model, halves, "decoupled", period=2, settings=CHECKED) as sync:
            for step in range(1, 6):
                loss_of(model, step).backward()
                for optimizer in halves:
                    optimizer.step()
                    optimizer.zero_grad()
        return sync.stats().steps, digest(model.parameters())

    one, other = simulate(worker, replicas=2).returns
    assert one == other
    assert one[0] == 5


def test_calls_that_only_accumulate_are_no_steps():
    def worker():
        model = net()
        optimizer = AcceleratedLike(torch.optim.SGD(model.parameters(), lr=0.1))
        with attach(model, optimizer, "decoupled", period=2, settings=CHECKED) as sync:
            for micro in range(12):
                optimizer.sync_gradients = micro % 3 == 2
                (loss_of(model, micro) / 3).backward()
                optimizer.step()
                optimizer.zero_grad()
        return sync.stats().steps, sync.stats().rounds

    assert simulate(worker, replicas=2).returns == ((4, 2),) * 2


@pytest.mark.parametrize("fused", [False, True])
def test_under_a_frameworks_scaler_skipped_steps_do_not_count(fused):
    def worker():
        model = net()
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        optimizer = AcceleratedLike(inner, torch.amp.GradScaler("cpu", init_scale=8.0))
        with attach(model, optimizer, "decoupled", period=2, settings=CHECKED) as sync:
            done, step = 0, 0
            while done < 5:
                step += 1
                overflow = torch.inf if step == 2 and rank() == 1 else 1.0
                optimizer.scaler.scale(loss_of(model, step) * overflow).backward()
                optimizer.step()
                optimizer.zero_grad()
                done = sync.stats().steps
        return step, sync.stats().rounds, digest(model.parameters())

    one, other = simulate(worker, replicas=2).returns
    assert (one[0], other[0]) == (5, 6)
    assert one[1:] == other[1:]


@pytest.mark.parametrize("fused", [False, True])
def test_under_a_frameworks_scaler_methods_on_gradients_are_refused(fused):
    model = net()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    optimizer = AcceleratedLike(inner, torch.amp.GradScaler("cpu"))
    attach(model, optimizer, "ddp", settings=Settings(alone="method"))
    optimizer.scaler.scale(loss_of(model, 1)).backward()
    with pytest.raises(ModelError, match="cannot run under a GradScaler"):
        optimizer.step()


@pytest.mark.parametrize("library", ["accelerate", "transformers", "lightning"])
def test_no_framework_is_imported(library):
    import sys

    if importlib.util.find_spec(library) is None:
        assert library not in sys.modules
    else:
        code = f"import lowtide, sys; sys.exit({library!r} in sys.modules)"
        import subprocess

        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_accelerate(accumulate):
    accelerate = pytest.importorskip("accelerate")

    def worker():
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        with attach(model, optimizer, "decoupled", period=3, settings=CHECKED) as sync:
            for step in range(1, 7 * accumulate + 1):
                with accelerator.accumulate(model):
                    optimizer.zero_grad()
                    accelerator.backward(loss_of(model, step))
                    optimizer.step()
        return sync.stats().steps, digest(model.parameters())

    one, other = simulate(worker, replicas=2).returns
    assert one == other
    assert one[0] == 7


@pytest.mark.filterwarnings("ignore")
def test_transformers_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x, labels):
            logits = self.net(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = batch(0, 0, 48)
    data = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    sync = attach(model, optimizer, "decoupled", period=2, settings=Settings(alone="method"))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    transformers.Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, schedule)).train()
    sync.close()
    assert (sync.stats().steps, sync.stats().rounds) == (6, 3)


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def on_train_start(self):
            self.sync = attach(self, self.optimizers(), "decoupled", period=2, settings=Settings(alone="method"))

        def training_step(self, both, _):
            return nn.functional.cross_entropy(self.net(both[0]), both[1])

        def on_train_end(self):
            self.sync.close()

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(0, 0, 48)), batch_size=4)
    module = Module()
    trainer = lightning.Trainer(
        max_steps=6, accumulate_grad_batches=2, accelerator="cpu", logger=False, default_root_dir=tmp_path,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    assert (module.sync.stats().steps, module.sync.stats().rounds) == (6, 3)
