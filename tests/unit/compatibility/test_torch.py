"""Private names of torch do what mfwrap uses them for."""

import inspect
import warnings

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, SequentialLR
from torch.utils.checkpoint import checkpoint

from mfwrap.compatibility import torch as names


def test_functions_of_lists_equal_those_of_tensors():
    """Each function of a list does what torch's function of one tensor does."""
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(2, 3, generator=generator) for _ in range(2))
    share = torch.tensor(0.25)

    def changed(function, *arguments):
        lists = [[each.clone()] if isinstance(each, torch.Tensor) else each for each in arguments]
        function(*lists)
        return lists[0][0]

    assert torch.equal(changed(names.foreach_add_, first, second), first + second)
    assert torch.equal(changed(names.foreach_mul_, first, 3.0), first * 3.0)
    assert torch.equal(changed(names.foreach_div_, first, 3.0), first / 3.0)
    assert torch.equal(changed(names.foreach_copy_, first, second), second)
    assert torch.equal(changed(names.foreach_clamp_min_, first, 0.5), first.clamp(min=0.5))
    assert torch.equal(changed(names.foreach_clamp_max_, first, 0.5), first.clamp(max=0.5))
    expected = first.lerp(second, share)
    assert torch.equal(changed(names.foreach_lerp_, first, second, share), expected)
    assert names.foreach_norm([first])[0] == torch.linalg.vector_norm(first)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_precision_of_products_is_torchs(precision):
    """The setting is read without a warning, which torch 2.9.0 itself gives."""
    with warnings.catch_warnings(action="ignore"):
        torch.set_float32_matmul_precision(precision)
    try:
        assert names.matmul_precision() == precision
    finally:
        with warnings.catch_warnings(action="ignore"):
            torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("newer", "precision"), [("tf32", "high"), ("ieee", "highest")])
@pytest.mark.parametrize("older", ["highest", "high"])
def test_the_precision_that_was_set_by_the_newer_name(older, newer, precision):
    """The newer name counts, whatever was set by the older one."""
    with warnings.catch_warnings(action="ignore"):
        torch.set_float32_matmul_precision(older)
    torch.backends.cuda.matmul.fp32_precision = newer
    try:
        assert names.matmul_precision() == precision
    finally:
        with warnings.catch_warnings(action="ignore"):
            torch.set_float32_matmul_precision("highest")


def test_a_batch_norm_of_another_library_is_one():
    """Apex and others derive their own from torch's base class."""

    class Own(nn.modules.batchnorm._BatchNorm):
        pass

    assert issubclass(Own, names.BatchNorm)
    assert all(issubclass(kind, names.BatchNorm) for kind in (nn.BatchNorm2d, nn.SyncBatchNorm))


def test_a_version_grows_with_each_change_in_place():
    """`version_of` tells whether a tensor was written to; torch does not count in inference."""
    tensor = torch.zeros(2)
    before = names.version_of(tensor)

    tensor.add_(1)

    assert names.version_of(tensor) == before + 1
    with torch.inference_mode():
        assert names.version_of(torch.zeros(2)) == 0


def test_hooks_of_a_parameter_can_be_lifted():
    """Hooks that are taken out of the result are not called by backward."""
    parameter, calls = nn.Parameter(torch.ones(1)), []
    assert names.post_accumulate_hooks(parameter) == {}
    parameter.register_post_accumulate_grad_hook(calls.append)

    parameter.sum().backward()
    names.post_accumulate_hooks(parameter).clear()
    parameter.sum().backward()

    assert len(calls) == 1


def test_a_function_is_called_at_the_end_of_backward():
    """All gradients are there when the function is called."""
    first, second = (nn.Parameter(torch.ones(1)) for _ in range(2))
    seen = []
    loss = first.sum() + second.sum()
    loss.register_hook(
        lambda _: names.call_after_backward(lambda: seen.append((first.grad, second.grad)))
    )

    loss.backward()

    assert seen == [(torch.ones(1), torch.ones(1))]


def test_a_compiled_module_is_recognized():
    """A module that was compiled in place has a call that can be replaced."""
    module = nn.Linear(1, 1)
    assert names.compiled_call(module) is None
    assert not names.is_compiled(module)

    module.compile(backend="eager")
    assert names.compiled_call(module) is not None
    assert names.is_compiled(module)
    names.set_compiled_call(module, lambda _: "ours")

    assert module(torch.ones(1)) == "ours"


def test_the_wrapper_of_a_compiled_module_is_recognized():
    """``torch.compile`` wraps a module and keeps it under a known name."""
    module = nn.Linear(1, 1)
    wrapper = torch.compile(module, backend="eager")

    assert names.is_compiled(wrapper)
    assert wrapper.get_submodule(names.COMPILED_MODULE) is module


def test_functions_that_load_weights_are_listed():
    """A module's own method and its hooks are in the list."""

    def hook(*_):
        return None

    class Own(nn.Linear):
        def _load_from_state_dict(self, *_):
            return None

    module = Own(1, 1)
    module.register_load_state_dict_pre_hook(hook)
    own, *hooks = names.loading_functions(module)

    assert own is Own._load_from_state_dict
    assert len(hooks) == 1


def test_hooks_of_a_step_are_listed():
    """Hooks before and after an optimizer's step are in the list."""
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    assert names.step_hooks(optimizer) == []

    optimizer.register_step_pre_hook(print)
    optimizer.register_step_post_hook(repr)

    assert names.step_hooks(optimizer) == [print, repr]


def test_schedules_inside_a_schedule():
    """Schedules of schedules are found, and steps are counted from the construction on."""
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    parts = [ConstantLR(optimizer), ConstantLR(optimizer)]

    assert names.schedules_inside(SequentialLR(optimizer, parts, [1])) == parts
    assert names.schedules_inside(ChainedScheduler(parts)) == parts
    assert names.schedules_inside(parts[0]) == []
    before = names.step_count(parts[0])
    optimizer.step()
    parts[0].step()
    assert names.step_count(parts[0]) == before + 1


@pytest.mark.usefixtures("_one_rank")
def test_names_of_replicas():
    """A hook is found once it is registered; the methods exist."""
    part = DistributedDataParallel(nn.Linear(1, 1))
    assert names.communication_hooks(part) == []
    assert names.waits_before_forward(part)

    def hook(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    part.register_comm_hook("state", hook)
    [(_, state)] = names.communication_hooks(part)

    assert state == "state"
    assert callable(getattr(part, names.PRE_FORWARD))


@pytest.mark.usefixtures("_one_rank")
def test_the_default_store_keeps_values():
    """The store is the one that was given to the process group."""
    names.default_store().set("key", "value")

    assert names.default_store().get("key") == b"value"
    # More parameters than these would need a value.
    store = distributed.distributed_c10d._get_default_store
    assert not inspect.signature(store).parameters


def test_a_backward_pass_is_told_from_a_forward_pass():
    """Gradient checkpointing repeats a forward pass within the backward pass."""
    seen = []

    def forward(x):
        seen.append(names.is_in_backward())
        return x.exp()

    checkpoint(forward, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()

    assert seen == [False, True]
    assert not names.is_in_backward()
