"""The live engines themselves, asked directly: each gives ids and logprobs, so that a failure above is ours."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from tests.live.conftest import LiveEngine


def ask(engine: LiveEngine, **fields: Any) -> dict[str, Any]:
    body = {"model": engine.model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, **fields}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {engine.api_key or 'none'}"}
    request = urllib.request.Request(f"{engine.base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def test_vllm_gives_ids_and_logprobs_when_asked(vllm: LiveEngine) -> None:
    answer = ask(vllm, logprobs=True, return_token_ids=True)
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"]
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]


def test_sglang_gives_ids_and_logprobs_when_asked(sglang: LiveEngine) -> None:
    answer = ask(sglang, logprobs=True, return_token_ids=True)
    (choice,) = answer["choices"]
    assert len(choice["response_token_ids"]) == len(choice["logprobs"]["content"])
    assert len(choice["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
