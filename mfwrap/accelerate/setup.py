"""Check the arguments of `attach`, and name the parameters of prepared models."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, final

from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mfwrap.arguments import described
from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.collectives import refuse_lone_process
from mfwrap.compatibility.accelerate import models_of, optimizers_of, schedulers_of
from mfwrap.config import StepConfig
from mfwrap.schedules.pickling import pickled_as
from mfwrap.step.accelerator import reduces_each_batch
from mfwrap.step.parameters import network_parameters
from mfwrap.step.ranks.local_norms import CommunicationHook, checked_communication_hook, tap

EMA = ExponentialMovingAverage | Callable[[nn.Module], ExponentialMovingAverage]
"""An average, or a callable that makes one from a prepared model."""

_REFUSED = {
    DistributedType.DEEPSPEED: "DeepSpeed, which updates within its own backward",
    DistributedType.MEGATRON_LM: "Megatron-LM, which has a step of its own",
    DistributedType.XLA: "XLA, whose devices are not supported",
}


def made_average(
    make: Callable[[nn.Module], ExponentialMovingAverage], models: Sequence[nn.Module]
) -> ExponentialMovingAverage:
    """Call `make` with the prepared model, and return the average that it makes.

    Raises:
        TypeError: If `make` does not return an `ExponentialMovingAverage`.
        ValueError: If there is not exactly one model.
    """
    if len(models) != 1:
        msg = (
            "`ema` can be a callable only if exactly one model is trained, got "
            f"{len(models)} models; pass an ExponentialMovingAverage"
        )
        raise ValueError(msg)
    ema = make(models[0])
    if not isinstance(ema, ExponentialMovingAverage):
        msg = f"`ema` must return an ExponentialMovingAverage, got {described(ema)}"
        raise TypeError(msg)
    return ema


def trained_models(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[nn.Module]:
    """Return the models that have at least one parameter in an optimizer."""
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    return [model for model in models if any(id(p) in held for p in model.parameters())]


def named_parameters_of(
    optimizer: Optimizer, models: Sequence[nn.Module]
) -> tuple[dict[str, nn.Parameter], bool]:
    """Return an optimizer's parameters by their names in the prepared models.

    If the parameters belong to several models, their names begin with ``model_<number>.``. A
    parameter that is in no model is named ``outside.<number>``.

    Returns:
        Parameters by name, and whether all of them are in models.
    """
    outside = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    found: dict[str, dict[str, nn.Parameter]] = {}
    for index, model in enumerate(models):
        names = {n: p for n, p in network_parameters(model).items() if id(p) in outside}
        for parameter in names.values():
            del outside[id(parameter)]
        if names:
            found[f"model_{index}"] = names
    named: dict[str, nn.Parameter] = {}
    for prefix, names in found.items():
        named |= names if len(found) == 1 else {f"{prefix}.{n}": p for n, p in names.items()}
    named |= {f"outside.{index}": p for index, p in enumerate(outside.values())}
    return named, not outside


def parameters_of_models(models: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Return the parameters of several models; names begin with the number of the model."""
    return {
        f"model_{index}.{name}": parameter
        for index, model in enumerate(models)
        for name, parameter in network_parameters(model).items()
    }


def check_arguments(
    accelerator: object, config: object, ema: object, communication_hook: object
) -> None:
    """Raise the errors that the docstring of `attach` lists."""
    if not isinstance(accelerator, Accelerator):
        msg = f"`accelerator` must be an accelerate.Accelerator, got {described(accelerator)}"
        raise TypeError(msg)
    if not isinstance(config, StepConfig):
        msg = f"`config` must be a StepConfig or None, got {described(config)}"
        raise TypeError(msg)
    if ema is not None and not isinstance(ema, ExponentialMovingAverage) and not callable(ema):
        msg = (
            "`ema` must be an ExponentialMovingAverage, a callable that makes one from the "
            f"prepared model, or None, got {described(ema)}"
        )
        raise TypeError(msg)
    if "attachment" in accelerator.__dict__:
        msg = "`accelerator` is attached already; call `detach` on the step attached to it first"
        raise RuntimeError(msg)
    if any(held(accelerator) for held in (models_of, optimizers_of, schedulers_of)):
        msg = "`attach` must be called before `accelerator.prepare`, but was called after it"
        raise RuntimeError(msg)
    _check_settings(accelerator, config)
    loop_config(accelerator, config).check_micro_batches(accelerator.gradient_accumulation_steps)
    handler = accelerator.ddp_handler
    of_handler = DDPCommunicationHookType.NO if handler is None else handler.comm_hook
    named = None if of_handler == DDPCommunicationHookType.NO else of_handler
    refuse_second_hook(named, checked_communication_hook(communication_hook))
    config.check_communication_hook(named or communication_hook)


def loop_config(accelerator: Accelerator, config: StepConfig) -> StepConfig:
    """Return the settings of a loop's step, with accelerate's decision when to reduce gradients."""
    return dataclasses.replace(config, sync_each_batch=reduces_each_batch(accelerator))


def _check_settings(accelerator: Accelerator, config: StepConfig) -> None:
    refuse_lone_process(
        accelerator.num_processes,
        "on a CPU pass `cpu=True` to Accelerator or `use_cpu=True` to TrainingArguments, on other "
        "devices use a launcher that sets LOCAL_RANK",
    )
    if config.calculate_per_token_loss:
        msg = (
            "`calculate_per_token_loss` must be False in a loop, which computes its losses itself, "
            "got True"
        )
        raise ValueError(msg)
    steps = accelerator.gradient_accumulation_steps
    if config.gradient_accumulation_steps not in (1, steps):
        msg = (
            f"`gradient_accumulation_steps` must be {steps}, as in the accelerator, or left at 1, "
            f"got {config.gradient_accumulation_steps}"
        )
        raise ValueError(msg)
    if config.not_split:
        msg = (
            "`not_split` must be left out in a loop, which makes its micro-batches itself, got "
            f"{list(config.not_split)}"
        )
        raise ValueError(msg)
    if config.sync_each_batch and not reduces_each_batch(accelerator):
        msg = (
            "`sync_each_batch` must be left out in a loop, where accelerate decides when gradients "
            "are reduced, got True; pass `GradientAccumulationPlugin(sync_each_batch=True)` to the "
            "accelerator, or to a Trainer the `accelerator_config` "
            "{'gradient_accumulation_kwargs': {'sync_each_batch': True}}"
        )
        raise ValueError(msg)
    refused = _REFUSED.get(accelerator.distributed_type)
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        refused = "version 1 of FSDP; pass `fsdp_version=2` to accelerate's FSDP plugin"
    if refused is not None:
        msg = (
            "`accelerator` must train in one process, under DistributedDataParallel or under "
            f"FSDP2, got {refused}"
        )
        raise ValueError(msg)


def refuse_second_hook(
    of_handler: object | None, communication_hook: CommunicationHook | None
) -> None:
    """Raise ``ValueError`` if a communication hook is given in two ways.

    Args:
        of_handler: Hook of accelerate's handler, or the hook's name; ``None`` for no hook.
        communication_hook: Hook that was passed to `attach`; ``None`` for no hook.
    """
    if of_handler is not None and communication_hook is not None:
        msg = (
            "`communication_hook` must be None if the accelerator's DistributedDataParallelKwargs "
            f"have a `comm_hook`, got both (`comm_hook` is {of_handler}); give only one of the two"
        )
        raise ValueError(msg)


def attached_handler_class(
    kind: type, communication_hook: CommunicationHook | None = None
) -> type[Any]:
    """Create a subclass of accelerate's handler that takes local norms before its hook runs.

    Args:
        kind: Class of the handler, ``DistributedDataParallelKwargs``.
        communication_hook: Hook to use if the handler has none.
    """

    def register_comm_hook(handler: Any, model: DistributedDataParallel) -> None:
        recorder = _Recorder()
        kind.register_comm_hook(handler, recorder)  # type: ignore[attr-defined]  # (a handler of accelerate)
        refuse_second_hook(recorder.hook and handler.comm_hook, communication_hook)
        tap(model, recorder.hook or communication_hook)

    methods = {
        "register_comm_hook": register_comm_hook,
        "__reduce_ex__": lambda handler, _protocol: pickled_as(kind, handler),
    }
    return type(f"Attached{kind.__name__}", (kind,), methods)


@final
class _Recorder:
    """Stand in for a model, and record the communication hook that accelerate registers."""

    hook: CommunicationHook | None = None

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self.hook = state, hook
