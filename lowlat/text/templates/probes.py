"""This module finds properties of a chat template by rendering a probe, since its source alone does not show them."""

import re
from collections.abc import Mapping
from typing import Any

from lowlat.errors import ConfigError, RequestError
from lowlat.text.templates.chat import ChatTemplates

__all__ = ["TemplateProbes"]

MARK = "lowlat_probe"
TOOL = {
    "type": "function",
    "function": {
        "name": MARK,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "A text."}},
            "required": ["x"],
        },
    },
}
USER = {"role": "user", "content": "x"}
NAMES_TOOLS = re.compile(r"\btools\b")


class TemplateProbes:
    """Probes the templates of one model, and caches the answers.

    constants  variables of every rendering, such as special tokens
    """

    def __init__(self, templates: ChatTemplates, constants: Mapping[str, Any]) -> None:
        self._templates = templates
        self._constants = dict(constants)
        self._found: dict[tuple[str, str], bool] = {}

    def takes_tools(self, name: str) -> bool:
        """Whether a template renders given tools, or at least renders differently with them."""
        if ("tools", name) not in self._found:
            plain = {"messages": [USER], "tools": None}
            written, without = self._render(name, {**plain, "tools": [TOOL]}), self._render(name, plain)
            if written is None:  # it refuses the probe; its source shows at least whether it mentions tools
                found = bool(NAMES_TOOLS.search(self._templates.source(name)))
            else:
                found = MARK in written or written != without
            self._found["tools", name] = found
        return self._found["tools", name]

    def takes_system(self, name: str) -> bool:
        """Whether a template renders a system message."""
        if ("system", name) not in self._found:
            probe = {"messages": [{"role": "system", "content": MARK}, USER], "tools": None}
            self._found["system", name] = MARK in (self._render(name, probe) or "")
        return self._found["system", name]

    def _render(self, name: str, variables: Mapping[str, Any]) -> str | None:
        """Render a probe; returns None if the template refuses it."""
        values = {"documents": None, **self._constants, **variables, "add_generation_prompt": True}
        try:
            return self._templates.render(name, values)
        except (ConfigError, RequestError):
            return None
