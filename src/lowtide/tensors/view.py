"""The parameters and buffers of a model, by name: tied ones once, frozen ones left out."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from lowtide.errors import ModelError
from lowtide.tensors.layout import Entry

# what torch.compile, DDP and FSDP put into the names of a model they wrap
_WRAPPERS = ("_orig_mod.", "module.", "_fsdp_wrapped_module.")


def canonical(name: str) -> str:
    """A parameter's name without what `torch.compile` and the data-parallel wrappers put in front.

    >>> canonical("_orig_mod.module.blocks.0.weight")
    'blocks.0.weight'
    """
    parts = name.split(".")
    kept = [part for part in parts[:-1] if f"{part}." not in _WRAPPERS]
    return ".".join([*kept, parts[-1]])


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that are trained, in the order of the model; tensors that share storage count once."""
    found: dict[str, nn.Parameter] = {}
    seen: set[tuple[int, int, int]] = set()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        storage = local(parameter).untyped_storage().data_ptr()
        place = (storage, int(local(parameter).storage_offset()), parameter.numel())
        # two parameters over the same memory are one, even if they are not the same object
        if storage and place in seen:
            continue
        seen.add(place)
        key = canonical(name)
        if key in found:
            raise ModelError(f"two parameters are called {key!r} once wrappers are taken off\nhint: rename one of them")
        if not parameter.is_floating_point():
            raise ModelError(f"{key} has dtype {parameter.dtype}; only real floating-point parameters can be averaged")
        found[key] = parameter
    if not found:
        raise ModelError("the model has no trainable parameter\nhint: set requires_grad before you attach")
    return found


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """The model's persistent and other buffers by name, each tensor once."""
    found: dict[str, Tensor] = {}
    for name, buffer in model.named_buffers():
        found.setdefault(canonical(name), buffer)
    return found


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds: the shard of a DTensor, else the tensor itself."""
    shard = getattr(tensor, "to_local", None)
    return shard() if callable(shard) else tensor


def entries(model: nn.Module, parameters: dict[str, nn.Parameter]) -> tuple[Entry, ...]:
    """One entry for each parameter, with the kind of tensor it is counted under."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return tuple(
        Entry(name, tuple(local(parameter).shape), _kind(parameter, embeddings), parameter.dtype)
        for name, parameter in parameters.items()
    )


def _kind(parameter: nn.Parameter, embeddings: Iterable[int]) -> str:
    if id(parameter) in embeddings:
        return "embedding"
    return {0: "vector", 1: "vector", 2: "matrix"}.get(parameter.dim(), "convolution")
