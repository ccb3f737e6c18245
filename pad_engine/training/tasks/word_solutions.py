"""Worked solutions of word problems in two sets of wordings that share no sentence: "a", the target's, and "b", the
other one that a drafter may have learnt."""

import random

from pad_engine.training.tasks.final_number import MARKER
from pad_engine.training.tasks.word_stories import Step, Story

# By operator, six wordings each; {sum} is the whole equation, {z} its result.
STEPS = {
    "a": {
        "+": (
            "Adding gives {sum}.",
            "{name} then has {sum} {unit}.",
            "We add: {sum}.",
            "That makes {sum} {unit}.",
            "The total grows to {sum}.",
            "Together this is {sum} {unit}.",
        ),
        "-": (
            "Taking away gives {sum}.",
            "{name} then has {sum} {unit} left.",
            "We subtract: {sum}.",
            "That leaves {sum} {unit}.",
            "The total drops to {sum}.",
            "What remains is {sum} {unit}.",
        ),
        "*": (
            "Multiplying gives {sum}.",
            "In all these are {sum} {unit}.",
            "We multiply: {sum}.",
            "That comes to {sum} {unit}.",
            "Equal parts add up to {sum} {unit}.",
            "This amounts to {sum}.",
        ),
        "/": (
            "Dividing gives {sum}.",
            "Each part has {sum} {unit}.",
            "We divide: {sum}.",
            "Split evenly, that is {sum}.",
            "The equal shares are {sum} {unit}.",
            "Per part this makes {sum}.",
        ),
    },
    "b": {
        "+": (
            "The sum is {sum}.",
            "Now there are {sum} {unit}.",
            "Put together: {sum}.",
            "After the increase we get {sum}.",
            "It goes up to {sum}.",
            "Summing up, one finds {sum} {unit}.",
        ),
        "-": (
            "The difference is {sum}.",
            "Now there are only {sum} {unit}.",
            "Without those that are gone: {sum}.",
            "After the decrease we get {sum}.",
            "It goes down to {sum}.",
            "Removing them, {sum} {unit} stay.",
        ),
        "*": (
            "The product is {sum}.",
            "So many times, it is {sum} {unit}.",
            "As a multiplication: {sum}.",
            "Repeated so often, we get {sum}.",
            "One finds {sum} {unit}.",
            "Scaling up leads to {sum}.",
        ),
        "/": (
            "The quotient is {sum}.",
            "One share is {sum} {unit}.",
            "As a division: {sum}.",
            "Handed out fairly, it is {sum}.",
            "Cutting into equal pieces leads to {sum}.",
            "A single portion comes to {sum} {unit}.",
        ),
    },
}
RESTATED = {
    "a": (
        "So there are {z} {unit}.",
        "This means {z} {unit}.",
        "Counted up, {z} {unit}.",
        "We keep the {z} in mind.",
        "The number is {z} at this point.",
        "That is {z} so far.",
    ),
    "b": (
        "Hence it is {z} {unit}.",
        "In short, {z}.",
        "Let us note {z} {unit}.",
        "Written down: {z}.",
        "Remember the {z} {unit}.",
        "At this stage we are at {z}.",
    ),
}
RESTATING = 0.3  # how often an intermediate result is said again


def worded(story: Story, wording: str, draw: random.Random) -> str:
    """A solution as text that follows "Answer:"; wording: "a" or "b". Sums and products have their operands in either
    order, and some results in between are said again."""
    sentences = []
    for step in story.steps:
        words = {"sum": equation(step, draw), "z": step.result, "unit": step.unit, "name": story.name}
        sentences.append(draw.choice(STEPS[wording][step.op]).format(**words))
        if step is not story.steps[-1] and draw.random() < RESTATING:
            sentences.append(draw.choice(RESTATED[wording]).format(**words))
    return f" {' '.join(sentences)}\n{MARKER} {story.steps[-1].result}"


def equation(step: Step, draw: random.Random) -> str:
    """The step with its result."""
    left, right = step.left, step.right
    if step.op in "+*" and draw.random() < 0.5:
        left, right = right, left
    return f"{left} {step.op} {right} = {step.result}"
