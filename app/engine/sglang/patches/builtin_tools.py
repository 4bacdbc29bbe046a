"""The built-in model's tool-call format, as one more of SGLang 0.5.20's."""

from __future__ import annotations

from collections.abc import Mapping

from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.qwen25_detector import Qwen25Detector

from app.engine.sglang.args import BUILTIN_TOOL_PARSER

REPLACED: Mapping[str, str] = {
    "function_call.qwen25_detector:Qwen25Detector.supports_structural_tag": "de1673d05e46dd04",
}


class BuiltinDetector(Qwen25Detector):
    """Qwen 2.5's format, but a forced call is plain JSON by schema.

    SGLang cannot keep white space out of a structural tag, and this model, which never learned to
    call tools, would fill a forced call with it.
    """

    def supports_structural_tag(self) -> bool:
        return False


def load_sglang() -> None:
    """Load SGLang's plug-ins, and make the format known to it in this process."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    FunctionCallParser.ToolCallParserEnum[BUILTIN_TOOL_PARSER] = BuiltinDetector
