"""What do int8 and fp8 weights change? Logits and perplexity on a text, against the model in its own type.

    python bench/quantised.py --model smollm2-135m --text FILE

The text is cut into windows that each model reads from their first token, in one pass. Errors are of logits before any
softmax; the divergence of a row is KL(model || quantised model), in nats. Perplexity is exp of the mean loss of the
tokens behind the first of each window.
"""

import argparse
import hashlib
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

from pad_engine.kernels.quantise import QUANTISED
from pad_engine.kv_cache import RowGroup
from pad_engine.models.decoder import Decoder
from pad_engine.models.loader import load_model, weight_bytes
from pad_engine.models.quantise import AS_STORED
from pad_engine.prompt import encode

TEXT = Path(__file__).parent.parent / "docs" / "design.md"


def logits_of(decoder: Decoder, ids: list[int], num_tokens: int) -> Tensor:
    """fp32 `[len(ids), num_tokens]` of one pass."""
    cache = decoder.new_cache(capacity=len(ids), scratch=len(ids))
    hidden, _ = decoder.forward(cache.place([RowGroup(0, ids, range(len(ids)))]), cache)
    return decoder.logits(hidden)[:, :num_tokens]


def loss_of(logits: Tensor, ids: list[int]) -> float:
    """Summed loss in nats of all ids but the first."""
    picked = logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:], device=logits.device)[:, None])
    return -float(picked.double().sum())


class Errors:
    """Sums over rows of what separates a model's logits from another's."""

    def __init__(self) -> None:
        self.rows, self.absolute, self.largest, self.divergence, self.agreed = 0, 0.0, 0.0, 0.0, 0

    def add(self, exact: Tensor, logits: Tensor) -> None:
        """Both fp32 `[N, V]`."""
        p, q = exact.log_softmax(-1), logits.log_softmax(-1)
        self.rows += len(exact)
        self.absolute += float((logits - exact).abs().mean(-1).double().sum())
        self.largest = max(self.largest, float((logits - exact).abs().max()))
        self.divergence += float((p.exp() * (p - q)).sum(-1).double().sum())
        self.agreed += int((exact.argmax(-1) == logits.argmax(-1)).sum())

    def means(self) -> dict[str, float]:
        """By name, for the result file."""
        return {
            "max_abs_error": round(self.largest, 4),
            "mean_abs_error": round(self.absolute / self.rows, 5),
            "mean_kl_nats": round(self.divergence / self.rows, 6),
            "top1_agreement": round(self.agreed / self.rows, 4),
        }


def windows_of(ids: list[int], window: int, tokens: int) -> list[list[int]]:
    """The first `tokens` ids in windows; a last one of a single id, which predicts nothing, is left out."""
    ids = ids[:tokens]
    parts = [ids[start : start + window] for start in range(0, len(ids), window)]
    return [part for part in parts if len(part) > 1]


def compare(decoders: dict[str, Decoder], windows: list[list[int]], num_tokens: int) -> list[dict[str, Any]]:
    """A row for each kind of weights; the first is what the others are compared with."""
    errors, losses = {kind: Errors() for kind in decoders}, dict.fromkeys(decoders, 0.0)
    for ids in windows:
        rows = {kind: logits_of(decoder, ids, num_tokens) for kind, decoder in decoders.items()}
        for kind, logits in rows.items():
            losses[kind] += loss_of(logits, ids)
            errors[kind].add(rows[AS_STORED], logits)
    predicted = sum(len(ids) - 1 for ids in windows)
    found = []
    for kind, decoder in decoders.items():
        size = weight_bytes(decoder.config, decoder.device, decoder.dtype, decoder.quantised)
        perplexity = torch.tensor(losses[kind] / predicted, dtype=torch.float64).exp().item()
        row = {"weights": kind, "weight_mb": round(size / 1e6, 1), "perplexity": round(perplexity, 4)}
        found.append(row | ({} if kind == AS_STORED else errors[kind].means()))
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=1024, help="of the text, from its start")
    parser.add_argument("--window", type=int, default=256, help="tokens that a model reads at once")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", default="cpu")
    args = parser.parse_args()
    options = {"dtype": args.dtype, "device": args.device, "max_length": args.window, "accept_terms": True}
    # all at once: each window's logits are compared where they are, and none are kept
    loaded = {kind: load_model(args.model, weights=kind, **options) for kind in (AS_STORED, *QUANTISED)}
    first = loaded[AS_STORED]
    text = args.text.read_text(encoding="utf-8")
    windows = windows_of(encode(first.tokenizer, text, first.num_tokens), args.window, args.tokens)
    rows = compare({kind: model.decoder for kind, model in loaded.items()}, windows, first.num_tokens)
    for row in rows:
        print(row, flush=True)
    facts = {
        "model": Path(args.model).stem,
        "dtype": str(first.decoder.dtype).removeprefix("torch."),
        "text": args.text.name,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokens": sum(map(len, windows)),
        "window": args.window,
    }
    print(harness.save("quantised", facts | {"rows": rows}, args.out))


if __name__ == "__main__":
    main()
