"""Features of labelled tokens: those of one plain pass a label, and those that the engine's own records have."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from labelled import LAYER, TOKENS, make_labels, plain_pass
from tiny import Make, some_ids, tiny_decoder

from pad_engine import SamplingParams
from pad_engine.errors import NonFiniteError, RequestError
from pad_engine.state import State
from pad_engine.training import features
from pad_engine.training.features import Features, extract_features
from pad_engine.training.label_file import Label
from pad_engine.tree import DraftTree
from pad_engine.verify import prefill, verify

CLOSE = dict(rtol=1e-4, atol=1e-4)
# a prompt of 7 tokens is longer than the original context, so its length matters
DYNAMIC = {
    "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "max_position_embeddings": 4,
}


def some_labels(decoder: Any) -> list[Label]:
    """Of several questions, in no order: with one text, two texts that part, and two tokens judged at one place."""
    labels = make_labels(decoder, 4, 13)
    first = labels[5]
    apart = replace(first, step=90, prefix_ids=[*first.prefix_ids[:-1], 3], draft_id=7)
    twin = replace(first, step=91, draft_id=9)
    ends = replace(labels[-1], step=92, draft_id=11)
    labels += [apart, twin, ends, replace(first, question="alone", prompt_ids=[5], prefix_ids=[], draft_id=5)]
    random.Random(0).shuffle(labels)
    return labels


def check(found: Features, decoder: Any, labels: list[Label], layer: int = LAYER) -> None:
    """Against a pass of its own for every label, in double precision where the row is concerned."""
    for index, label in enumerate(labels):
        ids = [*label.prompt_ids, *label.prefix_ids, label.draft_id]
        logits, states = plain_pass(decoder, ids, layer, len(label.prompt_ids))
        torch.testing.assert_close(found.hidden[layer][index], states[-1], **CLOSE)
        row = logits[-2].double()
        p, top = row.softmax(-1), row.topk(2)
        values = {"entropy": -(p * p.log()).sum(), "probability": p[label.draft_id], "margin": -top.values.diff()[0]}
        for name, value in values.items():
            assert float(found.scalars[name][index]) == pytest.approx(float(value), abs=1e-4), (name, label)
        assert int(found.choice[index]) == int(top.indices[0])


@pytest.mark.parametrize("rows", [256, 5])
@pytest.mark.parametrize(
    ("family", "options"), [("llama", {}), ("gemma3_text", {}), ("mistral", {}), ("llama", DYNAMIC)]
)
def test_they_are_those_of_a_plain_pass_a_label(
    family: str, options: dict[str, Any], rows: int, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "ROWS", rows)
    decoder = tiny_decoder(make_model(family, **options))
    labels, done = some_labels(decoder), []
    monkeypatch.setattr(features, "SAME_CHOICE", 0.0)  # some of these have texts that target_id was not asked for
    found = extract_features(decoder, labels, [LAYER, 2], TOKENS, done.append)
    check(found, decoder, labels)
    check(found, decoder, labels[:3], layer=2)
    assert done == [1, 2, 3, 4, 5]


def test_a_text_is_read_once(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes for all questions: their prompts, each once, and the texts."""
    decoder, passes = tiny_decoder(make_model("llama")), []
    labels = make_labels(decoder, 4, 9)
    forward = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda *given: passes.append(given[0].tokens.numel()) or forward(*given))
    extract_features(decoder, labels, [LAYER], TOKENS)
    # two prompts but for their last tokens; then four times this token, and of nine places those three whose token the
    # text does not go on with
    assert passes == [12, 52]


def test_they_are_those_of_a_record(make_model: Make) -> None:
    decoder = tiny_decoder(make_model("llama"))
    labels = make_labels(decoder, 2, 6)
    found = extract_features(decoder, labels, [LAYER], TOKENS)
    for index, label in enumerate(labels):
        ids = [*label.prompt_ids, *label.prefix_ids]
        cache = decoder.new_cache(capacity=40, scratch=8)
        with torch.inference_mode():
            prefill(decoder, cache, 0, ids[:-1], 512)
            state = State(ids, len(ids), 40, SamplingParams(), 0, frozenset())
            tree = DraftTree([ids[-1], 8, label.draft_id], [-1, 0, 0])
            record = verify(decoder, cache, [state], [tree], TOKENS, (LAYER,))
        torch.testing.assert_close(found.hidden[LAYER][index], record.taps[LAYER][2], **CLOSE)
        stats = record.judge_stats
        values = {"entropy": stats.entropy, "probability": record.judge_p, "margin": stats.margin}
        for name, value in values.items():
            torch.testing.assert_close(found.scalars[name][index], value[2], **CLOSE)


def test_ids_past_the_vocabulary_have_no_probability(make_model: Make) -> None:
    decoder = tiny_decoder(make_model("llama"))
    label = make_labels(decoder, 1, 2)[1]
    logits = plain_pass(decoder, [*label.prompt_ids, *label.prefix_ids], LAYER)[0][-1, :258]
    label = replace(label, target_id=int(logits.argmax()))
    found = extract_features(decoder, [label], [LAYER], 258)
    assert float(found.scalars["probability"]) == pytest.approx(float(logits.softmax(-1)[label.draft_id]), abs=1e-5)


@pytest.mark.parametrize(
    ("changed", "layers", "words"),
    [
        ({}, [3], "tap layer 3: this model has layers 0 to 2"),
        ({}, [-1], "tap layer -1"),
        ({"draft_id": 300}, [1], "label of question q1, step 1: token 300 is not one of this model's 300"),
        ({"prefix_ids": [-1]}, [1], "token -1 is not one"),
        ({"prompt_ids": some_ids(128)}, [1], "question q1, step 1: 130 tokens do not fit a context of 128"),
    ],
)
def test_labels_that_the_model_cannot_read(
    changed: dict[str, Any], layers: list[int], words: str, make_model: Make
) -> None:
    decoder = tiny_decoder(make_model("llama"))
    labels = make_labels(decoder, 2, 2)
    labels[-1] = replace(labels[-1], **changed)
    with pytest.raises(RequestError, match=words):
        extract_features(decoder, labels, layers, TOKENS)


def test_labels_of_another_model(make_model: Make) -> None:
    labels = make_labels(tiny_decoder(make_model("llama")), 3, 5)
    with pytest.raises(RequestError, match="made with another target: its choice is this model's for 0% of them"):
        extract_features(tiny_decoder(make_model("llama", seed=1)), labels, [LAYER], TOKENS)


def test_a_row_that_is_not_finite_teaches_nothing(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny_decoder(make_model("llama"))
    labels = make_labels(decoder, 2, 3)
    monkeypatch.setattr(decoder, "logits", lambda hidden: torch.full((len(hidden), TOKENS), torch.nan))
    with pytest.raises(NonFiniteError, match="not finite behind some of the labelled tokens"):
        extract_features(decoder, labels, [LAYER], TOKENS)
