"""Tasks by name and option. Next to read: word_problems.py."""

from importlib import import_module
from pathlib import Path

from pad_engine.config import parse_spec, refuse_rest, take_choice, take_int, take_text
from pad_engine.errors import RequestError
from pad_engine.training.tasks.extraction import Extraction
from pad_engine.training.tasks.gsm8k import GSM8K
from pad_engine.training.tasks.human_eval import HumanEval
from pad_engine.training.tasks.same_answer import ANSWERS, PromptFile, SameAnswer, read_references
from pad_engine.training.tasks.task import Task
from pad_engine.training.tasks.word_problems import WordProblems

NAMES = ("gsm8k", "human-eval", "word-problems", "extraction", "same-answer")


def make_task(spec: str) -> Task:
    """A task by its name and options, or `module:attribute` of the user's own: a task, or what makes one without
    arguments.

    gsm8k:path=FILE[,shots=1]; human-eval[:path=FILE]; word-problems[:steps=2-4,digits=2,wording=a]; extraction;
    same-answer:prompts=FILE[,references=FILE,extract=number].
    """
    if spec.partition(":")[0].strip() not in NAMES:
        return import_task(spec)
    name, values = parse_spec(spec, "task")
    what = f"task {name}"
    task: Task
    if name == "gsm8k":
        task = GSM8K(Path(take_text(values, "path", what)), shots=take_int(values, "shots", 0, what, low=0, high=1))
    elif name == "human-eval":
        path = values.pop("path", "")
        task = HumanEval(Path(path) if path else None)
    elif name == "word-problems":
        task = WordProblems(
            steps=values.pop("steps", "2-4"),
            digits=take_int(values, "digits", 2, what, high=2),
            wording=values.pop("wording", "a"),
        )
    elif name == "extraction":
        task = Extraction()
    else:
        prompts, path = Path(take_text(values, "prompts", what)), values.pop("references", "")
        extract = ANSWERS[take_choice(values, "extract", "number", what, tuple(ANSWERS))]
        task = SameAnswer(PromptFile(prompts).questions, extract, read_references(Path(path)) if path else {})
    refuse_rest(values, what, "pad_engine/training/tasks/select.py lists the options of each task")
    return task


def import_task(spec: str) -> Task:
    """What `module:attribute` names."""
    module, _, attribute = spec.partition(":")
    hint = f"known: {', '.join(NAMES)}; your own is module:attribute, its folder on PYTHONPATH"
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, ValueError, AttributeError) as error:
        raise RequestError(f"there is no task {spec!r}: {error}", hint) from error
    task = found() if isinstance(found, type) or (not isinstance(found, Task) and callable(found)) else found
    if not isinstance(task, Task):
        missing = [
            part for part in ("name", "max_tokens", "questions", "extract", "utility") if not hasattr(task, part)
        ]
        raise RequestError(f"{spec} is no task: it has no {', '.join(missing)}", "pad_engine/training/tasks/task.py")
    return task
