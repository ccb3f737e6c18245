"""`pad chat`: a conversation on the terminal, or one line a turn from a pipe. Next to read: session.py.

Standard output has the replies alone; everything else goes to standard error.
"""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from pad_engine import chat_template
from pad_engine.config import SamplingParams
from pad_engine.errors import RequestError
from pad_engine.serving import options
from pad_engine.serving.options import EngineOptions, parse_biases, unescape
from pad_engine.serving.reply import show
from pad_engine.serving.session import Session
from pad_engine.serving.terminal import BAD_USAGE, FAILED, INTERRUPTED, one_line, reported

PROMPT = "> "
HELP = """\
/stats         the last reply and the chat in figures
/undo          take back the last turn
/system TEXT   set the system message; without TEXT there is none
/save FILE     write messages and figures as JSON; /save! FILE overwrites
/exit          leave, as Ctrl-D does
//...          a message that begins with a slash
Ctrl-C ends a reply; what has come of it stays."""


def chat(
    model: options.Model = "smollm2-135m",
    draft_model: options.DraftModel = None,
    drafter: options.Drafter = None,
    trees: options.Trees = "chain",
    rule: options.Rule = "auto",
    budget: options.Budget = 16,
    max_tokens: options.MaxTokens = 512,
    min_tokens: options.MinTokens = 0,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    logit_bias: options.LogitBias = None,
    stop: options.Stop = None,
    stop_token_id: options.StopTokenId = None,
    system: Annotated[str, typer.Option(help="System message.", show_default="none")] = "",
    adapter: options.Adapter = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    weights: options.Weights = "auto",
    draft_weights: options.DraftWeights = "auto",
    max_length: options.MaxLength = None,
    accept_terms: options.AcceptTerms = False,
) -> None:
    """Talk with a model: replies as they are written, /help for the rest. From a pipe, each line is a turn."""
    chosen = EngineOptions(
        model, draft_model, drafter, trees, rule, budget, adapter or [], device, dtype, max_length, accept_terms,
        weights, draft_weights,
    )  # fmt: skip
    with reported(bad_request=BAD_USAGE):
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            seed=seed,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=parse_biases(logit_bias or []),
            stop=[unescape(text) for text in stop or []],
            stop_token_ids=stop_token_id or [],
        )
        chosen.check(params)
        chat_template.start()
        engine = chosen.load(verbose=sys.stdin.isatty())
        chat_template.template_of(engine.tokenizer)
        session = Session(engine, params, system, model)
    if not converse(session):
        raise typer.Exit(FAILED)


def converse(session: Session) -> bool:
    """Read and answer until there is no more; returns whether all went well, which matters to a script only."""
    at_terminal, well = sys.stdin.isatty(), True
    if at_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401 input() uses it then
        tell(f"{session.model}: /help lists the commands, Ctrl-D leaves")
    while True:
        try:
            with reported():
                line = read_line(at_terminal)
                if line is None or (line := line.strip()) == "/exit":
                    return well or at_terminal
                if line:
                    carry_out(session, line)
        except typer.Exit as leave:
            # an error was told, and the chat goes on; at the terminal also after a Ctrl-C while nothing was written
            if leave.exit_code != FAILED and not (leave.exit_code == INTERRUPTED and at_terminal):
                raise
            well = False
            if leave.exit_code == INTERRUPTED:
                tell("")


def read_line(at_terminal: bool) -> str | None:
    """The next line, or None at the end."""
    if at_terminal and sys.stdout.isatty():
        try:
            return input(PROMPT)
        except EOFError:
            tell("")
            return None
        except UnicodeDecodeError as error:
            raise RequestError(f"this line is not UTF-8: {error.reason}") from error
    if at_terminal:
        print(PROMPT, end="", file=sys.stderr, flush=True)
    raw = sys.stdin.buffer.readline()
    try:
        return raw.decode() if raw else None
    except UnicodeDecodeError as error:
        raise RequestError(f"this line is not UTF-8: {error}") from error


def carry_out(session: Session, line: str) -> None:
    """A command, or a turn."""
    if not line.startswith("/") or line.startswith("//"):
        reply(session, line.removeprefix("/"))
        return
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    if rest and command not in ("/system", "/save", "/save!"):
        raise RequestError(f"{command} takes nothing after it", "/help lists the commands")
    match command:
        case "/help":
            tell(HELP)
        case "/stats":
            tell("\n".join(session.stats_lines()))
        case "/undo":
            question = session.undo()
            tell("there is no turn to take back" if question is None else f"taken back: {one_line(question)[:80]}")
        case "/system":
            chat_template.check_text(rest, "the system message")
            session.system = rest
            tell("system message set" if rest else "no system message")
        case "/save" | "/save!":
            if not rest:
                raise RequestError(f"{command} needs a file", f"{command} FILE")
            session.save(Path(rest).expanduser(), overwrite=command == "/save!")
            tell(f"saved to {rest}")
        case _:
            raise RequestError(f"no command {command!r}", "/help lists the commands; // begins a message with a slash")


def reply(session: Session, text: str) -> None:
    """One turn: the reply is shown as it comes."""
    out, interrupted = session.ask(text, show)
    if not out.text.endswith("\n"):
        show("\n")
    if interrupted:
        kept = "the reply is kept as far as it came" if out.token_ids else "nothing had come, so the turn is not kept"
        tell(f"cancelled: {kept}")
    elif out.finish_reason == "length":
        full = len(out.token_ids) < session.params.max_tokens
        tell("cut at the end of the context: /undo makes room" if full else "cut by --max-tokens")


def tell(text: str) -> None:
    """Say something that is not part of a reply."""
    print(text, file=sys.stderr)
