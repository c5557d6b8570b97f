"""The table of tasks is consistent with PEFT, MindFormers and the shipped recipes."""

import pytest
import yaml
from peft import TaskType

from mfwrap.recipes.tasks.table import SOURCES, TASKS
from mfwrap.runner.library import shipped_recipes
from mfwrap.trainer import MFTrainerMixin

SHIPPED = [yaml.safe_load(recipe.text) for recipe in shipped_recipes().values()]


def test_peft_knows_the_tasks():
    """PEFT knows every task type in the table."""
    names = {task.peft_task_type for task in TASKS.values()} - {None}

    assert names == {"CAUSAL_LM", "SEQ_CLS", "TOKEN_CLS"}
    assert names <= {kind.value for kind in TaskType}


def test_a_trainer_of_mindformers_has_one_task():
    """Each trainer of MindFormers belongs to one task only."""
    trainers = [trainer for task in TASKS.values() for trainer in task.mindformers_trainers]

    assert len(trainers) == len(set(trainers))


@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_a_trainer_and_data(name):
    """Each task has a Trainer with mfwrap's step, Trainer arguments, and a recipe with data."""
    task = TASKS[name]

    assert issubclass(task.trainer(), MFTrainerMixin)
    assert hasattr(task.arguments(), "output_dir")
    sections = [recipe["data"] for recipe in SHIPPED if recipe["task"] == name]
    assert sections
    for data in sections:
        found = SOURCES[data["type"]].known_columns | data.get("columns", {}).keys()
        assert any(columns.keys() <= found for columns in task.needs)
