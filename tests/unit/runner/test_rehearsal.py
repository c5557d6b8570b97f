"""`mfwrap validate` tries the first step, so that a valid recipe does not fail later."""

import json

import pytest
import torch

from mfwrap.runner import RecipeError
from mfwrap.runner.rehearsal import rehearse
from support.hub import client_of, serving
from support.recipe_data import recipe_of
from support.recipe_texts import SMALL_LLAMA, parsed

# Ignore the warnings that TRL and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")

SAVES = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}


def test_a_recipe_that_trains(tmp_path, monkeypatch, capfd):
    """The step leaves no file in the recipe's folders, prints nothing, and keeps torch's seed."""
    monkeypatch.chdir(tmp_path)
    monitors = [{"type": "LocalNormMonitor", "folder": "norms"}]
    recipe = parsed(training=SAVES, callbacks=monitors, runner_wrapper={"local_norm": True})
    state = torch.get_rng_state()

    assert rehearse(recipe) is None
    assert list(tmp_path.iterdir()) == []
    assert "".join(capfd.readouterr()) == ""
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("keys", [{"row_losses": True}, {"loss_by": "label"}])
def test_losses_by_row(tmp_path, keys):
    """A recipe with losses by row is tried with batches of its own size."""
    rows = [{"text": "a text", "label": "xy"[n % 2]} for n in range(16)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"type": "json_lines", "path": str(tmp_path / "rows.jsonl"), **keys}

    assert rehearse(recipe_of("causal_lm", data, per_device_train_batch_size=8)) is None


def test_a_metric_that_does_not_exist():
    """A misspelled metric is found before the training, not at its first checkpoint."""
    training = SAVES | {"load_best_model_at_end": True, "metric_for_best_model": "r3"}

    with pytest.raises(RecipeError, match=r"^r\.yaml: the first step fails: KeyError: .*eval_r3"):
        rehearse(parsed(training=training))


@pytest.mark.slow
def test_sizes_that_do_not_fit():
    """Sizes of a model that only its forward refuses are found."""
    config = SMALL_LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 3}
    model = {"config": config, "tokenizer": "bytes"}

    with pytest.raises(RecipeError, match=r"^r: the first step fails: \w+: "):
        rehearse(recipe_of("causal_lm", {"type": "python_topics"}, model=model))


@pytest.mark.slow
def test_a_bad_row_of_data(tmp_path):
    """All rows are checked, also those that the step does not use and those of a large model."""
    rows = [{"text": "a text"}] * 1_500 + [{"text": 5}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"type": "json_lines", "path": str(tmp_path / "rows.jsonl")}
    config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 1}
    for model in (None, {"config": config, "tokenizer": "bytes"}):
        with pytest.raises(RecipeError, match=r"row 1501 .*, at .*rows\.jsonl:1501$"):
            rehearse(recipe_of("causal_lm", data, model=model))


def test_what_is_not_tried():
    """Models that are large or on the hub, and data on the hub, are not loaded."""
    topics = {"type": "python_topics"}
    config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 1}
    large = recipe_of("causal_lm", topics, model={"config": config, "tokenizer": "bytes"})
    remote = recipe_of("causal_lm", topics, model={"path": "org/name"})
    data = recipe_of("causal_lm", {"type": "datasets", "path": "org/name"})

    assert "parameters, more than 30,000,000" in (rehearse(large) or "")
    with serving() as hub, client_of(hub.url):
        assert rehearse(remote) == (
            "`model.path` names a model on the hub: there is no folder 'org/name' here"
        )
        hub.refuses = lambda _: True
        expected = r"model\.path: must name what can be loaded; .*, and the hub does not answer"
        with pytest.raises(RecipeError, match=expected):
            rehearse(remote)
    assert rehearse(data) == "the data are on the hub"
