"""The command line: recipes, runs, checkpoints, and the names in MindSpore's scripts.

The help text of `cli` lists the exit codes.
"""

import errno
import gc
import json
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

# Reading a recipe must be quick, so modules that load transformers, matplotlib or plotly are
# imported inside the commands that need them (PLC0415).
try:
    import click

    from mfwrap.comparison.command import compare
    from mfwrap.compatibility.foreign import ReleaseError
    from mfwrap.porting.command import port
    from mfwrap.runner.average_command import average
    from mfwrap.runner.command import (
        allow_code_option,
        checked_recipe,
        data,
        is_first_process,
        overrides_option,
        recipe_argument,
        recipe_names,
        say,
        validate,
    )
    from mfwrap.runner.document import RecipeError
    from mfwrap.runner.library import find_recipe, shipped_recipes
    from mfwrap.runner.terminal import echo
except ImportError as error:  # installed without the extra `recipes`
    sys.exit(f'mfwrap: the command line needs {error.name}; pip install "mfwrap[recipes]"')

if TYPE_CHECKING:
    from mfwrap.runner.recipe import Recipe

_RESUME_NEWEST = ""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mfwrap")
def cli() -> None:
    """MindFormers' training step for PyTorch: training runs from one YAML file.

    RECIPE is a YAML file, or the name of a recipe that comes with the package.

    \b
    Examples:
      mfwrap recipes
      mfwrap train image_classification --set training.num_train_epochs=3
      mfwrap init causal_lm && mfwrap validate causal_lm.yaml
      torchrun --standalone --nproc-per-node 2 --max-restarts 3 \\
        -m mfwrap train causal_lm.yaml --resume=auto
      mfwrap import-mindformers pretrain_llama.yaml > llama.yaml
      mfwrap port train.py

    \b
    Exit codes:
      0    finished
      1    failed; `verify` found a damaged checkpoint; `compare` found a difference; `port` found
           a name without a counterpart
      2    the recipe or the command is wrong
      75   a signal (SIGTERM, SIGUSR1) stopped the run; start it again
      130  interrupted by the user

    \b
    Shell completion, for bash (zsh and fish in the same way):
      eval "$(_MFWRAP_COMPLETE=bash_source mfwrap)"
    """  # noqa: D301  (click keeps the lines of a paragraph that begins with \b)


@cli.command()
@recipe_argument
@overrides_option
@allow_code_option
@click.option(
    "--resume",
    is_flag=False,
    flag_value=_RESUME_NEWEST,
    default=None,
    metavar="[PATH]",
    help="Resume from the checkpoint PATH, or from the newest one in the run folder. With "
    "--resume=auto, start the run, resume it, or report that it has finished, whichever fits.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Delete the checkpoints, models and records of an earlier run from the run folder.",
)
@click.option(
    "--skip-rows",
    metavar="FILE",
    help='Leave rows of the training data out: one {"epoch": 0, "position": 12} per line of FILE.',
)
def train(
    recipe: str,
    overrides: Sequence[str],
    resume: str | None,
    skip_rows: str | None,
    *,
    overwrite: bool,
    allow_code: bool,
) -> None:
    """Run the training that RECIPE describes.

    The run writes recipe.yaml, metrics.jsonl (the reports of all steps), checkpoints, model and, if
    weights are averaged, model_ema to its run folder. If that folder already holds checkpoints,
    pass --resume or --overwrite.

    At SIGTERM or SIGUSR1, the run finishes its step, saves a checkpoint and exits with 75; at the
    first Ctrl-C, with 130. A second Ctrl-C interrupts at once. With --resume=auto, the same command
    then continues the run, also after a crash.

    \b
    Examples:
      mfwrap train causal_lm --set training.max_steps=20
      mfwrap train my.yaml --set callbacks.0.per_print_times=1 --set ema=null
      mfwrap train my.yaml --resume=auto
      mfwrap train my.yaml --resume runs/my/checkpoint-50
      mfwrap train my.yaml --resume=auto --skip-rows bad.jsonl
      mfwrap train my.yaml --overwrite
      mfwrap train my.yaml --allow-code
    """  # noqa: D301  (click keeps the lines of a paragraph that begins with \b)
    from mfwrap.termination import EXIT_STOPPED, exiting_when_stopped  # noqa: PLC0415  (slow)
    from mfwrap.trainer.stops import continued_by, program_words  # noqa: PLC0415  (slow)

    given = [word for override in overrides for word in ("--set", override)]
    given += ["--skip-rows", skip_rows] if skip_rows else []
    given += ["--allow-code"] if allow_code else []
    again = shlex.join([*program_words(), "train", recipe, *given, "--resume=auto"])
    with continued_by(again) as continuation:
        try:
            with exiting_when_stopped():
                checked = checked_recipe(recipe, overrides, allow_code=allow_code)
                _train(checked, resume, skip_rows, overwrite=overwrite)
        except (KeyboardInterrupt, SystemExit) as stopped:
            if continuation.is_said:
                sys.exit(getattr(stopped, "code", 130))
            if getattr(stopped, "code", None) == EXIT_STOPPED:  # before the training
                say(f"stopped by a signal; continue with: {again}")
            raise


def _train(
    checked: "Recipe", resume: str | None, skip_rows: str | None, *, overwrite: bool
) -> None:
    from mfwrap.runner.resumption import check_resume, result_line  # noqa: PLC0415  (slow)
    from mfwrap.runner.run import run_recipe  # noqa: PLC0415  (loads transformers)

    chosen = True if resume == _RESUME_NEWEST else resume or False
    check_resume(checked.arguments.output_dir or "", chosen, overwrite=overwrite)
    _quiet_libraries(checked)
    try:
        result = run_recipe(
            checked, resume=chosen, overwrite=overwrite, skip_rows=skip_rows, say=say
        )
    except RecipeError:
        raise
    except Exception as error:  # noqa: BLE001  (any library may raise any error)
        _fail(checked, error)
    finally:
        _leave_process_group()
    if is_first_process():
        of = "" if result.checkpoint is None else f" ({result.checkpoint})"
        echo(f"result: {result_line(result.folder, result.metrics)}{of}")
        page = shlex.join(["mfwrap", "report", str(result.folder)])
        echo(f"run folder: {result.folder}\nrun page: {page}")


@cli.command()
def recipes() -> None:
    """List the recipes that come with the package."""
    shipped = shipped_recipes()
    for one in shipped.values():
        echo(f"{one.name:{max(map(len, shipped))}}  {one.summary}")


@cli.command()
@click.argument("name", shell_complete=recipe_names)
@click.option("--output", type=click.Path(path_type=Path), help="File; by default NAME.yaml.")
def init(name: str, output: Path | None) -> None:
    """Write the shipped recipe NAME to a file, as a starting point for your own.

    \b
    Example:
      mfwrap init regression --output my.yaml
    """  # noqa: D301  (click keeps the lines of a paragraph that begins with \b)
    shipped = shipped_recipes()
    # A shipped recipe takes precedence over a file of the same name.
    text = shipped[name].text if name in shipped else find_recipe(name)[0]
    file = Path(f"{Path(name).stem}.yaml") if output is None else output
    _write_new(file, text)
    echo(f"wrote {file}; train it with: mfwrap train {file} --resume=auto")


@cli.command("import-mindformers")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="File; by default standard output.")
@click.option(
    "--accept",
    multiple=True,
    metavar="LOSS",
    help="Import FILE although the recipe loses something that changes the numbers, such as "
    "weights. The error of an import without it names the loss. May be given several times.",
)
def import_mindformers(file: Path, output: Path | None, accept: Sequence[str]) -> None:
    """Convert a MindFormers YAML FILE to a recipe that trains the same, and check the recipe.

    A setting that changes the numbers and cannot be carried over is an error that names the setting
    and the option to import the file without it. All other differences are listed on standard
    error. Data are not converted: replace the section `data` before you train the recipe.

    \b
    Examples:
      mfwrap import-mindformers pretrain_llama2_7b.yaml --output llama.yaml
      mfwrap import-mindformers finetune_llama2_7b.yaml --accept weights --output llama.yaml
    """  # noqa: D301  (click keeps the lines of a paragraph that begins with \b)
    from mfwrap.runner import import_mindformers as convert  # noqa: PLC0415  (slow)

    imported = convert(find_recipe(str(file))[0], str(file), accept)
    lost = [f"warning: lost ({loss.name}): {loss.says}" for loss in imported.losses]
    if said := [*lost, *imported.notes]:
        say("\n  ".join([f"{file}:", *said]))
    if output is None:
        click.echo(imported.text, nl=False)
    else:
        _write_new(output, imported.text)
        echo(f"wrote {output}")


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="PNG; by default RUN/run.png.")
def plot(run: Path, output: Path | None) -> None:
    """Plot the loss and the gradient norms of the run folder RUN.

    \b
    Example:
      mfwrap plot runs/causal_lm
    """  # noqa: D301  (click keeps the lines of a paragraph that begins with \b)
    from mfwrap.report.own_files import is_own_picture  # noqa: PLC0415  (loads torch)
    from mfwrap.report.picture import draw_run  # noqa: PLC0415  (loads matplotlib)

    picture = _chosen(run / "run.png", output, is_own_picture)
    _draw(picture, lambda: draw_run(run, picture))


@cli.command()
@click.argument("runs", metavar="RUN...", nargs=-1, type=click.Path(path_type=Path), required=True)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="HTML file; by default RUN/run.html, for several runs run.html in the current folder.",
)
@click.option(
    "--watch",
    type=click.IntRange(min=1),
    is_flag=False,
    flag_value=10,
    metavar="[SECONDS]",
    help="Write the page again every SECONDS, by default 10, until all runs have ended.",
)
def report(runs: Sequence[Path], output: Path | None, watch: int | None) -> None:
    """Write an HTML page of the run folder RUN, or compare several runs on one page.

    The page is one file that needs no network. It shows what went wrong, settings and their
    differences, losses, learning rate, loss scale, gradient norms by layer, step and rank, and
    throughput. With --watch, a browser that shows the page loads it again while the run goes on.

    \b
    Examples:
      mfwrap report runs/causal_lm
      mfwrap report runs/first runs/second --output compared.html
      mfwrap report runs/causal_lm --watch
    """  # noqa: D301  (click keeps the lines of a paragraph that begins with \b)
    from mfwrap.report.own_files import is_own_page  # noqa: PLC0415  (loads torch)
    from mfwrap.report.page import write_run_page  # noqa: PLC0415  (loads torch)
    from mfwrap.report.watch import watch_runs  # noqa: PLC0415  (loads torch)

    usual = runs[0] / "run.html" if len(runs) == 1 else Path("run.html")
    page = _chosen(usual, output, is_own_page)
    if watch is None:
        _draw(page, lambda: write_run_page(runs, page))
        return
    echo(f"writing {page} every {watch} s until the end of the run; Ctrl-C ends this earlier")
    _draw(page, lambda: watch_runs(runs, page, watch))


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--number",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Largest number of rows in a list.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per row.")
def rows(run: Path, number: int, *, as_json: bool) -> None:
    """List the training rows of RUN with the highest and the lowest losses.

    A third list has the rows of several epochs whose loss was never below that of their first
    epoch. The run must have recorded the losses of its rows: `row_losses: true` in the section
    data. Index, epoch and position tell where a row is in the data; `--skip-rows` leaves rows out
    by epoch and position.

    \b
    Examples:
      mfwrap rows runs/causal_lm
      mfwrap rows runs/causal_lm --number 100 --json
    """  # noqa: D301  (click keeps the lines of a paragraph that begins with \b)
    from mfwrap.records.json_lines import to_plain  # noqa: PLC0415  (loads torch)
    from mfwrap.report.rows import RowLists, lists_of, table_lines  # noqa: PLC0415  (loads torch)

    try:
        found = RowLists(run)
    except (ImportError, OSError, ValueError) as error:
        raise RecipeError(str(error)) from error
    lists = lists_of(found, number)
    if as_json:
        for name, listed in lists.items():
            for row in listed:
                echo(json.dumps(to_plain({"list": name, **asdict(row)})))
        return
    echo(f"{len(found):,} rows, trained on {found.num_records:,} times")
    for name, listed in lists.items():
        echo(f"\n{name}: {len(listed)}")
        for line in table_lines(listed) if listed else ():
            echo(line)


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
def verify(run: Path) -> None:
    """Verify the checkpoints in the run folder RUN, or the one checkpoint RUN.

    Every file is read and compared with the checksums that were taken when it was saved. If a
    checkpoint has no checksums, the formats of its files are checked. The output has a line for
    each checkpoint. The line of a damaged checkpoint names the file and the tensor. If any
    checkpoint is damaged, the exit code is 1.

    \b
    Examples:
      mfwrap verify runs/causal_lm
      mfwrap verify runs/causal_lm/checkpoint-50
    """  # noqa: D301  (click keeps the lines of a paragraph that begins with \b)
    from mfwrap.checkpoints import verification  # noqa: PLC0415  (loads torch)

    try:
        folders = verification.checkpoints_in(run) if run.is_dir() else []
    except OSError as error:
        msg = f"{error.filename}: cannot be read ({error.strerror})"
        raise RecipeError(msg) from error
    if not folders:
        msg = f"{run}: no checkpoint found; expected the folder of a run or of a checkpoint"
        raise RecipeError(msg)
    num_damaged = 0
    for folder in folders:
        try:
            verified = verification.verify_of_run(folder)
        except ValueError as error:
            num_damaged += 1
            echo(f"{folder}: damaged: {error}")
            continue
        if verified is None:
            echo(f"{folder}: deleted by the run meanwhile")
            continue
        found = f"intact ({verified.num_files} files, {verified.num_bytes:,} bytes)"
        if verified.caveat is not None:
            found = f"no damage found, but {verified.caveat}"
        echo(f"{folder}: {found}")
    if num_damaged:
        sys.exit(1)


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--wait", is_flag=True, help="Wait until the checkpoint is complete, and print its path alone."
)
def checkpoint(run: Path, *, wait: bool) -> None:
    """Ask the training in the run folder RUN for a checkpoint, without stopping it.

    The training saves after the step that it is doing when it notices the request, which takes
    about a second, longer on a network disk that keeps old listings. Start the command on any
    machine that shares the folder. A request is for the training that runs now: it is forgotten
    when that training ends, also if it is killed.

    \b
    Examples:
      mfwrap checkpoint runs/causal_lm
      mfwrap checkpoint runs/causal_lm --wait
    """  # noqa: D301  (click keeps the lines of a paragraph that begins with \b)
    from mfwrap.records import checkpoint_requests  # noqa: PLC0415  (loads torch)

    try:
        token = checkpoint_requests.request_checkpoint(run)
        if wait:
            click.echo(checkpoint_requests.wait_for_checkpoint(run, token))
        else:
            echo(f"asked the training in {run} for a checkpoint")
    except ValueError as error:
        raise RecipeError(str(error)) from error


for _command in (average, compare, data, port, validate):
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code.

    Args:
        arguments: Arguments without the program's name; by default ``sys.argv[1:]``.
    """
    try:
        code = cli.main(arguments, prog_name="mfwrap", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()  # the whole help
        code = 2
    except click.ClickException as error:
        say(f"{error.format_message()} {_advice(error)}")
        code = 2
    except (RecipeError, ReleaseError) as error:
        say(str(error))
        code = 2
    except ConnectionError as error:  # names the rank, so each rank prints its own
        echo(f"mfwrap: {error}", err=True)
        code = 1
    except (click.Abort, KeyboardInterrupt):
        say("interrupted")
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


def _advice(error: click.ClickException) -> str:
    """Return what to do about a wrong command line."""
    context = getattr(error, "ctx", None)
    has_recipe = context is not None and any(p.name == "overrides" for p in context.command.params)
    if not isinstance(error, click.NoSuchOption):
        if has_recipe and "extra argument" in error.message and "=" in error.message:
            return "Values of the recipe are set by --set KEY=VALUE."
        return "See mfwrap --help."
    options = {name: {o for p in one.params for o in p.opts} for name, one in cli.commands.items()}
    others = [f"mfwrap {name}" for name, known in options.items() if error.option_name in known]
    if others:
        return f"It is an option of {' and '.join(others)}."
    if has_recipe and not error.possibilities:
        from transformers import TrainingArguments  # noqa: PLC0415  (slow)

        key = error.option_name.lstrip("-").replace("-", "_")
        if key in TrainingArguments.__dataclass_fields__:
            return f"It is a key of the recipe: write --set training.{key}=VALUE."
        return f"A value of the recipe is set by --set SECTION.{key}=VALUE."
    return "See mfwrap --help."


def _quiet_libraries(recipe: "Recipe") -> None:
    """Hide all bars but the training's; hide it, too, if the recipe or standard error says so.

    Also hide a warning that no recipe can mend: TRL reads the attribute at each evaluation.
    """
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415  (slow)

    disable_progress_bar()  # of loading and saving models
    recipe.arguments.disable_tqdm = recipe.arguments.disable_tqdm or not sys.stderr.isatty()
    if recipe.arguments.disable_tqdm:
        import datasets  # noqa: PLC0415  (slow)

        datasets.disable_progress_bars()


def _fail(recipe: "Recipe", error: BaseException) -> NoReturn:
    """Print a run's error in one line, write its traceback to the run folder, and exit with 1."""
    from mfwrap.runner.folder import write_traceback  # noqa: PLC0415  (slow)

    file = write_traceback(Path(recipe.arguments.output_dir or ""), error)
    line = " ".join("; ".join([str(error), *getattr(error, "__notes__", ())]).split())
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        line += "; free space on the disk, and continue with --resume=auto"
    line += "" if file is None else f"; traceback in {file}"
    kind = f"{type(error).__name__}{recipe.code.place_of(error)}"
    echo(f"mfwrap: the run failed: {kind}: {line}", err=True)
    sys.exit(1)


def _leave_process_group() -> None:
    from accelerate import PartialState  # noqa: PLC0415  (slow)

    # If the network outlives the process group, the processes may hang at exit.
    gc.collect()
    PartialState().destroy_process_group()


def _chosen(usual: Path, output: Path | None, is_own: Callable[[Path], bool]) -> Path:
    """Return the file to write: `output`, or the usual one unless somebody else has written it."""
    if output is None and os.path.lexists(usual) and not is_own(usual):
        msg = (
            f"{usual} is in the way: mfwrap has not written it; move it away, or choose another "
            "file with --output"
        )
        raise RecipeError(msg)
    return usual if output is None else output


def _draw(file: Path, draw: Callable[[], None]) -> None:
    """Call `draw`, which writes `file`, and print the path of the file."""
    try:
        draw()
    except (FileNotFoundError, ValueError) as error:  # the run is missing or cannot be read
        raise RecipeError(str(error)) from error
    except OSError as error:
        msg = f"cannot write {file}: {error}"
        raise RecipeError(msg) from error
    echo(f"wrote {file}")


def _write_new(file: Path, text: str) -> None:
    """Write a text to a new file; raise `RecipeError` if that is impossible."""
    from mfwrap.checkpoints.whole import whole_file  # noqa: PLC0415  (slow)

    if os.path.lexists(file):
        msg = f"cannot write {file}: File exists"
        raise RecipeError(msg)
    try:
        with whole_file(file) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        msg = f"cannot write {file}: {error.strerror}"
        raise RecipeError(msg) from error
