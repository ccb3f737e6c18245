"""transformers decodes, libpad decides: `model.generate(..., custom_generate=speculative(rule="margin:theta=0.9"))`.

One pass of the model reads the last token and what was drafted after it; rejected rows are cropped from its cache. With
a lossless rule the greedy answer is generate's own. generate prepares the prompt, the cache, the logits processors and
the stopping criteria, and they are used as it would use them; but a processor sees drafts that come to nothing, so it
must depend on the ids that it is shown alone. Next to read: chain.py.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.generation.utils import GenerateDecoderOnlyOutput

from pad_engine.config import parse_spec, refuse_rest, take_int
from pad_engine.errors import RequestError
from pad_engine.integrations.chain import MAX_DRAFT, Decided, Judge, PromptLookup, Stats, allowed, native_rule
from pad_engine.native import gumbel_pick

# from the ids so far and a count to at most so many tokens that may follow
Draft = Callable[[Sequence[int], int], Sequence[int]]
CACHE_NAMES = ("cache", "past_key_values")  # of the argument, in newer and older releases
# what generate may hand over for a text; anything else that is not None belongs to inputs which are not followed here
KNOWN = {*CACHE_NAMES, "attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep"}


def speculative(
    drafter: str | nn.Module | Draft = "ngram",
    rule: str = "auto",
    num_draft: int = 8,
    seed: int | None = None,
    streamer: Any = None,
) -> "Speculative":
    """A decoding method for `model.generate(custom_generate=...)`, one sequence at a time.

    drafter: "ngram[:min=2]" copies what followed the same words before; an assistant model of the same tokenizer drafts
    greedily; a function gets the ids so far and a count. rule: "auto" (greedy, or match where generate samples),
    "margin:theta=0.9", "typical", "topk:k=2", "fly" and their options, as the engine has them. num_draft: drafted
    tokens a round, at most 63. seed: of the noise where generate samples; None takes one from torch's generator.
    streamer: here, as generate keeps its own from a custom method.
    """
    if not 1 <= num_draft <= MAX_DRAFT:
        raise RequestError(f"num_draft must be in [1, {MAX_DRAFT}], got {num_draft}")
    native_rule(rule, 2)  # complains here rather than in generate
    if isinstance(drafter, str):
        make_lookup(drafter)
    return Speculative(drafter, rule, num_draft, seed, streamer)


class Speculative:
    """What `speculative` returns. stats: of the last answer."""

    def __init__(
        self, drafter: str | nn.Module | Draft, rule: str, num_draft: int, seed: int | None, streamer: Any
    ) -> None:
        self.drafter, self.rule, self.num_draft, self.seed, self.streamer = drafter, rule, num_draft, seed, streamer
        self.stats = Stats()

    @torch.no_grad()
    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """generate calls this. input_ids: int64 `[1, n]`. Returns the prompt and the answer, int64 `[1, n + m]`, or a
        GenerateDecoderOnlyOutput where generate was asked for one."""
        config = generation_config
        check_request(model, input_ids, config, model_kwargs, self.rule)
        vocab = model.config.get_text_config().vocab_size
        judge, draft = Judge(native_rule(self.rule, vocab)), self.make_draft()
        target = CachedModel.prepared(model, input_ids, model_kwargs)
        answer = Answer(input_ids, stopping_criteria, config, self.streamer)
        seed = self.make_seed() if config.do_sample else None
        target.prefill(input_ids[0, target.length : -1].tolist(), config.prefill_chunk_size)
        while not answer.finished:
            ids = answer.ids
            count = min(self.num_draft, config.max_length - ids.shape[1] - 1)
            drafted = known(draft(ids[0].tolist(), count), count, vocab) if count > 0 else []
            raw = target.read([int(ids[0, -1]), *drafted]).to(ids.device)
            processed = process(raw, ids, drafted, logits_processor)
            decided = decide(judge, raw, processed, drafted, ids.shape[1], seed)
            judge.emit(decided, answer.take(decided.tokens, raw, processed))
            # the answer's last token is not read yet
            target.crop(target.length - (answer.ids.shape[1] - 1))
        self.stats = judge.stats
        return answer.output(target)

    def make_draft(self) -> Draft:
        """A drafter that remembers nothing."""
        if isinstance(self.drafter, str):
            return make_lookup(self.drafter)
        return Assistant(self.drafter) if isinstance(self.drafter, nn.Module) else self.drafter

    def make_seed(self) -> int:
        """The caller's, or one that torch.manual_seed decides."""
        return int(torch.randint(2**63 - 1, ())) if self.seed is None else self.seed


def make_lookup(spec: str) -> PromptLookup:
    """`ngram[:min=2]`."""
    name, values = parse_spec(spec, "drafter")
    if name != "ngram":
        raise RequestError(f"drafter must be ngram, a model or a function, got {spec!r}")
    min_match = take_int(values, "min", 2, "drafter ngram", high=8)
    refuse_rest(values, "drafter ngram", "min")
    return PromptLookup(min_match)


def check_request(model: Any, input_ids: Tensor, config: Any, kwargs: dict[str, Any], rule: str) -> None:
    """RequestError for what generate can do and this cannot."""
    if input_ids.shape[0] != 1 or (config.num_beams or 1) > 1:
        raise RequestError(
            f"speculative decoding takes one sequence and no beams, got a batch of {input_ids.shape[0]} and "
            f"{config.num_beams or 1} beams"
        )
    if rule == "greedy" and config.do_sample:
        raise RequestError("rule greedy needs do_sample=False", "use rule auto or match")
    if model.config.is_encoder_decoder or not config.use_cache:
        raise RequestError("speculative decoding needs a decoder-only model and use_cache=True")
    if config.guidance_scale not in (None, 1):
        raise RequestError("guidance_scale keeps a cache of its own, which cannot follow rejected drafts")
    wanted = [name for name in ("output_attentions", "output_hidden_states") if getattr(config, name)]
    if wanted and config.return_dict_in_generate:
        raise RequestError(f"speculative decoding returns scores and logits, not {wanted[0]}")
    unknown = [name for name, value in kwargs.items() if name not in KNOWN and value is not None]
    if unknown:
        raise RequestError(f"speculative decoding takes input_ids alone, got {', '.join(unknown)}")


def known(draft: Sequence[int], count: int, vocab: int) -> list[int]:
    """The draft up to its first token that the target does not have."""
    kept = list(draft[:count])
    return kept[: next((place for place, token in enumerate(kept) if not 0 <= token < vocab), len(kept))]


def process(raw: Tensor, ids: Tensor, drafted: Sequence[int], processors: Any) -> Tensor:
    """Each row as the processors make it of the ids in front of it. raw: `[1 + D, V]`; ids: `[1, n]`."""
    if not len(processors):
        return raw
    chain = torch.cat((ids, ids.new_tensor([list(drafted)])), dim=1)
    start = ids.shape[1]
    return torch.cat([processors(chain[:, : start + row], raw[row : row + 1].clone()) for row in range(len(raw))])


def decide(
    judge: Judge, raw: Tensor, processed: Tensor, drafted: Sequence[int], length: int, seed: int | None
) -> Decided:
    """What a round emits behind `length` ids. seed: of the noise, None for greedy decoding. Processors have divided by
    the temperature already."""
    raw, processed = raw.cpu(), processed.cpu().contiguous()
    drafted = allowed(drafted, processed)
    rows = 1 + len(drafted)
    positions = torch.arange(length, length + rows)
    temperature = 0.0 if seed is None else 1.0
    return judge.decide(raw[:rows], gumbel_pick(processed[:rows], positions, seed or 0, temperature), drafted)


class Answer:
    """The ids `[1, n + m]` so far, and what generate keeps beside them."""

    def __init__(self, ids: Tensor, stopping_criteria: Any, config: Any, streamer: Any) -> None:
        self.ids, self.stopping_criteria, self.config, self.streamer = ids, stopping_criteria, config, streamer
        self.scores: tuple[Tensor, ...] | None = () if self.keeps("output_scores") else None
        self.logits: tuple[Tensor, ...] | None = () if self.keeps("output_logits") else None
        self.finished = False
        if streamer is not None:
            streamer.put(ids.cpu())

    def keeps(self, name: str) -> bool:
        return bool(self.config.return_dict_in_generate and getattr(self.config, name))

    def take(self, tokens: Sequence[int], raw: Tensor, processed: Tensor) -> int:
        """Append the tokens of a round until a criterion stops; each was picked from the row of its place. Returns how
        many."""
        for place, token in enumerate(tokens):
            self.ids = torch.cat((self.ids, self.ids.new_tensor([[token]])), dim=1)
            if self.scores is not None:
                self.scores += (processed[place : place + 1],)
            if self.logits is not None:
                self.logits += (raw[place : place + 1],)
            if self.streamer is not None:
                self.streamer.put(self.ids[0, -1:].cpu())
            if self.stopping_criteria(self.ids, self.scores).all():
                self.finished = True
                return place + 1
        return len(tokens)

    def output(self, target: "CachedModel") -> Any:
        """What generate returns."""
        if self.streamer is not None:
            self.streamer.end()
        if not self.config.return_dict_in_generate:
            return self.ids
        fields: dict[str, Any] = {"sequences": self.ids, "scores": self.scores, "logits": self.logits}
        fields[target.cache_name] = target.cache
        return GenerateDecoderOnlyOutput(**fields)


class CachedModel:
    """A model with the cache of one sequence, which can be cut back. length: entries of the cache. first: position of
    the entry 0. mask: `[1, n]` of a padded prompt, else None."""

    def __init__(self, model: Any, cache: Any = None, mask: Tensor | None = None, first: int = 0) -> None:
        self.model, self.mask, self.first = model, mask, first
        self.accepts = set(inspect.signature(model.forward).parameters)
        self.cache_name = next(name for name in CACHE_NAMES if name in self.accepts)
        self.cache = DynamicCache(config=model.config.get_text_config(decoder=True)) if cache is None else cache
        self.length = int(self.cache.get_seq_length())

    @classmethod
    def prepared(cls, model: Any, input_ids: Tensor, kwargs: dict[str, Any]) -> "CachedModel":
        """With the cache, mask and positions that generate has prepared."""
        cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
        count, first, positions = input_ids.shape[1], 0, kwargs.get("position_ids")
        if positions is not None:
            first = int(positions[..., -1].max()) - (count - 1)
        target = cls(model, cache, kwargs.get("attention_mask"), first)
        lengths = {x.shape[-1] for x in (target.mask, positions) if x is not None}
        if lengths - {count} or target.length >= count:
            raise RequestError(
                f"input_ids must hold the whole sequence and more than the cache's {target.length} tokens, got {count}"
            )
        return target

    def prefill(self, ids: Sequence[int], chunk: int | None = None) -> None:
        """Read the ids of the prompt, `chunk` at a time."""
        step = chunk or max(1, len(ids))
        for start in range(0, len(ids), step):
            self.forward(ids[start : start + step], 1)
        # a sliding layer forgets what leaves its window, unless it is told that rows may be taken back; not before
        # the prompt, all of which it would keep
        if hasattr(self.cache, "activate_past_recording"):
            self.cache.activate_past_recording()

    def read(self, ids: Sequence[int]) -> Tensor:
        """fp32 logits `[len(ids), V]` after each of the ids."""
        return self.forward(ids, len(ids))

    def forward(self, ids: Sequence[int], keep: int) -> Tensor:
        """One pass; fp32 logits of the last `keep` rows."""
        device, end = self.model.device, self.length + len(ids)
        inputs: dict[str, Any] = {"input_ids": torch.tensor([list(ids)], device=device)}
        if "position_ids" in self.accepts:
            positions = torch.arange(self.length, end, device=device) + self.first
            inputs["position_ids"] = positions.clamp(min=0)[None]  # those of the padding do not matter
        if "logits_to_keep" in self.accepts:
            inputs["logits_to_keep"] = keep
        if self.mask is not None:
            ones = self.mask.new_ones(1, max(0, end - self.mask.shape[1]))
            inputs["attention_mask"] = torch.cat((self.mask, ones), dim=1)[:, :end]
        inputs |= {self.cache_name: self.cache, "use_cache": True, "return_dict": True}
        logits: Tensor = self.model(**inputs).logits
        self.length = end
        return logits[0, -keep:].float()

    def crop(self, count: int) -> None:
        """Take back the last `count` entries."""
        if not getattr(self.cache, "is_croppable", True):
            raise RequestError("this model's cache cannot take rejected rows back")
        self.cache.crop(-count)
        self.length -= count


class Assistant:
    """Greedy chains of a smaller model."""

    def __init__(self, model: Any) -> None:
        self.model = CachedModel(model)
        self.ids: list[int] = []  # that its cache holds

    def __call__(self, ids: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that it would say after ids, the last call's sequence and more."""
        if not self.ids:
            self.model.prefill(ids[:-1])
            self.ids = list(ids[:-1])
        pairs = enumerate(zip(self.ids, ids[:-1], strict=False))
        shared = next((place for place, (mine, theirs) in pairs if mine != theirs), min(len(self.ids), len(ids) - 1))
        self.model.crop(len(self.ids) - shared)
        rows, drafted = list(ids[shared:]), []
        for _ in range(count):
            drafted.append(int(self.model.read(rows)[-1].argmax()))
            rows = drafted[-1:]
        self.ids = [*ids, *drafted[:-1]]
        return drafted
