"""`pad train pivot`: from labels to a classifier that `--rule pivot` or `--rule judge` loads, with a model card.

Next to read: training/features.py for what is looked at, training/pivot.py for the training.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pad_engine.errors import RequestError
from pad_engine.files import check_place
from pad_engine.serving import options
from pad_engine.serving.pair import show_progress
from pad_engine.serving.terminal import BAD_USAGE, fetch, reported

if TYPE_CHECKING:
    from pad_engine.models.loader import LoadedModel
    from pad_engine.training.fit import Settings
    from pad_engine.training.label_file import Label
    from pad_engine.training.pivot import Trained

app = typer.Typer(help="Train what decoding uses.", no_args_is_help=True, rich_markup_mode=None)


@app.command("pivot")
def pivot(
    labels: Annotated[Path, typer.Argument(metavar="LABELS", help="File that `pad label` wrote.")],
    out: Annotated[Path, typer.Option(metavar="NAME", help="Writes NAME.safetensors, NAME.json and NAME.md.")],
    model: options.Model = "smollm2-135m",
    tap_layers: Annotated[
        str | None,
        typer.Option(
            "--tap-layer", "--tap-layers", metavar="N,N,...", help="Of several the best by validation AUC is taken.",
            show_default="at 0.78 of the depth",
        ),
    ] = None,
    scalars: Annotated[str, typer.Option(help="Of entropy, probability and margin.")] = "entropy,probability",
    kind: Annotated[str, typer.Option(help="pivot-mlp or linear-judge.")] = "pivot-mlp",
    pivot_utility: Annotated[
        float | None,
        typer.Option(
            help="Train on clear labels: draft utility at most this for pivots, 0.8 or more for others.",
            show_default="on all",
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the labels, fewer if validation stops falling.")] = 200,
    seed: Annotated[int, typer.Option(help="Of the split and the first weights.")] = 0,
    adapter: options.Adapter = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    max_length: options.MaxLength = None,
    accept_terms: options.AcceptTerms = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:  # fmt: skip
    """Train a classifier of drafted tokens on the target's own states, and compare it with margin and entropy."""
    with reported(bad_request=BAD_USAGE):
        from pad_engine.models.loader import load_model
        from pad_engine.training.fit import Settings
        from pad_engine.training.label_file import read_labels
        from pad_engine.training.model_card import report, save
        from pad_engine.training.pivot import split

        place = checkpoint_place(out)
        names = tuple(name.strip() for name in scalars.split(","))
        settings = Settings(kind, names, epochs, seed=seed, pivot_utility=pivot_utility)
        layers = parse_layers(tap_layers)
        header, found = read_labels(labels)
        split(found, seed)  # refuses too few of them before the model is loaded
        loaded = load_model(
            fetch(model, accept_terms), device=device, dtype=dtype, max_length=max_length, adapters=adapter or [],
            accept_terms=accept_terms, verbose=not as_json,
        )  # fmt: skip
    with reported():
        trained = run(loaded, found, layers, settings, model)
        facts = report(labels, header, settings, trained, made_by(loaded, model, adapter or []))
        save(place, trained.classifier, found, facts)
        if as_json:
            print(json.dumps({"out": str(place), "training": facts}, allow_nan=False))
        else:
            show(place, trained, facts)


def checkpoint_place(out: Path) -> Path:
    """NAME.safetensors. RequestError unless it and the files beside it can be written."""
    place = out if out.suffix == ".safetensors" else out.with_name(f"{out.name}.safetensors")
    for suffix in (".safetensors", ".json", ".md"):
        check_place(place.with_suffix(suffix))
    return place


def parse_layers(text: str | None) -> list[int] | None:
    """Numbers of layers as typed."""
    if text is None:
        return None
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise RequestError(f"--tap-layers must be whole numbers, as in 20,23,26, got {text!r}") from None


def run(
    loaded: "LoadedModel", labels: "list[Label]", layers: list[int] | None, settings: "Settings", model: str
) -> "Trained":
    """Features, then the training. layers: None is the default one."""
    from pad_engine.training.features import extract_features
    from pad_engine.training.pivot import default_layer, train_pivot

    decoder, questions = loaded.decoder, len({label.question for label in labels})
    features = extract_features(
        decoder, labels, layers or [default_layer(decoder.config.num_layers)], loaded.num_tokens,
        lambda done: show_progress("features", done, questions),
    )  # fmt: skip
    return train_pivot(labels, features, settings, model, decoder.device)


def made_by(loaded: "LoadedModel", model: str, adapters: list[str]) -> dict[str, Any]:
    """What the features came from."""
    dtype = str(loaded.decoder.dtype).removeprefix("torch.")
    return {"model": model, "adapters": adapters, "device": str(loaded.decoder.device), "dtype": dtype}


def show(place: Path, trained: "Trained", facts: dict[str, Any]) -> None:
    """What came out, and where it is."""
    from pad_engine.training.model_card import rankings_table, verdict

    print(rankings_table(facts))
    print(verdict(trained.classifier, facts))
    beside = ", ".join(place.with_suffix(suffix).name for suffix in (".json", ".md"))
    print(f"written: {place}, with {beside} beside it", file=sys.stderr)
