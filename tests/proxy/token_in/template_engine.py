"""A double of vLLM around a real chat template and a real tokenizer: it renders, tokenizes and takes prompt ids as vLLM
0.32 does, in that engine's shapes; what it "samples" a test has written beforehand.

The real engines stand in `tests/live/test_token_in.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

from tests.chat_templates import ChatTemplate, RenderingDouble, decode, encode
from tests.proxy.fake_engine import SSE_HEAD, Answer, Seen, chunk, whole

_CALL = re.compile(r"\n?<tool_call>\n(.*?)\n</tool_call>", re.S)


class TemplateEngine:
    """`samples` are what the model says, one a call, with the stop token where it stops. `prompts` are what it was
    asked, in ids. What it does badly is set by a test.
    """

    def __init__(self, template: str, samples: list[str | list[int]], call_id: str | None = "own") -> None:
        self.call_id = call_id
        self.template = ChatTemplate(template)
        self.routes = RenderingDouble(self.template)
        self.samples = list(samples)
        self.prompts: list[list[int]] = []
        self.given: list[bool] = []
        self.ignores_prompts = False
        self.refuses_prompts = False
        self.no_tokenizer = False
        self.renders_otherwise = False

    def answer(self) -> Answer:
        async def answer(seen: Seen) -> AsyncIterator[bytes]:
            if seen.path in ("/tokenize", "/detokenize"):
                yield self._side(seen)
                return
            for piece in self._chat(seen.body):
                yield piece

        return answer

    def _side(self, seen: Seen) -> bytes:
        if self.no_tokenizer:
            return whole(404, {"detail": "Not Found"})
        body = seen.body
        if self.renders_otherwise and "messages" in body:
            body["messages"] = [{"role": "system", "content": "Another."}, *body["messages"]]
        made = self.routes.answer(seen.path, body)
        return whole(200, made) if made is not None else whole(400, {"error": {"message": "template", "code": 400}})

    def _chat(self, body: dict[str, Any]) -> list[bytes]:
        prompt_ids = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if prompt_ids is not None and self.refuses_prompts:
            return [whole(400, {"error": {"message": "kv_transfer_params: not here", "code": 400}})]
        rendered = encode(
            self.template.render(
                body["messages"], body.get("tools"), to_be_answered=True, **(body.get("chat_template_kwargs") or {})
            )
        )
        self.given.append(prompt_ids is not None)
        prompt = prompt_ids if prompt_ids is not None and not self.ignores_prompts else rendered
        self.prompts.append(prompt)
        sample = self.samples.pop(0)
        ids = encode(sample) if isinstance(sample, str) else sample
        message, finish = self._parsed(ids)
        answer_base = {
            "id": "chatcmpl-1",
            "model": body["model"],
            "created": 1,
            "system_fingerprint": None,
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        entries = [
            {"token": decode([token_id]), "logprob": -0.25, "bytes": None, "top_logprobs": []} for token_id in ids
        ]
        if not body.get("stream"):
            choice = {
                "index": 0,
                "message": message,
                "logprobs": {"content": entries},
                "finish_reason": finish,
                "stop_reason": None,
                "token_ids": ids,
            }
            return [
                whole(
                    200,
                    {
                        **answer_base,
                        "object": "chat.completion",
                        "choices": [choice],
                        "usage": usage,
                        "prompt_token_ids": prompt,
                    },
                )
            ]
        delta = {name: value for name, value in message.items() if name != "role" and value}
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": n, **piece} for n, piece in enumerate(delta["tool_calls"])]
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        last = {
            "index": 0,
            "delta": delta,
            "logprobs": {"content": entries},
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": ids,
        }
        answer_base["object"] = "chat.completion.chunk"
        parts = [
            {**answer_base, "choices": [first], "prompt_token_ids": prompt},
            {**answer_base, "choices": [last]},
            {**answer_base, "choices": [], "usage": usage},
        ]
        events = b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts) + b"data: [DONE]\n\n"
        return [SSE_HEAD, chunk(events), b"0\r\n\r\n"]

    def _parsed(self, ids: list[int]) -> tuple[dict[str, Any], str]:
        """As vLLM's hermes parser and a reasoning parser leave a message."""
        text = decode(ids)
        stop = self.template.kind.stop
        stopped = text.endswith(stop)
        text = text.removesuffix(stop)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "reasoning": None}
        if "</think>" in text:
            reasoning, _, text = text.partition("</think>")
            message["reasoning"], message["content"] = reasoning.removeprefix("<think>"), text
        calls = [json.loads(arguments) for arguments in _CALL.findall(text)]
        if calls and stopped:
            message["content"] = text[: text.index("<tool_call>")].rstrip("\n") or None
            message["tool_calls"] = [
                {
                    "id": f"chatcmpl-tool-{len(self.prompts)}-{number}" if self.call_id == "own" else self.call_id,
                    "type": "function",
                    "function": {"name": tool_call["name"], "arguments": json.dumps(tool_call["arguments"])},
                }
                for number, tool_call in enumerate(calls)
            ]
        return message, "length" if not stopped else "tool_calls" if calls else "stop"
