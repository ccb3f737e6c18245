"""The rounds of an answer as JSON holds them: each tree, what of it was kept, and where each token came from."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from pad_engine.config import SamplingParams
from pad_engine.serving.options import EngineOptions

if TYPE_CHECKING:
    from pad_engine.captured import Played
    from pad_engine.engine import Engine
    from pad_engine.output import Output
    from pad_engine.state import Commit

DRAFT, OVERRIDE, TARGET = "draft", "override", "target"  # where a token came from


def token_texts(tokenizer: Any, tokens: Sequence[int], whole: str) -> list[str]:
    """What each token adds to the text: all together they are `whole`, which a stop text may have cut. A token that
    ends inside a character adds nothing, and the one that completes it adds all of it."""
    from pad_engine.text import TextStream

    stream = TextStream(tokenizer)
    pieces = [stream.push([token])[0] for token in tokens]
    if pieces:
        pieces[-1] += stream.flush()
    left, texts = len(whole), []
    for piece in pieces:
        texts.append(piece[:left])
        left -= len(texts[-1])
    return texts


def emitted_nodes(commit: "Commit") -> list[int | None]:
    """The tree's node of each emitted token, None for the target's own."""
    nodes: list[int | None] = [*commit.path[1:]]
    # an answer that ends with a drafted token does not keep that token's row, so the path is one node short
    if len(nodes) < commit.accepted:
        children, overridden = commit.tree.children[commit.path[-1]], {one.node for one in commit.overridden}
        twins = [child for child in children if commit.tree.tokens[child] == commit.tokens[commit.accepted - 1]]
        nodes.append(next((child for child in twins if child in overridden), twins[0]))
    return nodes[: commit.accepted] + [None] * (len(commit.tokens) - commit.accepted)


def round_object(played: "Played", texts: Sequence[str]) -> dict[str, Any]:
    """One round. texts: of its emitted tokens. A token of the tree is None where it was rejected on a GPU."""
    from pad_engine.tree import UNKNOWN

    commit = played.commit
    overridden = {one.node: one for one in commit.overridden}
    emitted = []
    for token, node, text in zip(commit.tokens, emitted_nodes(commit), texts, strict=True):
        origin = TARGET if node is None else OVERRIDE if node in overridden else DRAFT
        fields: dict[str, Any] = {"token": token, "text": text, "origin": origin, "node": node}
        if node is not None and node in overridden:
            numbers = overridden[node]._asdict()
            del numbers["node"]
            # JSON has no infinities
            fields |= {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        emitted.append(fields)
    known = [None if token == UNKNOWN else token for token in commit.tree.tokens]
    return {
        "tree": {"tokens": known, "parents": commit.tree.parents},
        "path": commit.path,
        "emitted": emitted,
        "draft_ms": played.draft_ms,
        "verify_ms": played.verify_ms,
    }


def as_object(
    chosen: EngineOptions,
    engine: "Engine",
    params: SamplingParams,
    ids: Sequence[int],
    rounds: Sequence["Played"],
    out: "Output",
) -> dict[str, Any]:
    """Everything of one answer. ids: of the prompt."""
    texts = iter(token_texts(engine.tokenizer, out.token_ids, out.text))
    objects = [round_object(played, [next(texts) for _ in played.commit.tokens]) for played in rounds]
    origins = Counter(token["origin"] for one in objects for token in one["emitted"])
    return {
        "request": request_object(chosen, engine, replace(params, seed=out.stats.seed)),
        "prompt_ids": list(ids),
        "text": out.text,
        "finish_reason": out.finish_reason,
        "rounds": objects,
        "totals": {
            "origins": {origin: origins[origin] for origin in (DRAFT, OVERRIDE, TARGET)},
            "draft_ms": sum(played.draft_ms for played in rounds),
            "verify_ms": sum(played.verify_ms for played in rounds),
            "stats": out.stats.to_dict(),
        },
    }


def request_object(chosen: EngineOptions, engine: "Engine", params: SamplingParams) -> dict[str, Any]:
    """What was asked for, with the seed that was used."""
    from pad_engine.rules.select import rule_for

    rule = rule_for(engine.rule, params)
    return {
        "model": chosen.model,
        "rule": rule.name if chosen.rule == "auto" else chosen.rule,
        "lossless": rule.lossless,
        "drafter": chosen.drafter_spec,
        "draft_model": chosen.draft_model,
        "trees": chosen.trees,
        "budget": chosen.budget,
        "device": str(engine.target.device),
        "dtype": str(engine.target.dtype).removeprefix("torch."),
        "sampling": asdict(params),
    }
