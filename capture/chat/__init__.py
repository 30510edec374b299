"""Chat messages and answers as data: put together from a stream, compared, tool calls and surrogate pairs joined."""
