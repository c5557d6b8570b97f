"""What should not be so in any run is noted once, and a run as usual gets no note."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from mfwrap import MFTrainOneStepCell
from mfwrap.callbacks import LoopMonitor
from mfwrap.callbacks.culprit.judges.judges import Judges
from mfwrap.callbacks.culprit.notes import RunNotes
from mfwrap.callbacks.culprit.replay.recorder import StepRecorder
from mfwrap.callbacks.shared.step_values import StepValues, numbers_of
from mfwrap.records.json_lines import read_json_lines
from support.cause_evidence import ORDINARY

VOCABULARY = 128


def language_model(kind=GPT2LMHeadModel, **settings):
    """Return a small language model with four layers."""
    torch.manual_seed(0)
    if kind is BertForMaskedLM:
        sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
        config = BertConfig(vocab_size=VOCABULARY, num_hidden_layers=4, **sizes)
        return BertForMaskedLM(config)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_head=2, n_layer=4, n_positions=16, **settings
    )
    return GPT2LMHeadModel(config)


def tokens(step):
    """Return the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randint(VOCABULARY, (4, 16), generator=generator)
    return {"input_ids": drawn, "labels": drawn}


def notes_of(
    folder,
    network,
    change=None,
    num_steps=12,
    *,
    optimizer_class=torch.optim.AdamW,
    local_norm=False,
    replay=False,
    **settings,
):
    """Train a network, and return the notes of the run.

    Args:
        folder: Run folder.
        network: Network that takes `tokens`.
        change: Called before each step, with its number, and the network and the optimizer.
        num_steps: Number of steps.
        optimizer_class: Class of the optimizer.
        local_norm: Whether the step measures the norms of the weights' gradients.
        replay: Whether the monitor replays steps.
        settings: Its settings.
    """
    optimizer = optimizer_class(network.parameters(), **{"lr": 1e-3, **settings})
    loop = SimpleNamespace(network=network, optimizer=optimizer)
    cell = MFTrainOneStepCell(network, optimizer, use_clip_grad=True, local_norm=local_norm)
    with LoopMonitor(cell, folder, replay=replay) as monitor:
        for step in range(1, num_steps + 1):
            if change is not None:
                change(step, loop)
            cell(**tokens(step))
            monitor.end_step()
    path = folder / "anomalies.jsonl"
    records = read_json_lines(path) if path.exists() else []
    return [one for one in records if one["kind"] == "note"]


@pytest.mark.parametrize("kind", [GPT2LMHeadModel, BertForMaskedLM])
def test_an_ordinary_run(tmp_path, kind):
    """A network as it is initialized gets no note."""
    network = language_model(kind).train()
    assert notes_of(tmp_path, network) == []


def test_a_weight_of_another_size(tmp_path):
    """The note names the weight, and how much larger it is than in the other layers."""
    network = language_model().train()
    with torch.no_grad():
        network.transformer.h[2].attn.c_attn.weight *= 25
    (note,) = notes_of(tmp_path, network)

    assert (note["step"], note["cause"], note["ranks"]) == (1, "weight_size", [0])
    assert note["name"] == "transformer.h.2.attn.c_attn.weight"
    # Each version of transformers draws other initial weights.
    assert re.search(
        r"is 2[3-7]\.\d times that of the same weight in other layers", note["explanation"]
    )


def test_weights_of_zero(tmp_path):
    """A matrix of zeros is one on purpose, as the last one of a residual branch."""
    network = language_model().train()
    with torch.no_grad():
        network.transformer.h[2].mlp.c_proj.weight.zero_()
    assert notes_of(tmp_path, network) == []


def test_a_first_loss_above_that_of_guessing(tmp_path):
    """It is compared with the logarithm of the number of classes."""
    network = language_model(tie_word_embeddings=False).train()
    with torch.no_grad():
        network.lm_head.weight *= 300
    (note,) = notes_of(tmp_path, network)

    assert (note["step"], note["cause"]) == (1, "first_loss")
    assert "and 4.852 if all 128 classes were alike" in note["explanation"]


@pytest.mark.parametrize(("name", "is_noted"), [("org/model", True), ("", False)])
def test_a_loaded_model_that_is_worse_than_guessing(tmp_path, name, is_noted):
    """Its tokens may be those of another model; a model without training may be as bad."""
    network = language_model(tie_word_embeddings=False).train()
    network.config._name_or_path = name
    with torch.no_grad():
        network.lm_head.weight *= 30
    notes = notes_of(tmp_path, network)

    assert [note["cause"] for note in notes] == ["first_loss"] * is_noted
    assert all("worse than the 4.852 of guessing among all 128" in n["explanation"] for n in notes)


def test_evaluation_mode(tmp_path):
    """It is noted if modules depend on it."""
    assert notes_of(tmp_path / "no dropout", plain := language_model(**NO_DROPOUT).eval()) == []
    assert not plain.training
    (note,) = notes_of(tmp_path / "dropout", language_model().eval())
    assert (note["step"], note["cause"]) == (1, "setting")
    assert "in evaluation mode" in note["explanation"]


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def test_a_setting_that_changes(tmp_path):
    """All changes of a step are one note; a second change of the same setting is none."""

    def change(step, loop):
        if step in {6, 9}:
            loop.optimizer.param_groups[0]["betas"] = (0.5 + 0.01 * step, 0.999)
            loop.optimizer.param_groups[0]["weight_decay"] = 0.1 / step

    (note,) = notes_of(tmp_path, language_model().train(), change)
    assert (note["step"], note["cause"]) == (6, "setting")
    assert (
        "`betas` of the optimizer changed from (0.9, 0.999) to (0.56, 0.999) in step 6, and 1 "
        in (note["explanation"])
    )


def test_weights_that_change_between_two_steps(tmp_path):
    """The note names them."""

    def change(step, loop):
        if step in {6, 7}:
            with torch.no_grad():
                loop.network.transformer.h[1].ln_1.bias += 1e-3

    (note,) = notes_of(tmp_path, language_model().train(), change)
    assert (note["step"], note["cause"]) == (6, "weight_changed")
    assert note["name"] == "transformer.h.1.ln_1.bias"


def test_a_learning_rate_of_zero(tmp_path):
    """It is noted at the third update in a row, once."""

    def change(step, loop):
        loop.optimizer.param_groups[0]["lr"] = 0.0 if step in {1, 4, 5} or step > 7 else 1e-3

    (note,) = notes_of(tmp_path, language_model().train(), change, num_steps=14)
    assert (note["step"], note["cause"]) == (10, "learning_rate")


class NegatedForCausalLM(GPT2LMHeadModel):
    """A network that returns its loss with the wrong sign."""

    def forward(self, input_ids, labels):
        """Return the loss alone."""
        return -super().forward(input_ids, labels=labels).loss


def test_a_cross_entropy_below_zero(tmp_path):
    """It is noted once."""
    network = NegatedForCausalLM(language_model().config).train()
    (note,) = notes_of(tmp_path, network, replay=True)
    assert (note["step"], note["cause"]) == (1, "loss")
    assert note["explanation"].endswith("and a cross-entropy is never below zero")


def test_another_loss_of_a_language_model_may_be_negative():
    """Such as that of a policy, which the network does not return."""
    network = language_model().train()
    recorder = StepRecorder(network)
    notes = RunNotes(network, Judges(network, 10), 50, recorder)
    judged = SimpleNamespace(changed=lambda: (), optimizer=None)
    numbers = numbers_of(51, StepValues(loss=-1.0, global_norm=1.0))
    for batch, expected in (({}, []), ({"labels": tokens(1)["labels"]}, ["loss"])):
        output = network(input_ids=tokens(1)["input_ids"], **batch)
        (output.logits.sum() if output.loss is None else output.loss).backward()
        recorder.end_step()
        found = notes.of_step(numbers, judged, ORDINARY)
        assert [one.cause.name for one in found] == expected


def test_a_run_that_continues():
    """What is compared at the start of a run is not asked again after a resume."""
    network = language_model().eval()
    with torch.no_grad():
        network.transformer.h[2].attn.c_attn.weight *= 25
    judged = SimpleNamespace(changed=lambda: ())
    scores = ORDINARY
    numbers = numbers_of(1, StepValues(loss=1e6, global_norm=1.0))
    found = []
    for step in (0, 50):
        judges = Judges(network, 10, step)
        judges.settings.look(step, None)
        notes = RunNotes(network, judges, step)
        found.append([one.cause.name for one in notes.of_step(numbers, judged, scores)])
        assert notes.of_step(numbers, judged, scores) == []
    assert found == [["weight_size", "setting", "first_loss"], []]


def test_weights_that_have_changed_lately():
    """They are remembered for three steps, for what follows from the change."""
    notes = RunNotes(None, Judges(None, 10))
    judged = SimpleNamespace(changed=lambda: ("a", "b"))
    for step, number in ((19, 0), (20, 2), (21, 0)):
        scores = ORDINARY._replace(num_changed=number)
        notes.of_step(numbers_of(step, StepValues(loss=1.0, global_norm=1.0)), judged, scores)
    assert [notes.changed_weights(step) for step in (23, 24)] == [(20, ("a", "b")), None]


def test_a_network_that_is_unknown():
    """Only what is seen in the numbers is noted."""
    notes = RunNotes(None, Judges(None, 10))
    judged = SimpleNamespace(changed=lambda: ())
    scores = ORDINARY._replace(learning_rate=0.0)
    numbers = numbers_of(1, StepValues(loss=1e6, global_norm=1.0))
    found = [notes.of_step(numbers, judged, scores) for _ in range(5)]
    assert [len(each) for each in found] == [0, 0, 1, 0, 0]
    (note,) = found[2]
    assert json.loads(json.dumps(note.as_record()))["kind"] == "note"
    assert str(note).startswith("step 1: note: the learning rate of the last 3 updates was zero; ")


def test_weights_that_nothing_uses(tmp_path):
    """They are noted after ten updates."""
    network = language_model().train()
    network.unused = torch.nn.Linear(2, 2)
    (note,) = notes_of(tmp_path, network)

    said = "unused.weight and 1 other trained weights have had no gradient in 10 updates"
    assert (note["step"], note["cause"], note["explanation"]) == (10, "no_gradient", said)
    assert note["name"] == "unused.weight"


def test_an_optimizer_without_a_state(tmp_path):
    """Nothing is known of its gradients, and an expert may wait for its tokens."""
    network = language_model().train()
    network.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    assert notes_of(tmp_path / "adamw", network) == []

    plain = language_model().train()
    plain.unused = torch.nn.Linear(2, 2)
    assert notes_of(tmp_path / "sgd", plain, optimizer_class=torch.optim.SGD) == []


def test_updates_that_change_nothing(tmp_path):
    """Three in a row; weights may be too coarse for them, and then they are so in each step."""

    def hold(step, loop):
        if step == 5:
            loop.optimizer.register_step_pre_hook(_without_gradients)

    def _without_gradients(optimizer, *_):
        for weight in optimizer.param_groups[0]["params"]:
            weight.grad = None

    (note,) = notes_of(tmp_path, language_model().train(), hold)

    assert (note["step"], note["cause"]) == (7, "no_update")
    said = "have not changed at all in the last 3 updates, at a learning rate of 0.001"
    assert said in note["explanation"]


def test_a_network_that_learns_nothing_any_more(tmp_path):
    """Ten updates in a row whose gradients are all zero are noted once; nine are not."""

    def cut(step, loop):
        for weight in loop.network.parameters() if step == 5 else ():
            weight.register_hook(torch.zeros_like)

    for num_steps, expected in ((13, []), (14, [(14, "no_gradient")]), (26, [(14, "no_gradient")])):
        notes = notes_of(
            tmp_path / str(num_steps), language_model().train(), cut, num_steps=num_steps
        )
        assert [(one["step"], one["cause"]) for one in notes] == expected


def test_weights_without_a_gradient_have_no_update(tmp_path):
    """That most gradients are zero is another thing, which is judged."""

    def cut(step, loop):
        if step == 5:
            for name, weight in loop.network.named_parameters():
                if ".h." in name:
                    weight.register_hook(torch.zeros_like)

    notes = notes_of(
        tmp_path,
        language_model().train(),
        cut,
        num_steps=8,
        optimizer_class=torch.optim.SGD,
        local_norm=True,
    )
    assert notes == []


@pytest.mark.parametrize(
    ("zeroes", "steps"),
    [("late", [8]), ("as zeros", []), ("never", [2]), ("before the backward", []), ("own", [])],
)
def test_gradients_that_are_not_set_to_zero(tmp_path, zeroes, steps):
    """The step that begins with them is noted, however the loop sets them to zero otherwise.

    Gradients of weights that the optimizer does not have do no harm.
    """
    network = language_model().train()
    weights = list(network.parameters())
    optimizer = torch.optim.AdamW(weights[:-2] if zeroes == "own" else weights, lr=1e-3)
    with LoopMonitor(optimizer, tmp_path, model=network, replay=True) as monitor:
        for step in range(1, 11):
            loss = network(**tokens(step)).loss
            if zeroes == "before the backward":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if zeroes in {"as zeros", "own"} or (zeroes == "late" and step < 7):
                optimizer.zero_grad(set_to_none=zeroes != "as zeros")
            monitor.end_step(loss)

    path = tmp_path / "anomalies.jsonl"
    records = read_json_lines(path) if path.exists() else []
    notes = [one for one in records if one["cause"] == "gradient"]
    assert [(one["kind"], one["step"]) for one in notes] == [("note", step) for step in steps]
