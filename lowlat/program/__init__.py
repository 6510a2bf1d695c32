"""The Program: operations in order on named buffers. It knows no operation's meaning and no executor."""
