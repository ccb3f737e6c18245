"""Questions that one step has used must not come again in a later one: training, calibration and test stay apart.

Next to read: calibrate.py.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pad_engine.config import parse_spec
from pad_engine.errors import RequestError


def used_questions(path: Path) -> set[str]:
    """The ids of the questions in a file of labels or results (JSON lines with a `question` each), be they done or only
    begun, or in the .json of a classifier (a list `questions`). RequestError for a file that names none."""
    try:
        held = path.read_bytes()
        if path.suffix == ".jsonl":
            # what follows the last line break was left unfinished by a killed run, within a character perhaps
            records = [json.loads(line) for line in held.split(b"\n")[:-1]]
            found = {str(record["question"]) for record in records if "question" in record}
        else:
            found = listed(json.loads(held))
    except (OSError, ValueError, TypeError) as error:
        raise RequestError(f"the questions of {path} cannot be read: {error}") from error
    if not found:
        raise RequestError(
            f"{path} names no questions", "expected a file of labels or results, or the .json of a classifier"
        )
    return found


def listed(facts: Mapping[str, Any]) -> set[str]:
    """The ids that a JSON object lists, none if it lists none."""
    ids = facts.get("questions")
    return {str(question) for question in ids} if isinstance(ids, list) else set()


def classifier_of(spec: str) -> Path | None:
    """The file of the classifier that a rule's spec names, if it names one."""
    model = parse_spec(spec, "rule")[1].get("model")
    return None if model is None else Path(model).expanduser()


def trained_on(classifier: Path) -> set[str]:
    """The questions that the .json beside a classifier says it was trained on; none where it does not say."""
    path = classifier.with_suffix(".json")
    try:
        return listed(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError) as error:
        raise RequestError(f"the classifier's {path} cannot be read: {error}") from error


def check_apart(questions: Iterable[str], split: str, used: Mapping[str, set[str]]) -> None:
    """RequestError when one of a split's questions is among those of a file. used: ids by the file's name."""
    asked = set(questions)
    for name, ids in used.items():
        if both := sorted(asked & ids):
            raise RequestError(
                f"{len(both)} questions of the {split} split were used by {name}, {both[0]!r} among them",
                "what is measured on questions that a step before has seen says nothing of new ones",
            )
