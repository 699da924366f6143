"""How the templates are filled in: every value of a user passes through a filter of the language that it is put into."""

import json
import shlex
from typing import Any

from chaosrun.errors import UsageError

EXPRESSION = "${{"


def render(template: str, **values: Any) -> str:
    """`templates/<template>` with these values. A name that the template has and `values` lack is a bug."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("chaosrun.integrations.export"),
        undefined=StrictUndefined,
        # Jinja's own marks mean something to shells and to GitHub.
        variable_start_string="<<",
        variable_end_string=">>",
        block_start_string="<%",
        block_end_string="%>",
        comment_start_string="<#",
        comment_end_string="#>",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # Each filter quotes for its language; what HTML wants quoted is of no use in any of them.
        autoescape=False,
    )
    environment.filters |= {"sh": shlex.quote, "words": shlex.join, "yaml": _yaml, "action": _action}
    return environment.get_template(template).render(**values)


def checked(text: str, what: str) -> str:
    """`text`, which becomes part of a line. Raises UsageError for one with a line break or another control character."""
    if not text.isprintable():
        raise UsageError(f"{what} {text!r} holds characters that no script can quote", hint="rename it, or give another")
    return text


def _yaml(value: Any) -> str:
    """JSON, which YAML is a superset of."""
    return json.dumps(value, ensure_ascii=False)


def _action(text: str) -> str:
    """Text that GitHub reads for its own expressions before anything else does, anywhere in a workflow."""
    return text.replace(EXPRESSION, f"{EXPRESSION} '{EXPRESSION}' }}}}")
