"""Episodes are told in words, and what the run did about them."""

import dataclasses
import html
import json
import re

import pytest

from mfwrap.records.run_record import Curve, read_run
from mfwrap.report.episodes import episode_table, headline
from support.run_folders import write_lines

RATE = {
    "step": 2,
    "kind": "spike",
    "cause": "learning_rate",
    "explanation": "the learning rate of step 2 was 3 <times 300>",
    "suggestion": "correct the schedule",
    "losses": [5.5],
    "usual_loss": 3.25,
    "skipped": False,
}


def run_of(folder, anomalies, losses=(2.0,) * 10, **files):
    """Return a run, by default of ten steps, with these anomalies."""
    write_lines(
        folder / "metrics.jsonl",
        [
            {"step": step, "loss": loss, "global_norm": 4.0, "max_grad_norm": 1.0}
            for step, loss in enumerate(losses, 1)
        ],
    )
    write_lines(folder / "anomalies.jsonl", anomalies)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return read_run(folder)


def cells(run):
    """Return the texts of the cells of each row in the table."""
    rows = re.findall("<tr>(<td.*?)</tr>", episode_table([run]))
    return [
        [
            html.unescape(re.sub("<.*?>", " ", cell.replace("<wbr>", ""))).split()
            for cell in re.findall("<td.*?</td>", row)
        ]
        for row in rows
    ]


def words(page):
    """Return the text of a page, with single spaces."""
    text = re.sub(r"</?(strong|a|code|wbr)\b.*?>", "", page)
    return " ".join(html.unescape(re.sub("<.*?>", " ", text)).split())


def test_a_run_that_has_diverged(tmp_path):
    """The headline says so first, and its cause says that the loss has not come back."""
    first = {"step": 12, "kind": "loss_shift", "cause": "unknown", "usual_loss": 2.0}
    end = {"step": 12, "kind": "loss_shift", "last_step": 20, "num_steps": 9, "cause": "diverged"}
    end |= {"diverged": "the loss had not come back by then: about 43, after 2"}
    losses = [3.0] * 5 + [2.0] * 4 + [1.75, 2.0] + [43.0] * 9
    page = words(headline([run_of(tmp_path, [first, end], losses)]))

    assert page.startswith("Diverged at step 12. 1 episode in 20 steps.")
    assert "with loss 43 at step 20; it was lowest at step 10, 1.75." in page
    assert (
        "Cause not known; the loss has diverged: the loss had not come back by then: about 43"
        in page
    )


def test_a_loss_that_is_computed_otherwise_is_no_divergence(tmp_path):
    """A factor in the loss raises it, and may leave the network as it was."""
    first = {"step": 12, "kind": "loss_spike", "cause": "loss", "usual_loss": 2.0}
    end = {"step": 12, "kind": "loss_spike", "last_step": 20, "num_steps": 9, "diverged": "high"}
    page = words(headline([run_of(tmp_path, [first, end], [2.0] * 20)]))

    assert page.startswith("The loss has not come back since step 12. 1 episode in 20 steps.")


@pytest.mark.parametrize(("norm", "is_told"), [(120.0, True), (30.0, False)])
def test_gradients_that_are_always_clipped(tmp_path, norm, is_told):
    """A run without anomalies may be odd from its first step on."""
    run = run_of(tmp_path, [], [2.0] * 20)
    steps = list(range(1, 21))
    curves = {**run.curves, "global_norm": Curve(steps, [1.0, *[norm] * 19])}
    page = words(headline([dataclasses.replace(run, curves=curves, max_grad_norm=1.0)]))

    said = "In 19 of 20 steps, clipping has left less than a hundredth of the gradients, whose"
    assert (f"{said} middle global norm was 120: look" in page) is is_told


@pytest.mark.parametrize(("last_step", "is_told"), [(10, True), (9, False)])
def test_updates_that_are_skipped_to_the_end(tmp_path, last_step, is_told):
    """The headline says from where on nothing was learned."""
    first = {"step": 4, "kind": "loss_not_finite", "skipped": True}
    number = last_step - 3
    end = {"num_steps": number, "num_skipped": number}
    end |= {"step": 4, "kind": "loss_not_finite", "last_step": last_step}
    page = words(headline([run_of(tmp_path, [first, end])]))

    assert ("All updates from step 4 on were skipped." in page) is is_told


@pytest.mark.parametrize(("number", "is_told"), [(6.0, True), (1.0, False), (0.0, False)])
def test_updates_that_are_skipped_after_one_that_was_applied(tmp_path, number, is_told):
    """The headline counts them by the number of skipped updates in a row."""
    first = {"step": 4, "kind": "loss_spike", "skipped": False}
    end = {"step": 4, "kind": "loss_spike", "last_step": 10, "num_steps": 7, "num_skipped": 6}
    run = run_of(tmp_path, [first, end])
    curves = {**run.curves, "consecutive_skips": Curve([3, 10], [0.0, number])}
    page = words(headline([dataclasses.replace(run, curves=curves)]))

    assert ("All updates from step 5 on were skipped." in page) is is_told
    assert ("All updates" in page) is is_told


@pytest.mark.parametrize("losses", [[], [2.0] * 3, [3.0, 2.0] * 5, ["nan"] * 9, [-1.0] * 9])
def test_a_last_loss_that_is_no_higher(tmp_path, losses):
    """Nothing is said about the lowest level."""
    run = run_of(tmp_path, [], losses or [None] * 9)
    assert "lowest" not in headline([run])


def test_notes(tmp_path):
    """They are listed below the headline, and are no anomalies."""
    note = {"step": 3, "kind": "note", "explanation": "`p` of <drop> changed", "suggestion": "look"}
    page = headline([run := run_of(tmp_path, [note])])

    assert "No anomalies were recorded, but 1 note below." in page
    assert '<a href="#loss" data-run="0" data-step="3" data-last="3">Step 3</a>' in page
    assert "<code>p</code> of &lt;drop&gt; changed; look" in page
    assert episode_table([run]) == ""


def test_a_run_without_anomalies(tmp_path):
    """The page says so, and has no table."""
    run = run_of(tmp_path, [])

    assert "No anomalies were recorded. The records end at step 10" in headline([run])
    assert episode_table([run]) == ""


@pytest.mark.parametrize("listed", [None, "metrics.jsonl", "anomalies.jsonl"])
def test_a_run_without_a_monitor(tmp_path, listed):
    """No anomalies are no good news if nothing has looked; a file is listed before it is made."""
    run_of(tmp_path, [])
    (tmp_path / "anomalies.jsonl").unlink()
    if listed is not None:
        (tmp_path / "_mfwrap_files.txt").write_text(f"{listed}\n")
    page = words(headline([read_run(tmp_path)]))

    assert ("Nothing has looked for anomalies: a recipe does with" in page) == (
        listed != "anomalies.jsonl"
    )
    assert ("No anomalies were recorded." in page) == (listed == "anomalies.jsonl")


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        ("finished", "The training finished at step 10, with"),
        (
            "failed after its last step (OSError)",
            "The run failed after its last step (OSError), with loss",
        ),
        ("not ended", "The records end at step 10, with"),
        (
            "stopped by a signal at step 8 of 90",
            "The run was stopped by a signal at step 8 of 90, with",
        ),
        ("<b>", "The run &lt;b&gt;, with"),
    ],
)
def test_how_the_run_ended(tmp_path, state, shown):
    """The headline says what run.json says, if the run wrote there that it has ended."""
    (tmp_path / "run.json").write_text(json.dumps({"state": state}))

    assert shown in headline([run_of(tmp_path, [])])


@pytest.mark.parametrize("stop", ["", "."])
def test_the_error_of_a_run(tmp_path, stop):
    """The headline has it with one full stop; its text is never interpreted as HTML."""
    error = f"ValueError: <b> in row 3{stop}"
    facts = {"state": "failed after step 9 (ValueError)", "error": error}
    (tmp_path / "run.json").write_text(json.dumps(facts))

    said = "at step 10. Its error: <code>ValueError: &lt;b&gt; in row 3</code>."
    assert said in headline([run_of(tmp_path, [])])


@pytest.mark.parametrize("anomalies", [[], [RATE]])
def test_a_failed_run(tmp_path, anomalies):
    """The headline begins with the failure."""
    facts = {"state": "failed after step 10 (ValueError)", "error": "ValueError: row 3"}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    page = words(headline([run_of(tmp_path, anomalies)]))

    assert page.startswith("The run failed after step 10 (ValueError), with loss")
    rest = "1 episode in 10 steps." if anomalies else "No anomalies were recorded."
    assert f"Its error: ValueError: row 3. {rest}" in page


def test_a_run_by_rewards(tmp_path):
    """The headline has the last reward, because the loss of such a run says little."""
    run = run_of(tmp_path, [])
    run.curves["reward"] = Curve([5, 9], [0.25, 0.75])

    assert "The records end at step 10, with reward 0.75 at step 9." in headline([run])


SAME = "The rewards have taught nothing: all answers to each prompt got the same reward. "
FALLEN = (
    "The rewards teach nothing any more: since step 2, all answers to nearly each prompt have "
    "got the same reward, 0.1 in the mean, after 0.5 before. "
)


@pytest.mark.parametrize(
    ("state", "logs", "says"),
    [
        ("finished", [(1.0, 0.5)] * 2, SAME),
        ("not ended", [(1.0, 0.5)] * 4, ""),
        ("not ended", [(1.0, 0.5)] * 5, SAME),
        ("finished", [(1.0, 0.5)] * 9 + [(0.5, 0.5)], ""),
        ("finished", [(0.5, 0.5)] + [(1.0, 0.1)] * 3, FALLEN),
        ("finished", [(0.0, None)], "The rewards have taught nothing: no answer got a reward. "),
        ("finished", [], ""),
    ],
)
@pytest.mark.parametrize("anomalies", [[], [RATE]])
def test_rewards_that_have_taught_nothing(tmp_path, state, logs, says, anomalies):
    """The headline says so first, as soon as there are a few logs or the run has ended."""
    run_of(tmp_path, anomalies, run={"state": state})
    records = [
        {"step": step, "reward": reward, "frac_reward_zero_std": alike}
        for step, (alike, reward) in enumerate(logs, 1)
    ]
    write_lines(tmp_path / "rewards.jsonl", records)

    start = "1 episode in " if anomalies else "No anomalies were recorded. "
    assert words(headline([read_run(tmp_path)])).startswith(f"{says}{start}")


@pytest.mark.parametrize(
    ("step", "last", "is_after"), [(9, 9, True), (12, 9, True), (20, 9, False), (40, 30, True)]
)
def test_what_may_be_a_consequence(tmp_path, step, last, is_after):
    """An episode soon after one of another kind points to it; how soon depends on its length."""
    end = {"step": 2, "kind": "spike", "last_step": last, "num_steps": 2, "num_skipped": 0}
    run = run_of(tmp_path, [RATE, end, {"step": step, "kind": "overflow", "cause": "gradient"}])
    told = f"Just before steps 2\N{EN DASH}{last}: gradient norm spike, learning rate too high"

    assert (told in words(headline([run]))) is is_after
    assert (f"Just before: {told[12:]}" in words(episode_table([run]))) is is_after
    assert words(headline([run])).count("Just before") == is_after


def test_no_consequence_of_the_same_kind(tmp_path):
    """Two episodes alike, and two that begin in the same step, do not point to each other."""
    run = run_of(tmp_path, [RATE, {**RATE, "step": 5}, {"step": 5, "kind": "overflow"}])

    assert words(episode_table([run])).count("Just before") == 1
    assert "Just before: step 2: gradient norm spike" in words(episode_table([run]))


def test_the_headline(tmp_path):
    """The headline has the number of episodes, the end, and the facts of each kind once."""
    end = {"step": 2, "kind": "spike", "last_step": 6, "num_steps": 4, "num_skipped": 1}
    run = run_of(tmp_path, [{**RATE, "skipped": True}, end, {**RATE, "step": 9}])
    text = headline([run])

    assert words(text) == (
        "2 episodes in 10 steps. The records end at step 10, with loss 2 at step 10. "
        "Steps 2\N{EN DASH}6: gradient norm spike "
        "Cause learning rate too high: the learning rate of step 2 was 3 <times 300> "
        "What the run did skipped 1 of 4 updates, applied the others "
        "What to do correct the schedule "
        "Again 1 more like this, the last at step 9"
    )
    assert 'data-step="2" data-last="6"' in text


def test_samples_of_alike_episodes(tmp_path):
    """The headline has those of the first episode, and says where the others are."""
    rows = [{"rank": 0, "micro_batch": 0, "row": row} for row in (1, 3)]
    records = [
        {**RATE, "step": step, "samples": [row]} for step, row in zip((2, 9), rows, strict=True)
    ]
    run = run_of(tmp_path, records)
    text = words(headline([run]))

    assert "Samples rank 0, micro-batch 0, row 1 " in text
    assert "row 3" not in text
    assert "Again 1 more like this, the last at step 9; their samples are in the table" in text
    assert "rank 0, micro-batch 0, row 3" in words(episode_table([run]))


def test_alike_episodes_without_samples(tmp_path):
    """Why no row of the others is named is nothing to look for in the table."""
    records = [{**RATE, "step": step, "samples_detail": "not searched: so"} for step in (2, 9)]
    text = words(headline([run_of(tmp_path, records)]))

    assert "Again 1 more like this, the last at step 9" in text
    assert "in the table below" not in text


def test_the_headline_prefers_what_has_a_cause(tmp_path):
    """Of many kinds of episodes the headline has three; those without a cause come last."""
    kinds = ["loss_spike", "spike", "update_spike", "state_spike"]
    unknown = [{"step": 1 + place, "kind": kind} for place, kind in enumerate(kinds)]
    text = words(headline([run_of(tmp_path, [*unknown, {**RATE, "step": 9}])]))

    assert re.findall(r"Step (\d)", text) == ["1", "2", "9"]
    assert text.endswith("2 more of other kinds in the table below.")


def test_hundreds_of_episodes(tmp_path):
    """The table stops at 200 rows and says how many more there are; the headline stays short."""
    run = run_of(tmp_path, [{**RATE, "step": 3 * number} for number in range(1, 301)])

    assert len(cells(run)) == 200
    assert words(episode_table([run])).endswith("100 more, in anomalies.jsonl.")
    assert len(words(headline([run]))) < 500


def test_names_of_a_record_are_text(tmp_path):
    """Markup in the fields of a record is shown, and not interpreted."""
    evil = "<script>alert(1)</script>"
    fields = ("kind", "cause", "explanation", "suggestion", "layer", "where", "name", "replay")
    sample = dict.fromkeys(("rank", "micro_batch", "row", "index", "loss", "text"), evil)
    record = {
        "step": 3,
        **dict.fromkeys((*fields, "samples_detail", "replay_detail"), evil),
        "ranks": [evil],
        "micro_batch": evil,
        "rows": [evil],
        "samples": [sample],
        "gradients": [{"name": evil, "kind": evil, "norm": 1.0}],
        "buffers": [evil],
    }
    run = run_of(tmp_path, [record])

    assert "<script" not in headline([run]) + episode_table([run])
    assert words(headline([run])).count(evil) >= 5


@pytest.mark.parametrize(
    ("end", "skipped", "said"),
    [
        ({}, True, "skipped the update"),
        ({}, False, "applied the update, with gradients clipped to 1"),
        (
            {"last_step": 4, "num_steps": 2, "num_skipped": 1},
            True,
            "skipped 1 of 2 updates, applied the other",
        ),
        ({"last_step": 4, "num_steps": 3, "num_skipped": 3}, True, "skipped all 3 updates"),
        ({"last_step": 4, "num_steps": 3, "num_skipped": 0}, False, "applied all updates"),
    ],
)
def test_what_the_run_did(tmp_path, end, skipped, said):
    """The table tells skipped, clipped and applied updates apart."""
    ends = [{"step": 2, "kind": "spike", **end}] if end else []
    [row] = cells(run_of(tmp_path, [{**RATE, "skipped": skipped}, *ends]))

    assert " ".join(row[-1]).startswith(said)


@pytest.mark.parametrize(
    ("last", "number", "said"),
    [
        (8, 4, "5\N{EN DASH}8 4 bad steps"),
        (10, 4, "5\N{EN DASH}10 4 of 6 steps were found bad"),
        (6, 1, "5\N{EN DASH}6 1 of 2 steps was found bad"),
    ],
)
def test_number_of_bad_steps(tmp_path, last, number, said):
    """An episode says how many of its steps were found bad, if those between were not."""
    end = {"step": 5, "kind": "spike", "last_step": last, "num_steps": number}
    [row] = cells(run_of(tmp_path, [{"step": 5, "kind": "spike", "cause": "data"}, end]))

    assert " ".join(row[0]) == said


def test_since_when_a_shift_shows(tmp_path):
    """It is looked for in each step, and may have begun before it was clear."""
    record = {"step": 9, "kind": "loss_shift", "cause": "unknown", "since": 5}
    [row] = cells(run_of(tmp_path, [record]))

    assert "It shows from step 5 on" in " ".join(row[1])


def test_place_samples_and_evidence(tmp_path):
    """A row has layer, tensor, rank and micro-batch, the samples, and numbers beside usual ones."""
    sample = {"rank": 1, "micro_batch": 2, "row": 3, "index": 77, "loss": 22.0, "text": "a <b> c"}
    record = {
        "step": 3,
        "kind": "gradient_not_finite",
        "cause": "activation",
        "ranks": [1],
        "layer": "layers.1",
        "where": "activation",
        "name": "layers.1.mlp",
        "micro_batch": 2,
        "losses": [2.0, "nan"],
        "usual_loss": 2.25,
        "since": 2,
        "samples": [sample],
        "states": [{"kind": "exp_avg", "name": "w", "norm": 8.0, "norm_before": 2.0, "rise": 4.0}],
        "buffers": ["a", "b", "c", "d"],
        "replay": "reproduced",
        "skipped": True,
    }
    [[_, what, where, samples, _]] = [
        [" ".join(cell) for cell in row] for row in cells(run_of(tmp_path, [record]))
    ]

    assert "Cause: an operation in the forward In step 3: loss nan (usually 2.25)" in what
    assert "it began in step 2 at the earliest" in what
    assert "exp_avg of w 8 (was 2)" in what
    assert "a, b, c and 1 more" in what
    assert what.endswith("a second run of the step found the fault again, so it is not transient")
    assert where == "layer layers.1 output of layers.1.mlp rank 1 micro-batch 2"
    assert samples == "data set index 77 (rank 1, micro-batch 2, row 3): loss 22 a <b> c"


@pytest.mark.parametrize(("ranks", "said"), [(1, "layer layers.1"), (2, "layer layers.1 rank 0")])
def test_the_only_rank_is_not_named(tmp_path, ranks, said):
    """A rank is a place only in a run on several ranks."""
    record = {"step": 3, "kind": "spike", "cause": "data", "ranks": [0], "layer": "layers.1"}
    run = run_of(tmp_path, [record])
    run.facts = {"hardware": {"ranks": ranks}}

    assert " ".join(cells(run)[0][2]) == said


def test_rollbacks_are_told(tmp_path):
    """A rollback is a row, although the records of its bad steps are gone."""
    done = {
        "kind": "loss_spike",
        "first_step": 5,
        "last_step": 6,
        "checkpoint": "checkpoint-4",
        "rows": [[0, 16]],
        "description": "step 5: loss spike",
    }
    content = {"format_version": 1, "pending": None, "rollbacks": [done]}
    run = run_of(tmp_path, [], rollbacks=content)
    [row] = cells(run)

    assert "1 rollback in 10 steps." in headline([run])
    assert "Steps 5\N{EN DASH}6: loss spike Cause step 5: loss spike" in words(headline([run]))
    assert " ".join(row[0]) == "5\N{EN DASH}6 2 bad steps"
    assert " ".join(row[-1]) == "went back to checkpoint-4 and left out 1 row of the data"
