"""Label the questions of a task with a loaded pair, into a file. Next to read: labels.py."""

from collections.abc import Callable, Sequence

from pad_engine.forest import Forest
from pad_engine.training.label_store import LabelStore
from pad_engine.training.labels import Labeller, LabelSettings, Sound
from pad_engine.training.mismatches import MismatchReader
from pad_engine.training.rollouts import Scheduler
from pad_engine.training.runner import Runner
from pad_engine.training.tasks.task import Question, Task

Progress = Callable[[], None]  # called with each finished question


def label_questions(
    runner: Runner,
    task: Task,
    questions: Sequence[Question],
    settings: LabelSettings,
    store: LabelStore,
    *,
    parallel: int | None = None,
    sound: Sound | None = None,
    progress: Progress = lambda: None,
) -> None:
    """Label what the store does not hold yet. runner: the pair, how many continuations are decoded at once, and how
    many tokens the draft model drafts of each, which the target verifies without loss.

    parallel: questions at work at most; by default twice as many as continuations, of which only those begin that fill
    the batch. Of each a killed run loses the place that was being judged. sound: see Labeller.
    """
    left = {question.id: question for question in questions if question.id not in store.done}
    if not left:
        return
    prompts = {name: runner.encode(question) for name, question in left.items()}
    target = runner.target
    longest = max(map(len, prompts.values())) + task.max_tokens
    length = min(longest, target.decoder.max_length)
    labeller = Labeller(task, settings, runner.text_of, frozenset(target.eos_token_ids), length, sound)
    forest = Forest(runner.pair, depth=runner.depth, batch=runner.batch, max_length=length)
    scheduler = Scheduler(forest, MismatchReader(runner.pair, length), parallel or 2 * runner.batch)
    walks = (
        (name, labeller.walk(question, prompts[name], store.begun.get(name, ()), store.keep))
        for name, question in left.items()
    )
    for name, walked in scheduler.run(walks):
        store.finish(name, walked.reason, len(walked.records))
        progress()
