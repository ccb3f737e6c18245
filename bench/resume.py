"""A result file that grows part by part: a run that is stopped leaves what it has measured, and the next one goes on.

A part is named by its place in the file, ("drafters", "ngram", "edit") for instance, and holds all that its figures are
compared with, so that every ratio is of one process. A file that lacks parts says which.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import harness

Place = tuple[str, ...]
# each is given what was measured before it
Parts = Mapping[Place, Callable[[dict[str, Any]], Any]]
UNFINISHED = "unfinished"  # the parts that a file lacks


def measure_parts(name: str, facts: Mapping[str, Any], parts: Parts, folder: str) -> dict[str, Any]:
    """Measure parts in their order and write `results/<folder>/<name>.json` behind each; returns facts and parts.

    Parts are taken from the file where the same command left it unfinished, at the same commit and on the same card.
    """
    found = earlier(name, parts, folder)
    missing = [place for place in parts if not has(found, place)]
    while missing:
        place = missing.pop(0)
        put(found, place, parts[place](found))
        left = {UNFINISHED: ["/".join(other) for other in missing]} if missing else {}
        path = harness.save(name, {**facts, **found, **left}, folder)
        print(f"{'/'.join(place)} in {path}", flush=True)
    return {**facts, **found}


def earlier(name: str, parts: Parts, folder: str) -> dict[str, Any]:
    """The parts that an unfinished file of this command holds."""
    path = harness.RESULTS / folder / f"{name}.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none, or one whose writing was stopped
        return {}
    undated = {"date": None}
    same = content.get("command") == harness.command() and (
        content.get("environment", {}) | undated == harness.environment() | undated
    )
    found: dict[str, Any] = {}
    if UNFINISHED in content and same:
        for place in parts:
            if has(content, place):
                put(found, place, at(content, place))
    return found


def at(found: Any, place: Place) -> Any:
    """What stands there; KeyError if nothing does."""
    for key in place:
        found = found[key]
    return found


def has(found: Any, place: Place) -> bool:
    """Whether something stands there."""
    try:
        at(found, place)
    except KeyError:
        return False
    return True


def put(found: dict[str, Any], place: Place, part: object) -> None:
    """Put a part in its place."""
    *outer, last = place
    for key in outer:
        found = found.setdefault(key, {})
    found[last] = part
