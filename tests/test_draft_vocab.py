"""A draft model with an LM head of some tokens alone drafts what the whole head would without the others, on the host
and on the device, and the answer is the target's own all the same."""

import json
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import CUDA, DEVICE
from test_cli import check_error, pad
from test_rejection import CHAINS, SETTINGS, TREES, drafts, law, plain, q_row, state_of, table, variation
from tiny import BOS, VOCAB, Make, Oracle, make_tokenizer, some_ids, tiny_decoder, tiny_engine

from pad_engine import Engine, SamplingParams
from pad_engine.drafters.draft_model import DraftModel
from pad_engine.drafters.draft_model_device import DeviceDraftModel
from pad_engine.drafters.draft_recipes import WIDTH, Chain, Tree
from pad_engine.drafters.draft_vocab import limit_head, most_frequent, read_vocab
from pad_engine.errors import ModelError, RequestError
from pad_engine.forest import decode_forest, make_pair
from pad_engine.forest_request import ForestRequest
from pad_engine.kernels.quantise import QUANTISED
from pad_engine.loader import load_engine, signature
from pad_engine.models.config import ModelConfig
from pad_engine.models.decoder import Decoder
from pad_engine.models.loader import load_decoder
from pad_engine.tree import DraftTree

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PROMPT = some_ids(12)
SOME = [token for token in range(VOCAB) if token % 5 in (0, 3)]


def write_list(folder: Path, ids: Any = SOME) -> Path:
    path = folder / "vocab.json"
    path.write_text(json.dumps(ids))
    return path


def masked(decoder: Decoder, ids: Sequence[int]) -> Decoder:
    """The whole LM head, with -inf at all other ids."""
    other, head = copy(decoder), decoder.lm_head
    outside = torch.tensor([token for token in range(decoder.config.vocab_size) if token not in set(ids)])
    other.lm_head = lambda x: head(x).index_fill(1, outside, -torch.inf)  # type: ignore[assignment]
    return other


def recorded(engine: Engine) -> list[DraftTree]:
    """The trees that will be proposed."""
    trees: list[DraftTree] = []
    observe = engine.drafter.observe
    engine.drafter.observe = lambda c: (trees.append(c.tree), observe(c))  # type: ignore[method-assign,assignment]
    return trees


def close(rows: torch.Tensor, others: torch.Tensor) -> bool:
    """The same tokens impossible, and else but for the order of sums."""
    return torch.equal(rows.isfinite(), others.isfinite()) and torch.allclose(rows, others, atol=1e-5)


@pytest.mark.parametrize("kind", [None, *QUANTISED])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_logits_of_some_tokens(make_model: Make, family: str, kind: str | None) -> None:
    """Packed, quantised, and tied to the embeddings, which stay whole."""
    folder = make_model(family, tie_word_embeddings=True)
    decoder = load_decoder(
        folder, ModelConfig.from_folder(folder), 64, torch.device("cpu"), torch.float32,
        quantised=None if kind is None else QUANTISED[kind],
    )  # fmt: skip
    hidden, few = torch.randn(3, 48), decoder.with_head(SOME)
    assert few.lm_head.out_features == len(SOME) and few.lm_head.dtype == decoder.lm_head.dtype
    assert close(few.logits(hidden), masked(decoder, SOME).logits(hidden))
    # the first ids alone need no table, and a row ends behind them
    assert close(decoder.with_head(range(40)).logits(hidden), decoder.logits(hidden)[:, :40])
    assert torch.equal(decoder.with_head(range(VOCAB)).logits(hidden), decoder.logits(hidden))
    assert few.embedding is decoder.embedding and decoder.head_ids is None
    assert len({signature(decoder), signature(few)}) == 2


@pytest.mark.parametrize("trees", ["chain", "best-first"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9}, {"temperature": 0.9, "rule": "rejection"},
                                     {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3, "min_tokens": 20,
                                      "logit_bias": {1: 5.0, 3: 2.0}}], ids=str)  # fmt: skip
def test_drafts_are_those_of_a_masked_head(
    make_model: Make, tmp_path: Path, options: dict[str, Any], trees: str
) -> None:
    target, near = (make_model("llama", tie_word_embeddings=False, noise=noise) for noise in (0.0, 0.05))
    rule, options = options.get("rule", "auto"), {key: value for key, value in options.items() if key != "rule"}
    common: dict[str, Any] = dict(draft_model=near, trees=trees, rule=rule, budget=6)
    few = tiny_engine(target, f"draft-model:depth=5,vocab={write_list(tmp_path, SOME[::-1])}", **common)
    whole = tiny_engine(target, "draft-model:depth=5", **common)
    whole.drafter.decoder = masked(whole.drafter.decoder, SOME)  # type: ignore[attr-defined]
    params, found = SamplingParams(40, seed=3, ignore_eos=True, **options), [recorded(few), recorded(whole)]
    answers = [engine.generate(PROMPT, params) for engine in (few, whole)]
    assert answers[0].token_ids == answers[1].token_ids and found[0] == found[1]
    if rule == "auto":
        assert answers[0].token_ids == tiny_engine(target).generate(PROMPT, params).token_ids
    assert {token for tree in found[0] for token in tree.tokens[1:]} <= set(SOME)
    # the list matters: some tokens of the answer were right drafts, and some could not be
    assert answers[0].stats.accepted_tokens > 0 and not set(answers[0].token_ids) <= set(SOME)
    q_rows = [(mine.q_rows, other.q_rows) for mine, other in zip(*found, strict=True)]
    assert (rule == "rejection" and trees == "chain") == any(mine is not None for mine, _ in q_rows)
    for mine, other in q_rows:
        if mine is not None and other is not None:
            # behind the last listed token the row ends, and what it lacks has no weight
            assert torch.allclose(mine, other[:, : mine.shape[1]]) and not other[:, mine.shape[1] :].any()
            assert float(mine[:, SOME].sum()) == pytest.approx(len(mine), rel=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("model", ["self:drop=1", "other"])
def test_all_tokens_are_no_limit(make_model: Make, tmp_path: Path, model: str, temperature: float) -> None:
    folder = make_model("llama")
    draft = make_model("llama", noise=0.05) if model == "other" else model
    params, found = SamplingParams(40, temperature, 3, True), []
    for vocab in ("", ",vocab=9999", f",vocab={write_list(tmp_path, list(range(VOCAB)))}"):
        engine = tiny_engine(folder, f"draft-model:depth=4{vocab}", draft_model=draft, budget=5)
        trees = recorded(engine)
        found.append((engine.generate(PROMPT, params).token_ids, [tree.tokens for tree in trees]))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("vocab", ["1", "2", "file"])
def test_a_list_of_one_or_two_tokens(make_model: Make, tmp_path: Path, vocab: str) -> None:
    """Fewer than a tree has branches; and the answer is the target's own."""
    folder = make_model("llama")
    named = write_list(tmp_path, [7]) if vocab == "file" else vocab
    for trees in ("chain", "best-first"):
        engine = tiny_engine(folder, f"draft-model:vocab={named}", draft_model="self:drop=1", trees=trees, budget=6)
        proposed = recorded(engine)
        out = engine.generate(PROMPT, SamplingParams(25, ignore_eos=True))
        assert out.token_ids == Oracle(folder).greedy(PROMPT, 25) and out.stats.draft_tokens > 0
        allowed = {7} if vocab == "file" else set(range(int(vocab)))
        assert {token for tree in proposed for token in tree.tokens[1:]} <= allowed


@pytest.mark.parametrize("shape", [CHAINS["chain-2"], TREES["two-then-two"]], ids=["chain", "tree"])
@pytest.mark.parametrize("setting", ["plain", "top_k", "all"])
def test_rejection_is_exact(monkeypatch: pytest.MonkeyPatch, setting: str, shape: list[int]) -> None:
    """Every draft of three tokens of five, and every branch, with its probability."""
    target, draft, state = table(5, 1), table(5, 2), state_of(**SETTINGS[setting])
    few = lambda context: draft(context).index_fill(0, torch.tensor([0, 3]), -torch.inf)  # noqa: E731
    length = 1 + max(DraftTree([0] * len(shape), shape).depth)
    got = law(monkeypatch, state, target, drafts(shape, lambda path: q_row(few, state, path)), length)
    assert variation(got, plain(state, target, length)) < 1e-6


@pytest.mark.parametrize("rule", ["auto", "rejection"])
def test_many_sequences_draft_what_each_drafts_alone(make_model: Make, tmp_path: Path, rule: str) -> None:
    target, near = (make_model("llama", tie_word_embeddings=False, noise=noise) for noise in (0.0, 0.06))
    pair = make_pair(target, near, device="cpu")
    assert pair.draft is not None
    few = replace(pair, draft=pair.draft.with_head(SOME), shared_tokens=SOME[-1] + 1)
    temperatures = (0.7, 1.2, 0.9) if rule == "rejection" else (0.0, 0.7, 1.2)
    requests = [ForestRequest(some_ids(5 + i, i), SamplingParams(20, temperatures[i % 3], i), i) for i in range(6)]
    drafter = f"draft-model:depth=3,vocab={write_list(tmp_path)}"
    engine = tiny_engine(target, drafter, draft_model=near, rule=rule, budget=4)
    for answer in decode_forest(few, requests, rule=rule, depth=3, batch=4):
        alone = engine.generate(requests[answer.key].prompt, requests[answer.key].params)
        assert answer.token_ids == alone.token_ids
        assert (answer.rounds, answer.draft_tokens) == (alone.stats.rounds, alone.stats.draft_tokens)
        assert answer.accepted_tokens == alone.stats.accepted_tokens


@pytest.fixture
def engine_of(make_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    # the kernels read weights as they are, not as a CPU's library packs them
    monkeypatch.setattr("pad_engine.kernels.linear.can_pack", lambda weight: False)
    folder = make_model("llama", num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)

    def make(drafter: str, **options: Any) -> Engine:
        draft = {"draft_model": "self:layers=0"} if drafter != "none" else {}
        options = {"dtype": "float32", "fixed_budget": True, "max_length": 128, "device": DEVICE} | draft | options
        return load_engine(folder, drafter=drafter, **options)

    return make


@pytest.mark.parametrize(
    ("trees", "weights"),
    [("chain", "auto"), pytest.param("chain", "int8", marks=() if CUDA else pytest.mark.slow), ("best-first", "auto")],
)
def test_drafts_of_the_device_are_the_hosts(
    engine_of: Callable[..., Engine], tmp_path: Path, trees: str, weights: str
) -> None:
    params = SamplingParams(48 if CUDA else 4, 0.8, 3, ignore_eos=True)
    options: dict[str, Any] = dict(trees=trees, budget=6 if trees == "best-first" else 3, weights=weights)
    spec = f"draft-model:depth=2,vocab={write_list(tmp_path)}"
    device, host = engine_of(spec, fused=True, **options), engine_of(spec, fused=False, **options)
    assert isinstance(device.drafter, DeviceDraftModel) and type(host.drafter) is DraftModel
    assert device.drafter.fused.num_tokens == len(SOME)
    if trees == "best-first":
        host.drafter.builder.branches = host.drafter.builder.width = WIDTH
    ours, theirs = device.generate(PROMPT, params), host.generate(PROMPT, params)
    assert ours.token_ids == theirs.token_ids == engine_of("none", weights=weights).generate(PROMPT, params).token_ids
    assert ours.stats.draft_tokens == theirs.stats.draft_tokens > 0
    assert ours.stats.tried_by_position == theirs.stats.tried_by_position
    assert ours.stats.accepted_by_position == theirs.stats.accepted_by_position
    recipe = Tree(device.drafter, 2, 6) if trees == "best-first" else Chain(device.drafter, 2)
    assert device.rounds is not None and any(kind == recipe for kind, _ in device.rounds.replays)
    nodes = int(device.rounds.forest.start[1])
    assert set(device.rounds.forest.token[1:nodes].tolist()) <= set(SOME)  # of the last round


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[]", "an empty list"),
        ("{}", r"list of token ids, got \{\}"),
        ("7", "list of token ids, got 7"),
        ("[1, -1]", "got -1"),
        ("[1, 2.0]", "got 2.0"),
        ("[true]", "got True"),
        ('["a"]', "got 'a'"),
        ("[4, 9, 4]", "token id 4 2 times"),
        ("[1, 2", "must be a JSON list"),
        (b"\xff\xfe\xff", "must be a JSON list"),
        ("[0, 300]", "token id 300, expected ids below 300"),
    ],
    ids=str,
)
def test_lists_that_make_no_sense_are_refused(
    make_model: Make, tmp_path: Path, content: str | bytes, named: str
) -> None:
    path = tmp_path / "vocab.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RequestError, match=rf"^drafter draft-model: vocab.*{named}"):
        tiny_engine(make_model("llama"), f"draft-model:vocab={path}", draft_model="self:drop=1")


@pytest.mark.parametrize(
    ("vocab", "named"), [("0", r"\[1, "), ("-3", r"\[1, "), ("", "needs vocab"), ("nowhere.json", "No such file")]
)
def test_values_that_make_no_sense_are_refused(make_model: Make, vocab: str, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        tiny_engine(make_model("llama"), f"draft-model:vocab={vocab}", draft_model="self:drop=1")


def test_ids_that_only_the_target_has_are_refused(make_model: Make, tmp_path: Path) -> None:
    draft, path = make_model("llama", seed=5, vocab_size=280, tokens=280), write_list(tmp_path, [3, 285])
    with pytest.raises(RequestError, match="token id 285, expected ids below 280"):
        tiny_engine(make_model("llama"), f"draft-model:vocab={path}", draft_model=draft)


def test_the_memory_of_the_rows_is_counted(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny_decoder(make_model("llama"))
    monkeypatch.setattr("pad_engine.models.memory.available_memory", lambda: 10 * 48 * 4)
    assert limit_head(decoder, SOME[:10], VOCAB).lm_head.out_features == 10
    with pytest.raises(ModelError, match="needed on cpu"):
        limit_head(decoder, SOME[:11], VOCAB)


def test_the_most_frequent_tokens_of_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The id of a byte is the byte. Of tokens that come as often the lower id is taken, and then those that never
    come."""
    monkeypatch.setattr("pad_engine.drafters.draft_vocab.BLOCK", 3)
    first, second = tmp_path / "1.txt", tmp_path / "2.txt"
    first.write_text("zzzz yyy")
    second.write_text("cbcb zé")
    tokenizer = make_tokenizer(add_bos=True)
    assert most_frequent(tokenizer, [first, second], 5) == (sorted(map(ord, "zy bc")), pytest.approx(14 / 16))
    assert most_frequent(tokenizer, [first], 5) == (sorted([*map(ord, "zy "), 0, 1]), 1.0)
    ids, _ = most_frequent(tokenizer, [first], VOCAB)
    assert ids == list(range(VOCAB)) and BOS in ids
    for size in (0, VOCAB + 1):
        with pytest.raises(RequestError, match=r"size must be in \[1, 300\]"):
            most_frequent(tokenizer, [first], size)
    second.write_bytes(b"\xff")
    with pytest.raises(RequestError, match=r"2\.txt is not UTF-8"):
        most_frequent(tokenizer, [second], 5)
    second.write_text("")
    with pytest.raises(RequestError, match="empty"):
        most_frequent(tokenizer, [second], 5)


def test_the_command_makes_a_list_that_a_drafter_takes(make_model: Make, tmp_path: Path) -> None:
    folder, text, out = make_model("llama"), tmp_path / "text.txt", tmp_path / "vocab.json"
    text.write_text("one two three one two")
    made = pad("vocab", text, "--model", folder, "--size", "6", "--out", out)
    assert made.exit_code == 0 and "6 tokens, which are 90.48% of the texts" in made.stderr, made.output
    assert read_vocab(out) == sorted(map(ord, " eotnw"))
    options = ("--model", folder, "--device", "cpu", "--max-tokens", "9", "--ignore-eos", "one two")
    draft = ("--draft-model", "self:drop=1", "--drafter")
    drafted = pad("generate", *draft, f"draft-model:depth=3,vocab={out}", *options)
    assert drafted.exit_code == 0 and drafted.stdout == pad("generate", *options).stdout
    check_error(pad("vocab", text, "--model", folder, "--size", "0", "--out", out), 2, "size must be in")
    check_error(pad("vocab", tmp_path / "no.txt", "--model", folder, "--size", "6", "--out", out), 2, "no.txt")
    check_error(pad("generate", *draft, "draft-model:vocab=no.json", *options), 2, "no.json cannot be read")
