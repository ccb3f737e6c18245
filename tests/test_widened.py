"""bench/widened.py: the wide pair drafts and accepts what the narrow one does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benches import bench_module
from tiny import Make, some_ids

from pad_engine import SamplingParams
from pad_engine.models.loader import LoadedModel, load_model

widened, peers, compare = map(bench_module, ("widened", "peers", "compare"))
PROMPTS = [some_ids(9, seed) * 2 for seed in range(3)]
PARAMS = SamplingParams(16, ignore_eos=True)
KEPT = [0, 2]


@pytest.fixture(scope="module")
def loaded(make_model: Make) -> LoadedModel:
    folder: Path = make_model("llama")
    return load_model(folder, device="cpu", dtype="float32", max_length=64)


def pair(loaded: LoadedModel) -> Any:
    config = loaded.decoder.config
    larger = replace(config, hidden_size=96, intermediate_size=130, num_layers=4, head_dim=24, vocab_size=333)
    return widened.wide_pair(loaded, loaded.decoder.with_layers(KEPT), larger, replace(larger, num_layers=1))


def test_the_wide_pair_accepts_what_the_narrow_one_does(loaded: LoadedModel) -> None:
    target, draft = pair(loaded)
    assert len(target.decoder.layers) == 4 and len(draft.layers) == 2
    assert (target.decoder.config.hidden_size, draft.config.hidden_size, target.num_tokens) == (96, 96, 333)
    narrow = loaded.decoder.with_layers(KEPT)
    found = []
    for model, drafting in ((loaded, narrow), (target, draft)):
        fast = peers.our_engine("draft-model", model, drafting, 3, fixed_budget=True)
        found.append(compare.compare(peers.our_engine("none", model, drafting), fast, PROMPTS, PARAMS))
    assert found[0].equal == found[1].equal == len(PROMPTS)
    counts = [(one.tokens, one.rounds, one.draft_tokens, one.accepted) for one in found]
    assert counts[0] == counts[1] and 0 < counts[0][3] < counts[0][2]


def test_answers_are_counted(loaded: LoadedModel) -> None:
    target, draft = pair(loaded)
    assert widened.same_answers(loaded, target, draft, {"all": (PROMPTS, PARAMS)}) == "3 of 3"
    assert widened.same_answers(loaded, replace(target, decoder=draft), draft, {"all": (PROMPTS, PARAMS)}) != "3 of 3"
    found = widened.measure("ngram", target, draft, {"all": (PROMPTS[:1], PARAMS)}, 3, 1)
    assert found["all"]["equal answers"] == "1 of 1"


def test_a_shape_gets_the_layers_that_the_model_has(loaded: LoadedModel) -> None:
    shape = replace(loaded.decoder.config, num_layers=2)
    assert widened.roomy(shape, 3).num_layers == 3 and widened.roomy(shape, 1).num_layers == 2
