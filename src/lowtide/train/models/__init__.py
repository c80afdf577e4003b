"""Small models to train with: plain torch, no dependency, no download."""

from lowtide.train.models.gpt import GPT, GPTConfig, gpt2_small_shapes, gpt_small_study, gpt_tiny
from lowtide.train.models.mlp import MLP
from lowtide.train.models.resnet import ResNet, ResNetConfig, resnet18, resnet50, resnet50_shapes

__all__ = [
    "GPT",
    "MLP",
    "GPTConfig",
    "ResNet",
    "ResNetConfig",
    "gpt2_small_shapes",
    "gpt_small_study",
    "gpt_tiny",
    "resnet18",
    "resnet50",
    "resnet50_shapes",
]
