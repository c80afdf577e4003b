"""Signal <-> payload; pure, knows neither models nor networks."""

from lowtide.codec.base import Codec, Coefficients, Transform, Turn
from lowtide.codec.chain import Chain, chain
from lowtide.codec.quantize import Quantizer, bf16, by_bits, e3m0, fp16, fp32, int8, linear, sign, stat, sym2
from lowtide.codec.select import Selector, all_, cyclic, generator, random, strata, threshold, top_k, top_k_tensor
from lowtide.codec.transform import Identity, dct, identity, transform_named

__all__ = [
    "Chain",
    "Codec",
    "Coefficients",
    "Identity",
    "Quantizer",
    "Selector",
    "Transform",
    "Turn",
    "all_",
    "bf16",
    "by_bits",
    "chain",
    "cyclic",
    "dct",
    "e3m0",
    "fp16",
    "fp32",
    "generator",
    "identity",
    "int8",
    "linear",
    "random",
    "sign",
    "stat",
    "strata",
    "sym2",
    "threshold",
    "top_k",
    "top_k_tensor",
    "transform_named",
]
