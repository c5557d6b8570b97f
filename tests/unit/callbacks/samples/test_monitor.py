"""`SampleMonitor` records what the model says, and leaves the training bitwise as it is."""

import random

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, Trainer

from mfwrap import ExponentialMovingAverage
from mfwrap.callbacks import EMACallback, SampleMonitor
from mfwrap.callbacks.samples.generation import CUT
from mfwrap.recipes.models.byte_tokenizer import byte_tokenizer
from mfwrap.records import read_json_lines
from mfwrap.report.page import page_text
from mfwrap.trainer import MFTrainer
from support.ranks.samples import fail_on_rank_0, sample_on_ranks
from support.small_networks import Classifier
from support.trainer_runs import (
    Counting,
    assert_same_weights,
    logged,
    messages_of,
    new_trainer,
    tiny_llama,
    train,
)

EVALUATES = {"eval_strategy": "steps", "eval_steps": 2}
DRAWS = {"temperature": 1.0, "seed": 7, "max_new_tokens": 6}


def samples(folder, *, averaged=None):
    """Return the records of a run without their times."""
    found = [
        {name: value for name, value in record.items() if name != "seconds"}
        for record in read_json_lines(folder / "samples.jsonl")
    ]
    return [one for one in found if averaged in (None, one["averaged"])]


def answer(model, prompt):
    """Return the four tokens that a model generates after a prompt, which end no text."""
    found = model.eval().generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=4,
        do_sample=False,
        pad_token_id=0,
    )
    return " ".join(map(str, found[0, prompt.shape[1] :].tolist())) + CUT


def run(kind, folder, *callbacks, average=False, **settings):
    """Train with dropout; return the run and the next random numbers of each generator."""
    extras = {"ema": lambda model: ExponentialMovingAverage(model, 0.5)} if average else None
    trainer = new_trainer(kind, folder, callbacks=callbacks, extras=extras, **EVALUATES | settings)
    done = train(trainer)
    return done, (random.random(), np.random.rand(), torch.rand(()).item())  # noqa: NPY002, S311  (the global generators)


@pytest.mark.parametrize("settings", [{}, {"step_interval": 1}], ids=["evaluations", "steps"])
@pytest.mark.parametrize("kind", [Trainer, MFTrainer])
def test_the_training_is_bitwise_the_same(kind, settings, tmp_path):
    """Weights, losses, and all later random numbers are those of a run without the callback."""
    average = kind is MFTrainer
    plain, drawn = run(kind, tmp_path / "plain", average=average)
    sampled, drawn_after = run(
        kind, tmp_path / "sampled", SampleMonitor(**DRAWS, **settings), average=average
    )

    assert_same_weights(plain, sampled)
    assert logged(sampled) == logged(plain)
    assert drawn_after == drawn
    steps = sorted({one["step"] for one in samples(tmp_path / "sampled")})
    first = [0] if kind is MFTrainer else []
    expected = {("evaluations", Trainer): [2, 4], ("steps", Trainer): [2, 3, 4]}
    name = "steps" if settings else "evaluations"
    assert steps == expected.get((name, kind), [*first, *([1, 2, 3, 4] if settings else [2, 4])])


def test_the_text_is_what_generate_returns(tmp_path):
    """At each step the texts are those of the checkpoint of that step, and of its average."""
    monitor = SampleMonitor(num_rows=2, max_new_tokens=4)
    run(
        MFTrainer,
        tmp_path,
        monitor,
        EMACallback(),
        average=True,
        save_strategy="steps",
        save_steps=2,
    )
    rows = Counting(6)
    for step in (2, 4):
        for averaged in (False, True):
            folder = tmp_path / f"checkpoint-{step}" / ("ema" if averaged else "")
            model = LlamaForCausalLM.from_pretrained(folder).eval()
            said = [one for one in samples(tmp_path, averaged=averaged) if one["step"] == step]
            assert [one["prompt"] for one in said] == [0, 1]
            for one in said:
                row = rows[one["prompt"]]["input_ids"]
                prompt = row[: len(row) // 2][None]
                assert one["text"] == answer(model, prompt)
    first = samples(tmp_path)[0]
    row = rows[0]["input_ids"].tolist()
    assert first["step"] == 0
    assert first["input"] == " ".join(map(str, row[: len(row) // 2]))
    assert first["reference"] == " ".join(map(str, row[len(row) // 2 :]))


def test_prompts_and_rows_together(tmp_path):
    """The prompts come first; a second monitor of the same folder is refused."""

    def sampled(folder, *monitors):
        model, tokenizer = tiny_llama(), byte_tokenizer()
        model.resize_token_embeddings(len(tokenizer))
        extras = {"processing_class": tokenizer}
        trainer = new_trainer(
            MFTrainer, folder, callbacks=monitors, model=model, extras=extras, **EVALUATES
        )
        train(trainer)

    sampled(tmp_path, SampleMonitor(["1 2"], num_rows=2, max_new_tokens=4))
    first = [one for one in samples(tmp_path) if one["step"] == 0]
    assert [(one["prompt"], "reference" in one) for one in first] == [
        (0, False),
        (1, True),
        (2, True),
    ]

    monitors = [SampleMonitor(num_rows=1), SampleMonitor(["1 2"])]
    with pytest.raises(
        ValueError, match=r"got a second one that writes .*samples\.jsonl; give one"
    ):
        sampled(tmp_path / "two", *monitors)
    other = SampleMonitor(["1 2"], folder=tmp_path / "other")
    sampled(tmp_path / "apart", monitors[0], other)
    assert len(samples(tmp_path / "other")) == len(samples(tmp_path / "apart")) > 0


def test_an_average_of_the_callback(tmp_path):
    """In a stock Trainer the averaged weights are those of the `EMACallback` before it."""
    average, monitor = EMACallback(0.5), SampleMonitor(num_rows=1, step_interval=1)
    done, _ = run(Trainer, tmp_path, average, monitor, max_steps=40, learning_rate=0.05)
    raw, averaged = (
        {one["step"]: one["text"] for one in samples(tmp_path, averaged=each)}
        for each in (False, True)
    )

    assert list(raw) == list(averaged) == list(range(2, 41))
    assert raw != averaged
    assert done.trainer.state.global_step == 40


@pytest.mark.parametrize("kind", [Trainer, MFTrainer])
def test_several_data_sets(kind, tmp_path):
    """Of several held-out data sets, the first is sampled, once at each step."""
    trainer = new_trainer(kind, tmp_path, callbacks=[SampleMonitor(num_rows=1)], **EVALUATES)
    trainer.eval_dataset = {"first": Counting(6), "second": Counting(6, 8)}
    trainer.train()
    first = [0] if kind is MFTrainer else []
    found = samples(tmp_path)

    assert [one["step"] for one in found] == [*first, 2, 4]
    assert found[0]["input"] == "0 1"
    # An evaluation by hand, after the training, is not sampled.
    trainer.evaluate()
    assert samples(tmp_path) == found


def test_prompts(tmp_path):
    """Prompts are sampled before the first step in a stock Trainer, too; messages as a chat."""
    tokenizer = byte_tokenizer()
    model = tiny_llama()
    model.resize_token_embeddings(len(tokenizer))
    model.config.max_position_embeddings = 64
    chat = [{"role": "user", "content": "hi"}]
    trainer = new_trainer(
        Trainer,
        tmp_path,
        model=model,
        callbacks=[SampleMonitor(["a b", chat], step_interval=3, max_new_tokens=4)],
        extras={"processing_class": tokenizer},
    )
    with messages_of("mfwrap.callbacks.samples") as said:
        trainer.train()
    found = samples(tmp_path)

    assert [(one["step"], one["prompt"]) for one in found] == [
        (step, number) for step in (0, 3, 4) for number in (0, 1)
    ]
    assert [one["input"] for one in found if "input" in one] == ["a b", "user: hi"]
    ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)["input_ids"]
    new = trainer.model.eval().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    last = tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True).strip()
    assert found[-1]["text"] == last + CUT
    assert [line.partition(", in")[0] for line in said] == [
        f"Samples of step {step}" for step in (0, 3, 4)
    ]


def test_a_resumed_run_has_the_records_of_a_whole_one(tmp_path):
    """Records after the checkpoint are removed, and written again."""
    settings = {"average": True, "save_strategy": "steps", "save_steps": 2}
    run(MFTrainer, tmp_path / "whole", SampleMonitor(), **settings)
    run(MFTrainer, tmp_path / "halves", SampleMonitor(), **settings)
    again = new_trainer(
        MFTrainer,
        tmp_path / "halves",
        callbacks=[SampleMonitor()],
        extras={"ema": lambda model: ExponentialMovingAverage(model, 0.5)},
        **EVALUATES,
    )
    again.train(resume_from_checkpoint=str(tmp_path / "halves" / "checkpoint-2"))
    whole, halves = samples(tmp_path / "whole"), samples(tmp_path / "halves")

    # What the prompts are is said again in the resumed training.
    told = {one["prompt"]: one for one in whole if "input" in one}
    for one in whole:
        if one["step"] == 4 and not one["averaged"]:
            one |= {name: told[one["prompt"]][name] for name in ("input", "reference")}
    assert halves == whole


def test_the_page_shows_and_escapes(tmp_path):
    """The page has the samples of a run; markup in a prompt is text."""
    tokenizer = byte_tokenizer()
    model = tiny_llama()
    model.resize_token_embeddings(len(tokenizer))
    prompt = "<script>alert(1)</script>"
    trainer = new_trainer(
        MFTrainer,
        tmp_path,
        model=model,
        callbacks=[SampleMonitor([prompt], step_interval=2)],
        extras={"processing_class": tokenizer},
    )
    trainer.train()
    trainer.save_state()
    text = page_text([tmp_path])

    assert prompt not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert all(f"<th>Step {step}</th>" in text for step in (0, 2, 4))


def test_two_ranks_say_what_one_says(two_ranks, tmp_path):
    """Rank 0 samples alone under DistributedDataParallel; the weights are those without it."""
    plain, sampled = (
        two_ranks.run(sample_on_ranks, "ddp", str(tmp_path / name), name == "sampled")
        for name in ("plain", "sampled")
    )

    for before, after in zip(plain, sampled, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)
    model = tiny_llama()
    model.load_state_dict(sampled[0])
    [last] = [one for one in samples(tmp_path / "sampled") if one["step"] == 3]
    prompt = Counting(6)[0]["input_ids"][:2][None]
    assert last["text"] == answer(model, prompt)


def test_shards_say_what_a_whole_model_says(two_ranks, tmp_path):
    """All ranks run a model in shards together."""
    [weights, _] = two_ranks.run(sample_on_ranks, "fsdp", str(tmp_path), True)  # noqa: FBT003  (of a test function)

    model = tiny_llama()
    model.load_state_dict(weights)
    prompt = Counting(6)[0]["input_ids"][:2][None]
    [found] = samples(tmp_path)
    assert found["text"] == answer(model, prompt)


def test_an_error_is_raised_on_all_ranks(two_ranks, tmp_path):
    """If rank 0 cannot sample, the other rank does not wait for it forever."""
    raised = two_ranks.run(fail_on_rank_0, str(tmp_path))

    assert raised == ["cannot speak", "cannot speak"]


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"prompts": "a"}, TypeError, "`prompts` must be a list of texts or messages, got 'a'"),
        ({"prompts": [1]}, TypeError, "messages with `role` .*, got 1 of type int in prompt 1"),
        ({"prompts": [["a"]]}, TypeError, "got 'a' of type str as message 1 in prompt 1"),
        (
            {"prompts": ["a", [{"from": "human", "value": "a"}]]},
            TypeError,
            r"got a message with the keys \['from', 'value'\] \(message 1\) in prompt 2",
        ),
        ({"prompts": []}, ValueError, "`prompts` must hold at least one prompt"),
        ({"prompts": [""]}, ValueError, "and no empty ones"),
        ({"prompts": ["a"], "num_rows": 0}, ValueError, "`num_rows` must be >= 1"),
        ({"seed": 1}, ValueError, "`seed` needs `temperature`, got seed=1 alone"),
        ({"temperature": 0}, ValueError, "`temperature` must be > 0"),
        ({"step_interval": 0}, ValueError, "`step_interval` must be >= 1, got 0"),
        ({"max_new_tokens": "a"}, TypeError, "`max_new_tokens` must be an int"),
        ({"averages": 1}, TypeError, "`averages` must be a bool"),
    ],
)
def test_wrong_arguments(arguments, error, says):
    """A wrong argument is refused with its name."""
    with pytest.raises(error, match=says):
        SampleMonitor(**arguments)


class LossOnly(Classifier):
    """A network that returns its loss alone."""

    def __init__(self):
        super().__init__(num_inputs=4)

    def forward(self, input_ids, labels, attention_mask=None):
        del attention_mask
        return {"loss": super().forward(input_ids[:, :4].float(), labels[:, 0] % 4)}


@pytest.mark.parametrize(
    ("model", "arguments", "settings", "says"),
    [
        (LossOnly, {}, EVALUATES, "needs a model with transformers' `generate`, or one that"),
        (LossOnly, {"prompts": ["a"]}, EVALUATES, "need a model with transformers' `generate`"),
        (tiny_llama, {"prompts": ["a"]}, EVALUATES, "`prompts` needs a tokenizer"),
        (tiny_llama, {}, {}, "needs `step_interval` in a training without evaluations"),
    ],
)
def test_what_cannot_be_sampled(model, arguments, settings, says, tmp_path):
    """One sentence before the first step says why there are no samples."""
    trainer = new_trainer(
        MFTrainer,
        tmp_path,
        model=model(),
        callbacks=[SampleMonitor(**arguments)],
        **settings,
    )
    with pytest.raises(ValueError, match=says):
        trainer.train()
    assert trainer.state.global_step == 0
