"""The messages of a call in a record of the rollout service, put together from the calls that it continues."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from train.rollouts.messages import Message
from train.stream.records import ChatRecord


def chats_of(record: Mapping[str, Any]) -> dict[int, ChatRecord | None]:
    """What each call sent and got, by its `index`; None for a call without messages."""
    return {call["index"]: call.get("chat") for call in record["calls"]}


def messages_of(record: Mapping[str, Any], index: int) -> list[Message]:
    """The messages that the call with this `index` sent, in OpenAI's shape; empty for a call without messages."""
    chats = chats_of(record)
    parts: list[list[Message]] = []
    line: int | None = index
    while line is not None and (chat := chats.get(line)) is not None:
        parts.append(chat["messages"])
        line = chat["continues"]
    return [message for part in reversed(parts) for message in part]


def tools_of(record: Mapping[str, Any], index: int) -> list[dict[str, Any]]:
    """The tools that the call offered the model."""
    chats = chats_of(record)
    chat = chats.get(index)
    while chat is not None and chat["continues"] is not None:
        chat = chats.get(chat["continues"])
    return [] if chat is None else list(chat.get("tools") or [])


def choices_of(record: Mapping[str, Any], index: int) -> list[dict[str, Any]]:
    """What came back, one `{"message", "finish_reason"}` per choice; empty where nothing was."""
    chat = chats_of(record).get(index)
    return [] if chat is None else list(chat["choices"])
