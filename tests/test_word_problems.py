"""Word problems: every sum of every solution is right, all wordings occur, and no two splits share a question."""

import re
from collections import Counter
from itertools import islice

import pytest

from pad_engine.training.tasks import word_solutions, word_stories
from pad_engine.training.tasks.splits import SPLITS
from pad_engine.training.tasks.word_problems import WordProblems, parse_steps, parse_wording
from pad_engine.training.tasks.word_stories import APPLY, THINGS

SUM = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
KINDS = (
    "START", "START_PACKED", "GAIN", "LOSE", "GAIN_PACKED", "LOSE_PACKED", "TIMES", "SHARE", "PRICE", "COUNT",
)  # fmt: skip
COUNT = 2000
PINNED = (
    "test-0-0-c617edff",
    " This amounts to 32 * 6 = 192. In all these are 31 * 6 = 186 roses. Adding gives 186 + 192 = 378. "
    "What remains is 378 - 2 = 376 roses.\n#### 376",
)


def pattern(wording: str) -> re.Pattern[str]:
    """What matches a sentence however its places are filled in."""
    return re.compile(re.sub(r"\\\{\w+\\\}", r".+?", re.escape(wording)))


@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize("wording", ["a", "b"])
def test_every_solution_is_right(digits: int, wording: str) -> None:
    task, factor = WordProblems(digits=digits, wording=wording), 10**digits - 1
    seen, swapped, restated = Counter[str](), 0, 0
    for question, solution in task.examples("train", COUNT, seed=digits):
        assert task.extract(solution) == question.answer and task.utility(question, solution) == 1
        asked = {int(number) for number in re.findall(r"\d+", str(question.prompt))}
        known, sums = set(asked), SUM.findall(solution)
        assert 2 <= len(sums) <= 4
        for left, op, right, result in sums:
            x, y, z = int(left), int(right), int(result)
            assert APPLY[op](x, y) == z >= 2 and (op != "/" or x % y == 0)
            # a sum is of numbers that the text tells, or that came out before
            assert x in known and y in known
            if op in "*/":
                small, large = sorted((x, y) if op == "*" else (y, z))
                assert 2 <= small <= 9 and large <= factor
            known.add(z)
            seen[op] += 1
        # every number of the question is used, but for those of equal value
        assert asked <= {int(number) for sum_ in sums for number in (sum_[0], sum_[2])}
        assert str(z) == question.answer
        first = re.search(r"\d+", str(question.prompt))
        swapped += first is not None and first[0] != sums[0][0]
        restated += solution.count(".") > len(sums)
    assert min(seen[op] for op in APPLY) > COUNT / 30
    assert 0.1 < swapped / COUNT < 0.9 and 0.2 < restated / COUNT < 0.8


def test_all_wordings_occur_and_the_two_sets_share_none() -> None:
    questions = "\n".join(str(q.prompt) for q in WordProblems().questions("train", COUNT))
    for kind in KINDS:
        wordings = getattr(word_stories, kind)
        assert len(set(wordings)) >= 6
        assert all(pattern(wording).search(questions) for wording in wordings), kind
    sets = {}
    for name in ("a", "b"):
        steps = word_solutions.STEPS[name]
        assert steps.keys() == APPLY.keys() and all(len(set(wordings)) >= 6 for wordings in steps.values())
        sets[name] = {wording for wordings in steps.values() for wording in wordings}
        sets[name] |= set(word_solutions.RESTATED[name])
    for name, other in (("a", "b"), ("b", "a")):
        text = "\n".join(solution for _, solution in WordProblems(wording=name).examples("train", COUNT))
        assert all(pattern(wording).search(text) for wording in sets[name])
        sentences = {SUM.sub("#", sentence) for sentence in re.split(r"(?<=\.) |\n", text)}
        assert not any(
            re.fullmatch(pattern(wording.replace("{sum}", "#")), sentence)
            for wording in sets[other]
            for sentence in sentences
        )


def test_splits_and_seeds_share_no_question() -> None:
    task = WordProblems()
    texts = {split: [str(q.prompt) for q in task.questions(split, COUNT)] for split in SPLITS}
    texts |= {f"{split} 1": [str(q.prompt) for q in task.questions(split, 500, seed=1)] for split in SPLITS}
    # so many draws, and not one the same: fresh questions by the thousand are there
    assert len(set().union(*texts.values())) == sum(len(part) for part in texts.values())
    assert len({q.id for split in SPLITS for q in task.questions(split, COUNT)}) == 3 * COUNT


def test_a_question_depends_on_split_seed_and_index_alone() -> None:
    task = WordProblems()
    many = list(task.questions("calibration", 40, seed=3))
    assert list(islice(WordProblems(wording="b").questions("calibration", seed=3), 40)) == many
    assert list(task.questions("calibration", 7, seed=3)) == many[:7]
    pairs = list(task.examples("calibration", 40, seed=3))
    assert [question for question, _ in pairs] == many and pairs == list(task.examples("calibration", 40, seed=3))
    # pinned: published figures are of these questions
    question, solution = next(task.examples("test", 1))
    assert (question.id, solution) == PINNED


def test_mixed_wording_goes_by_the_things() -> None:
    pairs = list(WordProblems(wording="mixed:0.3").examples("train", 1000))
    a, b = ([text for _, text in WordProblems(wording=name).examples("train", 1000)] for name in ("a", "b"))
    others = set(THINGS[:6])
    for (question, solution), in_a, in_b in zip(pairs, a, b, strict=True):
        assert solution == (in_b if others & set(re.findall(r"\w+", str(question.prompt))) else in_a)
    assert 0.25 < sum(solution in b for _, solution in pairs) / 1000 < 0.35
    assert [parse_wording(text) for text in ("a", "b", "mixed:0.25")] == [0.0, 1.0, 0.25]


@pytest.mark.parametrize("steps", ["2", "3-4", "4"])
def test_number_of_steps(steps: str) -> None:
    low, high = parse_steps(steps)
    counts = Counter(len(SUM.findall(text)) for _, text in WordProblems(steps=steps).examples("test", 300))
    assert counts.keys() == set(range(low, high + 1))


def test_a_solution_that_is_cut_off_has_no_answer() -> None:
    task = WordProblems()
    question, solution = next(task.examples("test", 1))
    assert task.extract(solution.partition("####")[0]) is None
    assert task.utility(question, solution.partition("####")[0]) == 0
    assert task.utility(question, f"{solution}\nQuestion: 1 + 1\n#### 2") == 1
    assert task.utility(question, solution + "0") == 0
