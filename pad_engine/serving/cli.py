"""The command `pad`: each subcommand has a file of its own, and what they share is in terminal.py.

Next to read: generate.py.
"""

from typing import Annotated

import typer

from pad_engine import __version__
from pad_engine.serving import bench, calibrate, chat, evaluate, generate, info, label, models, trace, train, vocab
from pad_engine.serving.terminal import catch_interrupts, open_streams, quiet

app = typer.Typer(
    help="Speculative decoding for one stream at the lowest latency.",
    no_args_is_help=True,
    add_completion=False,
    # plain text: errors in one line, and no traceback with boxes and local variables
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        print("pad-engine", __version__)
        raise typer.Exit


@app.callback()
def pad(
    version: Annotated[bool, typer.Option("--version", help="Show the version.", callback=show_version)] = False,
) -> None:
    """Speculative decoding for one stream at the lowest latency."""


app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("trace")(trace.trace)
app.command("bench")(bench.bench)
app.command("label")(label.label)
app.command("merge-labels")(label.merge_labels)
app.command("calibrate")(calibrate.calibrate)
app.command("eval")(evaluate.evaluate)
app.add_typer(train.app, name="train")
app.command("vocab")(vocab.vocab)
app.command("models")(models.models)
app.command("info")(info.info)


def main() -> None:
    """The entry point of the installed command."""
    quiet()
    open_streams()
    catch_interrupts()
    app()


if __name__ == "__main__":
    main()
