"""The small models: shapes, sizes, causality, and that each of them learns."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.errors import ConfigError
from lowtide.train.data import generated_images
from lowtide.train.models import (
    GPT,
    MLP,
    GPTConfig,
    ResNet,
    ResNetConfig,
    gpt2_small_shapes,
    gpt_small_study,
    gpt_tiny,
    resnet18,
    resnet50,
    resnet50_shapes,
)
from lowtide.train.models.gpt import rotate, rotation


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def descend(model: nn.Module, loss, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


@pytest.mark.parametrize(("config", "parameters"), [(gpt_tiny(), 115_008), (gpt_small_study(), 656_256)])
def test_gpt_presets_have_the_sizes_they_name(config, parameters):
    assert size(GPT(config)) == parameters


def test_gpt_predicts_from_the_past_only():
    model = GPT(gpt_tiny())
    tokens = torch.randint(256, (1, 32))
    other = tokens.clone()
    other[:, 20:] = (other[:, 20:] + 1) % 256
    torch.testing.assert_close(model(tokens)[:, :20], model(other)[:, :20])
    assert not torch.allclose(model(tokens)[:, 20:], model(other)[:, 20:])


def test_gpt_sees_the_order_of_tokens():
    model = GPT(gpt_tiny())
    tokens = torch.tensor([[1, 2, 3, 4]])
    swapped = torch.tensor([[2, 1, 3, 4]])
    assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1])


def test_gpt_loss_is_the_cross_entropy_of_the_next_token():
    model = GPT(gpt_tiny())
    tokens = torch.randint(256, (3, 17))
    chances = model(tokens[:, :-1]).log_softmax(-1)
    expected = -chances.gather(-1, tokens[:, 1:].unsqueeze(-1)).mean()
    torch.testing.assert_close(model.loss(tokens), expected)


def test_gpt_starts_near_the_loss_of_knowing_nothing():
    model = GPT(gpt_small_study())
    assert abs(model.loss(torch.randint(256, (8, 65))).item() - math.log(256)) < 0.8


def test_gpt_learns_a_repeated_text():
    model = GPT(GPTConfig(layers=1, width=32, heads=2, context=16))
    tokens = torch.arange(17).repeat(4, 1)
    losses = descend(model, lambda: model.loss(tokens), 40)
    assert losses[-1] < 0.2 * losses[0]


def test_tied_gpt_shares_one_tensor_and_untied_has_two():
    tied, untied = (GPT(GPTConfig(layers=1, width=32, tied=flag)) for flag in (True, False))
    assert tied.head.weight is tied.embedding.weight
    assert size(untied) - size(tied) == 256 * 32


def test_gpt_keeps_no_buffers():
    assert list(GPT(gpt_tiny()).buffers()) == []


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    turn = rotation(8, 16, torch.zeros(1))
    x = torch.randn(1, 16).expand(8, 16)
    turned = rotate(x, turn)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    products = turned @ turned.T
    torch.testing.assert_close(products[0, 3], products[4, 7])


def test_rotation_takes_the_type_it_is_used_in():
    cos, sin = rotation(4, 8, torch.zeros(1, dtype=torch.bfloat16))
    assert (cos.dtype, sin.dtype) == (torch.bfloat16, torch.bfloat16)
    assert GPT(gpt_tiny()).to(torch.bfloat16)(torch.zeros(1, 4, dtype=torch.long)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 100, "heads": 8}, "width 100 does not give each of 8 heads an even share\nhint: a multiple of 16"),
        ({"layers": 0}, "sizes must be positive"),
    ],
)
def test_a_gpt_that_cannot_be_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        GPTConfig(**options)


def test_gpt_refuses_more_tokens_than_its_context():
    with pytest.raises(ConfigError, match="65 tokens in a context of 64"):
        GPT(gpt_tiny())(torch.zeros(1, 65, dtype=torch.long))


def test_gpt2_small_shapes_are_unique_and_count_124_million():
    shapes = dict(gpt2_small_shapes())
    assert len(shapes) == len(gpt2_small_shapes()) == 2 + 12 * 12 + 2
    assert sum(math.prod(shape) for shape in shapes.values()) == 124_439_808
    assert shapes["wte.weight"] == (50_257, 768)
    assert shapes["h.11.mlp.c_proj.weight"] == (3_072, 768)


@pytest.mark.parametrize(("build", "parameters"), [(resnet18, 11_689_512), (resnet50, 25_557_032)])
def test_resnets_have_the_published_sizes(build, parameters):
    with torch.device("meta"):
        assert size(build()) == parameters


def test_resnet50_shapes_are_those_of_the_model():
    with torch.device("meta"):
        model = resnet50()
    assert resnet50_shapes() == [(name, tuple(value.shape)) for name, value in model.named_parameters()]
    assert ("head.weight", (1000, 2048)) in resnet50_shapes()


@pytest.mark.parametrize("bottleneck", [False, True])
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("small_images", [False, True])
def test_resnets_of_all_kinds_give_logits_and_gradients(bottleneck, norm, small_images):
    model = ResNet(ResNetConfig((1, 1), bottleneck, 8, 5, norm, small_images))
    logits = model(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 5)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_small_stem_keeps_the_resolution():
    features = {flag: [] for flag in (False, True)}
    for flag, seen in features.items():
        model = ResNet(ResNetConfig((1,), width=8, classes=2, small_images=flag))
        model.stages.register_forward_hook(lambda *args, seen=seen: seen.append(args[-1].shape[-1]))
        model(torch.zeros(2, 3, 32, 32))
    assert features == {False: [8], True: [32]}


@pytest.mark.parametrize(("norm", "buffers"), [("group", 0), ("batch", 60)])
def test_only_batch_norm_has_buffers(norm, buffers):
    assert len(list(resnet18(width=16, norm=norm).buffers())) == buffers


def test_group_norm_treats_every_picture_alone():
    model = resnet18(width=16, classes=4, norm="group", small_images=True)
    images = torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(model(images)[:1], model(images[:1]), rtol=1e-4, atol=1e-5)


def test_an_unknown_norm_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"unknown norm 'groups'.*\nhint: did you mean 'group'"):
        resnet18(norm="groups")


def test_a_small_resnet_learns_generated_images():
    images, labels = generated_images(classes=4, count=64, size=16).tensors
    model = ResNet(ResNetConfig((1, 1), width=16, classes=4, small_images=True))
    losses = descend(model, lambda: F.cross_entropy(model(images), labels), 30)
    assert losses[-1] < 0.5 * losses[0]


def test_mlp_is_linear_layers_with_relu_between():
    model = MLP([6, 5, 4])
    first, _, last = model.layers
    x = torch.randn(3, 2, 3)
    torch.testing.assert_close(model(x), last(F.relu(first(x.flatten(1)))))
    assert size(model) == 6 * 5 + 5 + 5 * 4 + 4


@pytest.mark.parametrize("widths", [[], [3], [3, 0, 2]])
def test_an_mlp_without_layers_is_refused(widths):
    with pytest.raises(ConfigError, match="hint: give at least two, all of them positive"):
        MLP(widths)


@pytest.mark.parametrize("build", [lambda: GPT(gpt_tiny()), lambda: resnet18(width=8, classes=3), lambda: MLP([4, 3])])
def test_the_seed_decides_the_initial_weights(build):
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(torch.cat([value.flatten().float() for value in build().parameters()]))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
