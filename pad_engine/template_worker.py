"""Renders chat templates, in a process of its own that chat_template.py starts: a template comes with a model's folder,
and may be hostile.

Nothing is imported but jinja2 and the standard library. One JSON object a line comes in, one goes out. Beside jinja2's
sandbox, the process denies itself memory, files, further processes and, by a timer, time.
"""

import sys

if __name__ == "__main__":
    # started without any site-packages; the arguments are the folders of jinja2 and markupsafe
    sys.path += sys.argv[1:]

import json
import resource
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# older ones have known ways out of the sandbox
OLDEST_JINJA = (3, 1, 6)

# parts of jinja2 and Python that are imported at their first use, when no file can be opened any more
WARM_UP = r"""{% generation %}{{ 'a\n\N{EM DASH}' | wordwrap(1) | pprint }}{{ [1] | tojson(indent=1) | striptags }}
{{ lipsum(1) }}
{{ strftime_now('%d %b %Y') }}{% set x = dict(a=1) %}{{ x | dictsort }}{{ 'a' | urlize }}{% endgeneration %}
{{ ''.encode('utf-8').decode('latin-1').encode('ascii') }}{{ raise_exception('') }}"""


class Refused(jinja2.TemplateError):
    """The template itself has called raise_exception."""


class OutputTooLongError(Exception):
    """The text has more characters than are allowed."""


class GenerationBlock(Extension):
    """`{% generation %}` marks what the model writes, for training; here the block is its content."""

    tags = {"generation"}  # noqa: RUF012 as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("content"), [], [], body).set_lineno(line)

    def content(self, caller: Any) -> Any:
        """What the block holds."""
        return caller()


class TemplateDict:
    """`dict` without the class's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        """As the method of dict."""
        return dict.fromkeys(keys, value)


class TemplateNamespace(Namespace):
    """`namespace` without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # like jinja2's own, so that a variable may be called `self`
        self, rest = args[0], args[1:]
        values = dict(*rest, **kwargs)
        for name in values:
            check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        check_name(name)
        Namespace.__setitem__(self, name, value)


def check_name(name: Any) -> None:
    """SecurityError for a name that may lead to Python's internals."""
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace holds no {name!r}")


def raise_exception(message: Any) -> None:
    """How a template says that it cannot write out these messages."""
    raise Refused(str(message))


def strftime_now(form: str) -> str:
    """The local time."""
    return datetime.now().strftime(form)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it is: jinja2's own filter writes < and > as escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=8)
def compiled(source: str) -> jinja2.Template:
    """A template, with the settings and the names that transformers gives it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    names = {"raise_exception": raise_exception, "strftime_now": strftime_now, "dict": TemplateDict()}
    environment.globals.update(names, namespace=TemplateNamespace)
    return environment.from_string(source)


def render(source: str, variables: dict[str, Any], max_characters: int) -> str:
    """The text, or OutputTooLongError as soon as it is clear."""
    parts: list[str] = []
    size = 0
    for part in compiled(source).generate(variables):
        size += len(part)
        if size > max_characters:
            raise OutputTooLongError
        parts.append(part)
    return "".join(parts)


def reply(request: dict[str, Any]) -> dict[str, Any]:
    """What goes back: the text, or what went wrong, as a kind and a few words."""
    try:
        return {"text": render(request["template"], request["variables"], request["max_characters"])}
    except Refused as error:
        return {"error": "refused", "words": str(error)[:1000]}
    except OutputTooLongError:
        return {"error": "output"}
    except MemoryError:
        return {"error": "memory"}
    except SecurityError as error:
        return {"error": "security", "words": str(error)[:1000]}
    except jinja2.TemplateSyntaxError as error:
        return {"error": "syntax", "words": f"{str(error.message)[:1000]} (line {error.lineno})"}
    except Exception as error:
        return {"error": "failed", "words": f"{type(error).__name__}: {str(error)[:1000]}"}


def lower(kind: int, value: int) -> None:
    """Set a limit for good, unless it is lower already."""
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def give_up_rights(memory: int) -> None:
    """No more than so many bytes of memory, no core dump, nothing written to files, no files opened, no processes."""
    time.tzset()  # reads the time zone's file
    for template in (WARM_UP, "{{ nothing.at_all }}", "{{ ''.__class__ }}", "{% if"):
        with suppress(jinja2.TemplateError):
            render(template, {}, 100_000)
    compiled.cache_clear()
    lower(resource.RLIMIT_AS, memory)
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        lower(kind, 0)
    # the three that are open stay open
    lower(resource.RLIMIT_NOFILE, 3)


def main() -> None:
    """Answer until standard input closes. The first line says what the process needs to know, and is answered."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer

    def send(number: int, answer: dict[str, Any]) -> None:
        sink.write(json.dumps(answer | {"id": number}).encode() + b"\n")
        sink.flush()

    version = tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit())
    give_up_rights(json.loads(source.readline())["memory"])
    send(0, {"error": "jinja2", "words": jinja2.__version__} if version < OLDEST_JINJA else {"text": ""})
    for line in source:
        request = json.loads(line)
        # if the other side is gone, nobody else ends a template that runs on: the signal's default is death
        signal.setitimer(signal.ITIMER_REAL, 2 * request["seconds"])
        answer = reply(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(request["id"], answer)


if __name__ == "__main__":
    main()
