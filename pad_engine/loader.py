"""From names to a running engine: a loaded model with a drafter, a tree builder, a rule and a controller around it.

Next to read: models/loader.py for the model itself, engine.py for what the parts then do.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pad_engine.config import is_whole, parse_spec, refuse_rest, take_int
from pad_engine.controller import BUDGETS, CAPTURED_BUDGETS, MODEL_ACCEPTANCE, PRIOR_ACCEPTANCE, Controller
from pad_engine.costs import CostFile
from pad_engine.drafters.draft_model import DraftModel
from pad_engine.drafters.draft_model_device import DeviceDraftModel, unsupported_on_device
from pad_engine.drafters.draft_vocab import limit_head, take_vocab
from pad_engine.drafters.drafter import Drafter
from pad_engine.drafters.ngram import NGram
from pad_engine.drafters.ngram_device import DeviceNGram
from pad_engine.drafters.none import NoDrafter
from pad_engine.engine import Engine
from pad_engine.errors import ModelError, RequestError
from pad_engine.kernels.quantise import NAMES
from pad_engine.kv_cache import prefill_chunk
from pad_engine.models.config import ModelConfig
from pad_engine.models.decoder import Decoder
from pad_engine.models.fused import ROW_PADS
from pad_engine.models.loader import LoadedModel, load_decoder, load_model, load_tokenizer, memory_need
from pad_engine.models.memory import Estimate, check
from pad_engine.models.quantise import AS_STORED, pick_weights
from pad_engine.models.sources import resolve
from pad_engine.rules.rule import AcceptanceRule
from pad_engine.rules.select import RelaxedRule
from pad_engine.trees.builder import make_builder

MODEL_OPTIONS = ("device", "dtype", "weights", "max_length", "adapters", "accept_terms", "verbose")


def load_engine(model: str | Path, **options: Any) -> Engine:
    """load_model and make_engine in one: takes the options of both."""
    ours = {key: options.pop(key) for key in MODEL_OPTIONS if key in options}
    return make_engine(load_model(model, **ours), **options)


def make_engine(
    loaded: LoadedModel,
    *,
    drafter: str | Drafter | None = None,
    draft_model: str | Path | None = None,
    draft_weights: str = AS_STORED,
    trees: str = "chain",
    rule: str | AcceptanceRule | RelaxedRule = "auto",
    budget: int = 16,
    fixed_budget: bool = False,
    accept_terms: bool = False,
    fused: bool | None = None,
    strict: bool = False,
) -> Engine:
    """Put a drafter, a rule and a controller around a loaded model. Several engines may share one.

    drafter: "none", "ngram[:min=2,depth=15]", "draft-model[:depth=8,vocab=N]" (vocab: only ids below N are proposed, or
    those that a file lists; see draft_vocab.py), or an object; by default draft-model when a draft_model is given, else
    ngram.
    draft_model: a model like the target, or "self:drop=3,4" / "self:layers=0,1" for the target with layers left out.
    draft_weights: of a draft model of its own, as weights of load_model; the target's have no part in it.
    trees: "chain" or "best-first". budget: nodes of a tree at most, root included. fixed_budget: always draft the whole
    budget instead of what pays. fused, strict: see Engine.
    """
    if not is_whole(budget) or not 1 <= budget <= 64:
        raise RequestError(f"budget must be a whole number in [1, 64], got {budget!r}")
    depth, device = budget - 1, loaded.decoder.device
    on_device = fused or (fused is None and device.type == "cuda")
    costs: CostFile | None = None
    quantised = pick_draft_weights(draft_weights, draft_model, loaded.decoder.quantised, device)
    if isinstance(drafter, str) or drafter is None:
        spec = drafter_spec(drafter, draft_model)
        name, _ = check_drafter(spec, trees, budget)
        check_draft_model(name, draft_model)
        draft = None if draft_model is None else load_draft(draft_model, loaded, accept_terms, quantised)
        drafter, depth = make_drafter(spec, trees, budget, loaded.num_tokens, draft, device, on_device)
        if device.type == "cuda":
            parts = [loaded.decoder, *([drafter.decoder] if isinstance(drafter, DraftModel) else [])]
            options = [spec, type(drafter).__name__, trees, str(budget), str(fused), str(strict)]
            costs = CostFile(device, [*options, *map(signature, parts)])
    controller = make_controller(drafter, budget, depth, trees, fixed_budget, on_device)
    return Engine(
        loaded.decoder,
        loaded.tokenizer,
        drafter,
        controller,
        rule=rule,
        max_length=loaded.decoder.max_length,
        num_tokens=loaded.num_tokens,
        eos_token_ids=loaded.eos_token_ids,
        fused=fused,
        strict=strict,
        costs=costs,
    )


def make_controller(drafter: Drafter, budget: int, depth: int, trees: str, fixed: bool, on_device: bool) -> Controller:
    """What decides how much of a budget a drafter drafts. depth: tokens in a row at most."""
    budgets: Sequence[int] = CAPTURED_BUDGETS if drafter.captured else BUDGETS
    if isinstance(drafter, NGram) and on_device:
        budgets = ROW_PADS  # it costs nothing to draft as much as passes have rows
    everywhere = isinstance(drafter, DraftModel)
    prior = MODEL_ACCEPTANCE if everywhere else PRIOR_ACCEPTANCE
    branching = trees != "chain"
    return Controller(
        budget, depth, branching=branching, fixed=fixed, budgets=budgets, prior=prior, everywhere=everywhere
    )


def draft_engine(loaded: LoadedModel, draft: Decoder, shared_tokens: int, depth: int, **options: Any) -> Engine:
    """make_engine with a draft model that is loaded already, for chains of `depth` tokens, or for none at 0.

    shared_tokens: ids that mean the same to both models. options: those of make_engine that say neither what is drafted
    nor whether rounds are fused. What the controller measures is not kept for later processes.
    """
    spec, device = f"draft-model:depth={depth}" if depth else "none", loaded.decoder.device
    drafter, _ = make_drafter(
        spec, "chain", depth + 1, loaded.num_tokens, (draft, shared_tokens), device, on_device=device.type == "cuda"
    )
    return make_engine(loaded, drafter=drafter, budget=depth + 1, **options)


def signature(decoder: Decoder) -> str:
    """What a decoder's costs depend on."""
    layers = [layer.index for layer in decoder.layers]
    head = decoder.lm_head.out_features
    return f"{decoder.config} {layers} {head} {decoder.dtype} {decoder.quantised} {decoder.max_length}"


def drafter_spec(drafter: str | None, draft_model: str | Path | None) -> str:
    """The drafter that is meant when none is named."""
    return drafter or ("draft-model" if draft_model else "ngram")


def pick_draft_weights(
    weights: str, draft_model: str | Path | None, target: torch.dtype | None, device: torch.device
) -> torch.dtype | None:
    """pick_weights for the draft model. target: what the target's are quantised to, or None."""
    quantised = pick_weights(weights, device)
    if weights == AS_STORED:
        return None
    if draft_model is None:
        raise RequestError(f"draft_weights {weights} is given, but no draft_model")
    if str(draft_model).startswith("self:") and quantised != target:
        own = AS_STORED if target is None else NAMES[target]
        raise RequestError(
            f"draft_weights {weights}: draft_model {draft_model} shares the target's weights, which are {own}",
            "leave draft_weights out, or choose the same weights for the target",
        )
    return quantised


def load_draft(
    draft_model: str | Path, target: LoadedModel, accept_terms: bool, quantised: torch.dtype | None = None
) -> tuple[Decoder, int]:
    """The draft model, and the number of ids that mean the same to both models. quantised: as in Decoder, of one that
    shares no weights."""
    decoder = target.decoder
    if str(draft_model).startswith("self:"):
        kept = self_layers(str(draft_model), decoder.config.num_layers)
        # the weights are shared, the cache is not
        whole = memory_need(decoder.config, decoder.max_length, decoder.device, decoder.dtype).kv_cache
        check(Estimate(0, whole * len(kept) // decoder.config.num_layers, 0), decoder.device)
        return decoder.with_layers(kept), target.num_tokens
    folder = resolve(draft_model, accept_terms=accept_terms)
    config = ModelConfig.from_folder(folder)
    shared = shared_tokens(target.vocabulary, load_tokenizer(folder).get_vocab())
    length = min(decoder.max_length, config.max_position_embeddings)
    draft = load_decoder(folder, config, length, decoder.device, decoder.dtype, quantised=quantised)
    return draft, min(shared, config.vocab_size)


def check_draft_model(drafter: str, draft_model: str | Path | None) -> None:
    """RequestError unless a drafter, by its name, has the draft model that it needs, without loading it."""
    if draft_model is None and drafter == "draft-model":
        raise RequestError("drafter draft-model needs a draft_model", 'a model, or "self:drop=3,4"')
    if draft_model is not None and drafter != "draft-model":
        raise RequestError(f"draft_model is given, but drafter {drafter} uses none", 'choose drafter "draft-model"')
    if str(draft_model).startswith("self:"):
        named_layers(str(draft_model))


def named_layers(spec: str) -> tuple[bool, list[int]]:
    """Whether `self:` keeps the layers that it names, or drops them, and these."""
    _, values = parse_spec(spec, "draft_model")
    if set(values) not in ({"layers"}, {"drop"}):
        raise RequestError(f"draft_model {spec!r}: expected self:layers=0,1,... or self:drop=3,4,...")
    try:
        named = [int(part) for part in next(iter(values.values())).split(",")]
    except ValueError:
        raise RequestError(f"draft_model {spec!r}: layers must be whole numbers") from None
    if len(set(named)) < len(named):
        raise RequestError(f"draft_model {spec!r} names a layer twice")
    return "layers" in values, named


def self_layers(spec: str, num_layers: int) -> list[int]:
    """Layers kept by `self:layers=...` or left by `self:drop=...`."""
    keeps, named = named_layers(spec)
    if any(not 0 <= layer < num_layers for layer in named):
        raise RequestError(f"draft_model {spec!r}: layers must be in [0, {num_layers - 1}]")
    kept = named if keeps else [layer for layer in range(num_layers) if layer not in named]
    if not kept:
        raise RequestError(f"draft_model {spec!r} keeps no layer")
    return kept


def shared_tokens(target: dict[str, int], draft: dict[str, int]) -> int:
    """How many ids, from 0 on, stand for the same token in both vocabularies; one may only be longer than the other."""
    mine, theirs = {i: t for t, i in target.items()}, {i: t for t, i in draft.items()}
    count = min(max(mine), max(theirs)) + 1
    for token_id in range(count):
        if mine.get(token_id) != theirs.get(token_id):
            raise ModelError(
                f"target and draft model have different tokenizers: id {token_id} is {mine.get(token_id)!r} "
                f"to the target and {theirs.get(token_id)!r} to the draft model",
                "a draft model must share the target's tokenizer",
            )
    return count


def make_drafter(
    spec: str,
    trees: str,
    budget: int,
    num_tokens: int,
    draft: tuple[Decoder, int] | None,
    device: torch.device,
    on_device: bool = False,
) -> tuple[Drafter, int]:
    """A drafter by its name and options, and how deep it may draft. on_device: the draft joins the captured round, if
    it can."""
    name, options = check_drafter(spec, trees, budget)
    builder = make_builder(trees)
    if name == "none":
        return NoDrafter(), 0
    if name == "ngram":
        if on_device and builder.branches == 1:
            return DeviceNGram(builder, device, options["depth"], options["min"]), options["depth"]
        return NGram(builder, options["min"]), options["depth"]
    assert draft is not None, "draft-model is made with a draft model"
    decoder, shared = draft
    shared = min(num_tokens, shared)
    if options["vocab"] is not None:
        decoder = limit_head(decoder, options["vocab"], shared)
        shared = min(shared, options["vocab"][-1] + 1)
    depth, capacity = options["depth"], decoder.max_length
    common: dict[str, Any] = dict(
        builder=builder, num_tokens=shared, capacity=capacity, budget=budget, chunk=prefill_chunk(decoder.device)
    )
    if on_device and unsupported_on_device(decoder, capacity, depth, builder.branches) is None:
        return DeviceDraftModel(decoder, depth=depth, **common), depth
    return DraftModel(decoder, **common), depth


def check_drafter(spec: str, trees: str, budget: int) -> tuple[str, dict[str, Any]]:
    """A drafter's name and options, checked without making it: whole numbers, and `vocab` as of take_vocab."""
    name, values = parse_spec(spec, "drafter")
    make_builder(trees)
    options: dict[str, Any] = {}
    if name == "ngram":
        options["min"] = take_int(values, "min", 2, f"drafter {name}", high=8)
        options["depth"] = take_int(values, "depth", max(budget - 1, 1), f"drafter {name}")
    elif name == "draft-model":
        options["depth"] = take_int(values, "depth", 8, "drafter draft-model")
        options["vocab"] = take_vocab(values)
    elif name != "none":
        raise RequestError(f"drafter must be none, ngram or draft-model, got {name!r}")
    refuse_rest(values, f"drafter {name}", ", ".join(options) or "none")
    return name, options
