"""Models mark the parts of their answers by these texts; some tokenizers have a token for each."""

__all__ = [
    "ARGUMENTS_MARK",
    "CALL",
    "CALLS",
    "CALL_HEAD",
    "CHANNEL_CALL",
    "END_CALL",
    "END_CHANNEL_CALL",
    "END_FUNCTION",
    "END_LISTED",
    "END_PARAMETER",
    "END_THOUGHT",
    "FUNCTION",
    "ID_MARK",
    "LISTED",
    "PARAMETER",
    "PYTHON_TAG",
    "SEED_CALL",
    "SEED_END_CALL",
    "STRING_MARK",
    "THOUGHT",
]

THOUGHT, END_THOUGHT = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
SEED_CALL, SEED_END_CALL = "<seed:tool_call>", "</seed:tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
LISTED, END_LISTED = "<|tool_call|>", "<|/tool_call|>"
CALLS, ID_MARK, ARGUMENTS_MARK = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
CHANNEL_CALL, END_CHANNEL_CALL = "<|tool_call>", "<tool_call|>"
CALL_HEAD, STRING_MARK = "call:", '<|"|>'
PYTHON_TAG = "<|python_tag|>"
