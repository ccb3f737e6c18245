"""Labels of tiny models whose truth is known: a token is a pivot iff the state behind its row lies on one side."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from tiny import some_ids
from torch import Tensor

from pad_engine.kv_cache import RowGroup
from pad_engine.models.decoder import Decoder
from pad_engine.training.features import extract_features
from pad_engine.training.label_file import Label

TOKENS, LAYER = 300, 1  # of tiny models: ids, and the layer that pivots are read from


@torch.inference_mode()
def plain_pass(decoder: Decoder, ids: Sequence[int], layer: int, prompt_length: int = 0) -> tuple[Tensor, Tensor]:
    """Logits `[n, V]` and the states behind a layer `[n, d]` of one pass over a text, from nothing."""
    cache = decoder.new_cache(capacity=len(ids), scratch=len(ids))
    cache.reset(0, prompt_length)
    hidden, taps = decoder.forward(cache.place([RowGroup(0, ids, range(len(ids)))]), cache, (layer,))
    return decoder.logits(hidden), taps[layer]


def make_labels(decoder: Decoder, questions: int, steps: int, seed: int = 0) -> list[Label]:
    """`steps` labels of each question, one behind the other in a random text, which goes on now with the judged token
    and now with another one. target_id is the model's own."""
    generator = torch.Generator().manual_seed(seed)
    labels = []
    for number in range(questions):
        # two questions have one prompt
        prompt, answer = some_ids(7, seed + number // 2), some_ids(steps, seed + 10_000 + number)
        logits, _ = plain_pass(decoder, prompt + answer, LAYER, len(prompt))
        choice = logits.argmax(-1).tolist()[len(prompt) - 1 :]
        others = torch.randint(0, 250, (steps,), generator=generator).tolist()
        for step in range(steps):
            draft = answer[step] if step % 3 else others[step]
            labels.append(Label(f"q{number}", step, prompt, answer[:step], draft, choice[step], 0.5, 1.0, False))
    return labels


def separable(decoder: Decoder, labels: Sequence[Label], harmless: float = 0.5) -> list[Label]:
    """The same tokens, pivotal iff a fixed direction of their state behind LAYER lies above a quantile."""
    features = extract_features(decoder, labels, [LAYER], TOKENS)
    states = features.hidden[LAYER]
    # the widest direction, which few labels suffice to find
    direction = torch.linalg.svd(states - states.mean(0), full_matrices=False).Vh[0]
    place = states @ direction
    pivots = (place > place.quantile(harmless)).tolist()
    pairs = zip(labels, pivots, strict=True)
    return [replace(label, pivot=pivot, draft_utility=float(not pivot)) for label, pivot in pairs]


def write_labels(path: Path, labels: Sequence[Label]) -> Path:
    """As `pad label` writes them."""
    counts = Counter(label.question for label in labels)
    done = [{"question": name, "done": True, "reason": "finished", "labels": n} for name, n in counts.items()]
    lines = [{"header": {"task": "none", "seed": 0}}, *map(asdict, labels), *done]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
