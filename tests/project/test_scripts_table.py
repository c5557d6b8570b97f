"""`make scripts` finds each difference that mfwrap makes in a script of another library."""

import dataclasses
import math
import os
import re
import subprocess
import sys

import pytest
import torch

from support.paths import ROOT
from support.scripts_table.lines import with_mfwrap, without_clipping
from support.scripts_table.outcomes import Outcome, difference
from support.scripts_table.page import (
    NOT_COMPARED,
    PAGE,
    Cells,
    cells,
    page,
    read_cells,
    versions_of,
)
from support.scripts_table.rows import RULES, SCRIPTS, Script

LOOP = """\
from accelerate import Accelerator
def train(tracked):
    if tracked:
        accelerator = Accelerator(
            cpu=True,
        )
    else:
        accelerator = Accelerator()
    model = accelerator.prepare(None)
"""
TRAINER = """\
import transformers
trainer = transformers.Trainer(model=None, args=None)
"""
OTHER = """\
def main():
    from trl import SFTTrainer
    trainers["ä"] = SFTTrainer(
        model=None,
    )
"""
TEXT = PAGE.read_text(encoding="utf-8")


def test_a_loop_is_attached_after_each_accelerator():
    """Both lines follow each statement that makes an accelerator, with its indentation."""
    lines = with_mfwrap(LOOP).splitlines()

    added = ["        from mfwrap.accelerate import attach", "        attach(accelerator)"]
    assert lines[6:8] == added
    assert lines[10:12] == added
    assert [line for line in lines if line not in added] == LOOP.splitlines()


def test_a_trainer_is_replaced_by_the_documented_class():
    """`Trainer` becomes `MFTrainer`."""
    assert with_mfwrap(TRAINER) == (
        "import transformers\n"
        "from mfwrap.trainer import MFTrainer\n"
        "trainer = MFTrainer(model=None, args=None)\n"
    )


def test_another_trainer_gets_the_mixin():
    """A class with the mixin is made before the Trainer, and takes its place."""
    lines = with_mfwrap(OTHER).splitlines()

    assert lines[2:5] == [
        "    from mfwrap.trainer import MFTrainerMixin",
        "    class MFSFTTrainer(MFTrainerMixin, SFTTrainer): pass",
        '    trainers["ä"] = MFSFTTrainer(',
    ]


def test_a_script_without_a_trainer_and_a_loop_is_refused():
    """There is nothing to compare in such a script."""
    with pytest.raises(ValueError, match="neither an accelerator nor a Trainer"):
        with_mfwrap("print(1)\n")


def test_the_lines_are_those_of_the_documentation():
    """docs/coming_from.md shows what the scripts get."""
    documented = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")

    assert "from mfwrap.accelerate import attach\n" in documented
    assert "attach(accelerator" in documented
    assert "| `Trainer(model, args, ...)` | `MFTrainer(model, args, ...)` |" in documented
    assert "`class MySFT(MFTrainerMixin, SFTTrainer): pass`" in documented


def test_clipping_is_switched_off_in_training_arguments():
    """The first keyword of the training arguments is `max_grad_norm=0.0`."""
    text = "args = XTrainingArguments(\n    output_dir='a',\n)\nother = XConfig(size=1)\n"

    assert without_clipping(text) == text.replace("    output", "    max_grad_norm=0.0, output")


def test_the_rules_change_the_texts_for_which_they_are():
    """Each rule finds a text, and says on the page what it does."""
    texts = {
        "a": "x(fp16=True)",
        "b": "x(logging_steps=0.01)",
        "c": "x(eval_steps=1_000)",
        "d": "x(num_warmup_steps=100)",
        "e": "d.select(range(10_000))",
        "f": "x(test_size=10_000)",
        "g": "  train_batch_size = 128",
        "h": "[768, 512, 256, 128, 64]",
        "i": 'x(logging_dir="./logs",)',
        "j": "x(warmup_ratio=0.1)",
        "k": "x(bf16=True)",
        "l": "DistributedType.TPU:",
    }

    changed = {rule.name: re.sub(rule.pattern, rule.by, texts[rule.name]) for rule in RULES}

    assert changed == {
        "a": "x(fp16=False)",
        "b": "x(logging_steps=1)",
        "c": "x(eval_steps=4)",
        "d": "x(num_warmup_steps=2)",
        "e": "d",
        "f": "x(test_size=8)",
        "g": "  train_batch_size = 8",
        "h": "[32, 16, 8]",
        "i": "x()",
        "j": "x(warmup_steps=0.1)",
        "k": "x(bf16=True, use_cpu=True)",
        "l": "DistributedType.XLA:",
    }


def test_a_text_that_a_row_expects_must_be_there():
    """A new version of a script that has lost a text is noticed."""
    with pytest.raises(ValueError, match=r"a\.py has no 'old'"):
        Script("trl", "a.py", replace=[("old", "new")]).text("", clips=True, mfwrap=False)


def run_of(losses=(1.0, 2.0), weight=1.0, digests="ab", **log):
    """Return a run with two updates, without mfwrap."""
    logs = [{"loss": loss, **log} for loss in losses]
    return Outcome("", digests, losses, logs, {"w": torch.tensor([weight, 4.0])})


def ours(*args, **log):
    """Return a run whose updates are those of mfwrap."""
    run = run_of(*args, **log)
    return dataclasses.replace(run, by_mfwrap=len(run.digests))


@pytest.mark.parametrize(
    ("other", "found"),
    [
        pytest.param(ours(), (0.0, 0.0, 2, 0.0, []), id="equal"),
        pytest.param(ours((1.0, 2.5)), (0.25, 0.0, 2, 0.0, []), id="loss"),
        pytest.param(ours(weight=2.0), (0.0, 0.25, 2, 0.0, []), id="weight"),
        pytest.param(ours(digests="ax"), (0.0, 0.0, 1, 0.0, []), id="after an update"),
        pytest.param(ours((1.0, math.nan)), (math.inf, 0.0, 2, 0.0, []), id="not a number"),
        pytest.param(ours((1.0,)), (0.0, 0.0, 2, 0.0, ["2 and 1 logs"]), id="a log"),
        pytest.param(ours(digests="a"), (0.0, 0.0, 1, 0.0, ["2 and 1 updates"]), id="an update"),
        pytest.param(
            run_of(), (0.0, 0.0, 2, 0.0, ["mfwrap did 0 and 0 updates"]), id="without mfwrap"
        ),
    ],
)
def test_differences_are_measured(other, found):
    """Losses are compared relative to 1 or more, weights relative to the largest weight."""
    seen = difference(run_of(), other)

    assert (seen.losses, seen.weights, seen.equal_updates, seen.numbers, seen.faults) == found
    assert seen.is_none == (found == (0.0, 0.0, 2, 0.0, []))


def test_weights_that_do_not_change_are_a_fault():
    """Two runs that train nothing are equal without a meaning."""
    assert difference(run_of(digests="aa"), ours(digests="aa")).faults == [
        "the weights do not change"
    ]


def test_a_weight_without_a_gradient_is_left_out():
    """Rounding decides its direction, so its difference says nothing; its digest still counts."""
    stock = dataclasses.replace(run_of(), weights={"w": torch.ones(1), "v": torch.ones(1)})
    other = dataclasses.replace(
        ours(digests="ax"), weights={"w": torch.ones(1), "v": torch.zeros(1)}
    )

    assert difference(stock, other).weights == 1.0
    seen = difference(dataclasses.replace(stock, noise=["v"]), other)
    assert seen.weights == 0.0
    assert not seen.is_none


def test_losses_of_backward_passes_count_without_a_log():
    """A loop has no log, so its backward passes are compared."""
    stock = dataclasses.replace(run_of(), log=())

    assert difference(stock, dataclasses.replace(ours((1.0, 4.0)), log=())).losses == 1.0
    assert difference(stock, dataclasses.replace(ours(), log=())).is_none


def test_numbers_of_the_clock_do_not_count():
    """Other numbers of a log count, and a number that is missing is a fault."""
    stock = run_of(train_runtime=1.0, grad_norm=2.0, steps_per_second=3.0)

    seen = difference(stock, ours(train_runtime=2.0, grad_norm=3.0, loss_scale=1.0))

    assert seen.numbers == 0.5
    assert seen.faults == ["no steps_per_second in a log"] * 2


def results(*outcomes, **intended):
    """Return the cells of a script whose runs have these outcomes."""
    left = list(outcomes)
    script = Script("trl", "a.py", intended=intended)
    return cells(script, "", lambda **_: left.pop(0))


ROUNDED = ours((1.0, 2.00001), weight=1.00001, digests="ax")


@pytest.mark.parametrize(
    ("outcomes", "result"),
    [
        ([run_of(), ours()], "equal"),
        ([run_of(), ROUNDED, run_of(), ours()], "rounding of clipped gradients"),
        (
            [run_of(), ROUNDED, run_of(), ROUNDED],
            "differs: without clipping, losses by 5e-06, weights by 3e-06, from update 2 on",
        ),
        (
            [run_of(), ours((1.0, 3.0), grad_norm=1.0), run_of(), ours()],
            "differs: by 5e-01, more than by rounding",
        ),
        ([run_of(), run_of()], "differs: mfwrap did 0 and 0 updates"),
        ([Outcome("ImportError: no a|b")], "does not run without mfwrap: `ImportError: no a/b`"),
        ([run_of(), Outcome("KeyError: 1")], "differs: only without mfwrap it runs: `KeyError: 1`"),
    ],
)
def test_the_result_says_what_was_found(outcomes, result):
    """A rounding difference is believed only if runs without clipping are equal bit for bit."""
    assert results(*outcomes).result == result


def test_a_number_that_is_meant_to_differ_is_explained():
    """It is left out of the comparison, and the result says how it differs; others count."""
    stock, other = run_of(train_loss=1.0, n=1.0), ours(train_loss=2.0, n=1.0)

    assert results(stock, other, train_loss="a reason").result == "equal; a reason"
    assert results(stock, other, stock, other, n="a reason").result.startswith("differs")
    rounded = dataclasses.replace(ROUNDED, log=other.log)
    assert (
        results(stock, rounded, stock, other, train_loss="a reason").result
        == "rounding of clipped gradients; a reason"
    )


@pytest.mark.parametrize(
    ("script", "text", "arguments"),
    [
        ("HfArgumentParser(A)", "HfArgumentParser(A)", ["--max_grad_norm", "0"]),
        ("TrlParser(A)", "TrlParser(A)", ["--max_grad_norm", "0"]),
        ("HfArgumentParser(A)\nXConfig(output_dir=1)", None, []),
        ("argparse.ArgumentParser()", "argparse.ArgumentParser()", []),
    ],
)
def test_clipping_is_switched_off_where_the_script_sets_it(script, text, arguments):
    """On the command line if the training arguments are parsed, and in the text otherwise."""
    row = Script("trl", "a.py", arguments=["x"], resumed=["y"])

    assert row.command_lines(script, clips=False) == [["x", *arguments], ["y", *arguments]]
    assert row.command_lines(script, clips=True) == [["x"], ["y"]]
    changed = row.text(script, clips=False, mfwrap=False)
    assert changed == (text or script.replace("output", "max_grad_norm=0.0, output"))


def test_the_page_is_written_from_its_rows():
    """The page has the rows, notes and reasons that `make scripts` would write now."""
    found, sources = read_cells(TEXT)

    assert set(found) == {(script.library, script.title) for script in SCRIPTS}
    assert page(found, sources, versions_of(TEXT)) == TEXT, "run `make scripts`"


def test_the_page_explains_every_difference():
    """At least 30 scripts run, and no result is without a reason."""
    compared = list(read_cells(TEXT)[0].values())

    assert NOT_COMPARED not in compared
    assert not [each for each in compared if each.result.startswith("differs")]
    assert sum(bool(each.updates) for each in compared) >= 30


def test_the_cells_of_a_page_are_read_as_they_were_written():
    """So that a run of some scripts keeps the others."""
    written = {
        (script.library, script.title): Cells(
            "a; `x` becomes ``", f"{number}", "equal", "", "equal"
        )
        for number, script in enumerate(SCRIPTS)
    }

    assert read_cells(page(written, {"trl": "v1"}, ""))[0] == written


SCRIPT = """\
import sys

import torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers import Trainer, TrainingArguments

tokenizer = AutoTokenizer.from_pretrained("bert-base-cased")
rows = load_dataset("nyu-mll/glue", "mrpc", split="train")
rows = rows.map(lambda row: tokenizer(row["sentence1"], padding="max_length", max_length=16))
model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased")
arguments = TrainingArguments(output_dir="out", max_steps=3, logging_steps=100, use_cpu=True)
trainer = Trainer(model, arguments, train_dataset=rows)
if "cheat" in __file__ and "mfwrap" in sys.modules:
    torch.manual_seed(1)
trainer.train()
"""


@pytest.mark.slow
def test_the_command_compares_scripts(tmp_path):
    """The command runs scripts of a folder, and finds a difference in one of two.

    The second script trains with other random numbers if mfwrap has been imported.
    """
    program = (
        "import runpy, sys\n"
        "sys.path.insert(0, 'tests')\n"
        "from support.scripts_table import rows\n"
        "rows.SCRIPTS[:] = [rows.Script('accelerate', name) for name in ('fair.py', 'cheat.py')]\n"
        "runpy.run_path('.ci/scripts_table.py', run_name='__main__')\n"
    )
    folder = tmp_path / "accelerate"
    folder.mkdir()
    (folder / "VERSION").write_text("v0", encoding="utf-8")
    for name in ("fair.py", "cheat.py"):
        (folder / name).write_text(SCRIPT, encoding="utf-8")
    output = tmp_path / "page.md"
    command = [sys.executable, "-c", program, "--sources", str(tmp_path), "--output", str(output)]

    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False
    )

    assert done.stderr.endswith("some scripts differ\n"), done.stderr
    found, sources = read_cells(output.read_text(encoding="utf-8"))
    assert sources["accelerate"] == "v0"
    fair, cheat = found["accelerate", "fair.py"], found["accelerate", "cheat.py"]
    assert fair.updates == cheat.updates == "3"
    assert fair.result in {"equal", "rounding of clipped gradients"}
    assert cheat.result.startswith("differs: without clipping")
