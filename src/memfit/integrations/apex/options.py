"""What `amp.initialize` may be given: models, optimizers, and properties that go with the level."""

from __future__ import annotations

from dataclasses import replace
from types import GeneratorType
from typing import Any

import torch
from torch.optim import Optimizer

from memfit.core.errors import PrecisionError
from memfit.core.precision import DYNAMIC, Level
from memfit.techniques.precision.weights import check_optimizer, check_weights

_PARALLEL = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)


def listed(given: Any, kind: type, name: str) -> list[Any]:
    """What was given as a list; [] for None. Raises PrecisionError for anything but one `kind` or a list of them."""
    if given is None:
        return []
    if isinstance(given, kind):
        return [given]
    if isinstance(given, list) and all(isinstance(each, kind) for each in given):
        return given
    what = "a generator, which can be read only once" if isinstance(given, GeneratorType) else f"a {type(given).__name__}"
    raise PrecisionError(
        f"amp.initialize was given {what}, for {name}. Give one {kind.__name__}, or a list of them: list({name})."
    )


_USES = {
    "cast_model_type": "casts no model",
    "keep_batchnorm_fp32": "casts no model",
    "master_weights": "keeps all weights in float32",
}


def override(level: Level, options: dict[str, Any]) -> Level:
    """The level with the properties the program gave. Raises PrecisionError for one it has no use for."""
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if level.by_lists and name in _USES and not (name == "cast_model_type" and given[name] is torch.float32):
            raise PrecisionError(
                f"{name}={given[name]!r} does not make sense with {level.name}, which {_USES[name]}. Leave it out, or use O2."
            )
    if given.get("patch_torch_functions", level.by_lists) != level.by_lists:
        raise PrecisionError(
            f"patch_torch_functions={given['patch_torch_functions']} does not go with {level.name}: choosing the precision of each operation is what O1 "
            "is, and what the others are not. Leave it out, or choose the level."
        )
    changes: dict[str, Any] = {}
    if "cast_model_type" in given and not level.by_lists:
        changes["half_weights"] = given["cast_model_type"] is not torch.float32
    if "keep_batchnorm_fp32" in given:
        changes["float32_norms"] = _read_bool(given["keep_batchnorm_fp32"])
    if "master_weights" in given:
        changes["masters"] = bool(given["master_weights"])
    if "loss_scale" in given:
        changes["loss_scale"] = _read_scale(given["loss_scale"])
    return replace(level, **changes)


def _read_bool(value: bool | str) -> bool:
    if value in (True, False, "True", "False"):
        return value in (True, "True")
    raise PrecisionError(f"keep_batchnorm_fp32={value!r} is neither True nor False. As text, write 'True' or 'False'.")


def _read_scale(value: float | str) -> float | str:
    if value == DYNAMIC:
        return DYNAMIC
    try:
        return float(value)
    except ValueError:
        raise PrecisionError(f"loss_scale={value!r} is no number. Give one, like 128.0, or 'dynamic'.") from None


def check(models: list[torch.nn.Module], optimizers: list[Optimizer], level: Level) -> None:
    """Raise PrecisionError for models that are half, complex or wrapped for parallel training already, and for optimizers of half weights."""
    for model in models:
        if isinstance(model, _PARALLEL):
            raise PrecisionError(
                f"The model is wrapped in {type(model).__name__} already. Call amp.initialize first and wrap what it gives back."
            )
        check_weights(model, level)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dtype in (torch.float16, torch.bfloat16):
                raise PrecisionError(
                    f"{name} of {type(model).__name__} is {str(tensor.dtype).removeprefix('torch.')} already. amp.initialize wants a float32 model at every "
                    "level and casts what is to be cast itself: leave out .half()."
                )
    for optimizer in optimizers:
        check_optimizer(optimizer, level)
