"""What a run tells its callbacks, and how they stop it."""

import pytest

from mfwrap.model.callback import Callback, CallbackParameters, RunContext
from support.model_runs import HOOKS


def test_parameters_are_keys_and_attributes():
    """Both ways of reading and writing are one."""
    parameters = CallbackParameters(cur_step_num=1)
    parameters.own = 2
    parameters["other"] = 3

    assert (parameters.cur_step_num, parameters["own"], parameters.other) == (1, 2, 3)
    assert not hasattr(parameters, "metrics")
    with pytest.raises(AttributeError, match=r"no `metrics`, but .*'cur_step_num'"):
        _ = parameters.metrics


def test_a_stop_stays_requested():
    """Once asked for."""
    context = RunContext(CallbackParameters())
    assert not context.get_stop_requested()
    context.request_stop()

    assert context.get_stop_requested()


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_call_the_older_names(hook):
    """Those of training and of evaluation the same."""
    calls = []
    older = hook.replace("on_train_", "").replace("on_eval_", "")
    callback = type("Older", (Callback,), {older: lambda _, context: calls.append(context)})()
    context = RunContext(CallbackParameters())
    getattr(callback, hook)(context)

    assert calls == [context]
