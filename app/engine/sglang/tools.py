"""The built-in model's tool-call format, as one more of SGLang's."""

from __future__ import annotations

from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.qwen25_detector import Qwen25Detector

from app.engine.sglang.args import BUILTIN_TOOL_PARSER


class BuiltinDetector(Qwen25Detector):
    """Qwen 2.5's format, but a forced call is plain JSON by schema.

    SGLang cannot keep white space out of a structural tag, and this model, which never learned to
    call tools, would fill a forced call with it.
    """

    def supports_structural_tag(self) -> bool:
        return False


def register() -> None:
    """Make the format known to SGLang in this process."""
    FunctionCallParser.ToolCallParserEnum[BUILTIN_TOOL_PARSER] = BuiltinDetector
