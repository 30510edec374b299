"""Generated conversations between an agent and a model, through token-in, and the oracle that judges each bridge.

The oracle renders the truth: what the model said, as the template writes it, then what came after. A bridge is right
when its prompt is the held ids, the sampled ids, and then that text; a conversation that was changed must have none.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from capture.engines import engine
from capture.record import Completion, Ids, TokenCapture
from capture.token_in.bridge import reads_alike
from proxy.token_in.planner import PromptPlan, TokenIn
from tests.chat_templates import ChatTemplate, RenderingDouble, decode, encode

WORDS = (
    "the file holds three lines and a number , done . First look at src/main.py then run it again . "
    'naïve café 数字 emoji 🎉 `code` "quoted" it\'s {braces} [1, 2] 3.14 x = y + 1 \n\n - a list \n - of items '
).split(" ")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
        },
    }
    for name in ("run", "write_file")
]
#: What an agent does to a conversation that makes it another one.
EDITS = (
    "reply_words", "argument", "earlier_user", "dropped_turn", "system", "tools", "compaction", "call_id", "option",
)  # fmt: skip
#: What may have happened to a reply that must not be bridged, or only with care.
ENDINGS = ("stop", "stop", "stop", "stop", "stop", "cut", "stop_string", "unread", "twin")


@dataclass
class Tally:
    """What came of the generated calls: reasons and bridges by template; what the oracle found wrong."""

    bridged: Counter[str] = field(default_factory=Counter)
    extended_plainly: Counter[str] = field(default_factory=Counter)
    refused: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    exact: int = 0
    conversations: int = 0
    continuing: Counter[str] = field(default_factory=Counter)
    honest: Counter[str] = field(default_factory=Counter)
    honest_refused: dict[str, Counter[str]] = field(default_factory=dict)

    def table(self) -> str:
        """One row a template: calls that continue another, of those that nobody changed how many were bridged, and
        why the others were not; how many would have extended when sent plainly.
        """
        rows = [
            "| template | unchanged | bridged | of all, extend plainly | not bridged, and why |",
            "|---|---|---|---|---|",
        ]
        for name in self.continuing:
            why = ", ".join(f"{code} {n}" for code, n in self.honest_refused.get(name, Counter()).most_common())
            plainly = f"{self.extended_plainly[name]} of {self.continuing[name]}"
            rows.append(f"| {name} | {self.honest[name]} | {self.bridged[name]} | {plainly} | {why or '-'} |")
        changed = sum(self.continuing.values()) - sum(self.honest.values())
        rows.append(
            f"\n{self.conversations} conversations, {sum(self.continuing.values())} calls that go on, {changed} of "
            f"them changed or not to be bridged; {sum(self.bridged.values())} bridged, {self.exact} of them held to "
            f"the template's own text, {len(self.wrong)} wrong"
        )
        return "\n".join(rows)


class Assembled:
    """A double of `Reader`, of which token-in asks the completed body alone."""

    def __init__(self, choice: dict[str, Any]) -> None:
        self._choice = choice

    def assembled(self) -> dict[str, Any]:
        return {"choices": [self._choice]}


class Talk:
    """One generated conversation."""

    def __init__(self, template: ChatTemplate, seed: int, tally: Tally) -> None:
        self.template = template
        self.rng = random.Random(seed)
        self.tally = tally
        self.replica = RenderingDouble(template)
        self.token_in = TokenIn("generated", "auto")
        self.engine = engine("vllm")
        self.tools = TOOLS if template.kind.tools and self.rng.random() < 0.8 else None
        self.options: dict[str, Any] = {}
        self.drops_reasoning = self.rng.random() < 0.6
        self.separators = self.rng.choice([(",", ":"), (", ", ": "), (" , ", " : ")])
        self.calls = 0
        self.ids = 0

    # what is said

    def words(self, most: int = 14) -> str:
        return " ".join(self.rng.choice(WORDS) for _ in range(self.rng.randint(1, most))).strip() or "ok"

    def value(self, depth: int = 0) -> Any:
        kind = self.rng.randrange(8 if depth < 2 else 5)
        if kind < 2:
            return self.words(6)
        if kind == 2:
            return self.rng.choice([1, -3, 10**6, 0.5, 2.25])
        if kind == 3:
            return self.rng.choice([True, False, None])
        if kind == 4:
            return self.rng.choice(["", " spaced ", 'quo"te', "a\\b", "line\nbreak", "ünï", '{"in": "side"}'])
        if kind < 7:
            return {self.rng.choice("abcxyz") * (n + 1): self.value(depth + 1) for n in range(self.rng.randint(0, 3))}
        return [self.value(depth + 1) for _ in range(self.rng.randint(0, 3))]

    def reply(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.words()}
        if self.rng.random() < 0.3:
            message["reasoning_content"] = self.words()
        if self.tools and self.rng.random() < 0.6:
            if self.rng.random() < 0.7:
                message["content"] = None
            message["tool_calls"] = []
            for _ in range(self.rng.choice([1, 1, 1, 2])):
                self.ids += 1
                arguments = {"cmd": self.words(6), **({"more": self.value()} if self.rng.random() < 0.6 else {})}
                message["tool_calls"].append(
                    {
                        "id": f"call{self.ids:05d}",
                        "type": "function",
                        "function": {
                            "name": self.rng.choice(["run", "write_file"]),
                            "arguments": json.dumps(arguments),
                        },
                    }
                )
        return message

    def after(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        if not message.get("tool_calls"):
            return [{"role": "user", "content": self.words()}]
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": self.words(20)} for call in message["tool_calls"]
        ]

    # how the model samples it

    def sampled(self, before: list[dict[str, Any]], message: dict[str, Any]) -> str | None:
        """The reply as this model samples it: as the template writes it, but for spaces, up to and with the stop token;
        None where the template does not write replies as its generation prompt begins them.
        """
        prompt = self.text(before, True)
        shown = self.text([*before, message], False)
        if prompt is None or shown is None:
            return None
        stop, opening = self.template.stop(message), "<think>\n"
        if shown.startswith(prompt):
            rest = shown[len(prompt) :]
        elif prompt.endswith(opening) and shown.startswith(prompt.removesuffix(opening)):
            # The generation prompt opens the reasoning, which the template leaves out of the history.
            rest = f"{message.get('reasoning_content') or 'hm'}\n</think>\n\n{shown[len(prompt) - len(opening) :]}"
        else:
            return None
        if self.template.name == "glm4moe":
            rest += stop
        if self.template.name == "gptoss" and not message.get("tool_calls"):
            rest = rest.removesuffix("<|end|>") + stop  # the model ends by <|return|>, the template writes <|end|>
        at = rest.rfind(stop)
        if at < 0:
            return None
        rest = rest[: at + len(stop)]
        return self.written_otherwise(rest[:at]) + self.rng.choice(["", "", " ", "\n"]) + stop

    def written_otherwise(self, text: str) -> str:
        """The same JSON with other spaces."""
        made, at, decoder = "", 0, json.JSONDecoder()
        while (brace := text.find("{", at)) >= 0:
            made += text[at:brace]
            try:
                value, at = decoder.raw_decode(text, brace)
                made += json.dumps(value, separators=self.separators, ensure_ascii=self.rng.random() < 0.5)
            except ValueError:
                made, at = made + "{", brace + 1
        return made + text[at:]

    def tokens(self, text: str) -> list[int]:
        """The text in tokens that a tokenizer need not choose: what a model samples is not always canonical."""
        stop = next(
            (end for end in (self.template.kind.tool_stop, self.template.kind.stop) if end and text.endswith(end)), ""
        )
        body = text[: len(text) - len(stop)]
        if self.rng.random() < 0.5:
            ids = encode(body)
        else:
            cuts = sorted(self.rng.randrange(len(body) + 1) for _ in range(3)) if body else []
            ids = [token for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True) for token in encode(body[a:b])]
            if decode(ids) != body:
                ids = encode(body)
        return ids + (encode(stop) if stop else [])

    def text(self, messages: list[dict[str, Any]], to_be_answered: bool) -> str | None:
        try:
            return self.template.render(messages, self.tools, to_be_answered=to_be_answered, **self.kwargs)
        except Exception:
            return None

    @property
    def kwargs(self) -> dict[str, Any]:
        return self.options.get("chat_template_kwargs", {})

    # what the agent sends back

    def sent_back(self, message: dict[str, Any]) -> dict[str, Any]:
        made = json.loads(json.dumps(message))
        if self.drops_reasoning:
            made.pop("reasoning_content", None)
        if isinstance(made["content"], str):
            made["content"] = made["content"].strip()
        elif self.rng.random() < 0.5:
            made["content"] = ""
        for call in made.get("tool_calls", ()):
            value = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(
                value, separators=self.rng.choice([(",", ":"), (", ", ": ")]), ensure_ascii=self.rng.random() < 0.5
            )
        return made

    def edit(self, how: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """The conversation changed in a way that makes it another; None where this one has no place for it."""
        made: list[dict[str, Any]] = json.loads(json.dumps(messages))
        last = max(at for at, message in enumerate(made) if message["role"] == "assistant")
        if how == "reply_words":
            made[last]["content"] = (made[last]["content"] or "") + " indeed"
        elif how == "argument" and made[last].get("tool_calls"):
            function = made[last]["tool_calls"][0]["function"]
            function["arguments"] = json.dumps({**json.loads(function["arguments"]), "cmd": "rm -r /"})
        elif how == "call_id" and made[last].get("tool_calls"):
            made[last]["tool_calls"][0]["id"] = "call99999"
        elif how == "earlier_user":
            at = next(at for at, message in enumerate(made) if message["role"] == "user")
            made[at]["content"] += " please"
        elif how == "dropped_turn" and last >= 4:
            del made[last - 2 : last]
        elif how == "system" and made[0]["role"] == "system":
            made[0]["content"] += " Today is Friday."
        elif how == "tools" and self.tools is TOOLS:
            self.tools = [*self.tools[:1], {**self.tools[1], "function": {**self.tools[1]["function"], "name": "w"}}]
        elif how == "option" and not self.options:
            self.options = {"chat_template_kwargs": {"enable_thinking": False}}
        elif how == "compaction":
            made = [*made[: made[0]["role"] == "system"], {"role": "user", "content": "Summary: " + self.words()}]
        else:
            return None
        return made

    # the story

    async def run(self) -> None:
        self.tally.conversations += 1
        name = self.template.name
        messages: list[dict[str, Any]] = []
        if self.template.kind.system and self.rng.random() < 0.7:
            messages.append({"role": "system", "content": self.words()})
        messages.append({"role": "user", "content": self.words()})
        before: tuple[int, list[int], list[int], str, str] | None = (
            None  # call, prompt, sampled, expected rest, prompt text
        )
        honest = True
        for _ in range(self.rng.randint(2, 5)):
            body = {"model": "m", "messages": messages, "tools": self.tools, **self.options}
            plan = await self.token_in.plan(self.replica, self.engine, "openai-chat", body)  # type: ignore[arg-type]
            rendered = self.text(messages, True)
            if rendered is None:
                return
            plain = encode(rendered)
            if before is not None:
                self.judge(plan, before, plain, honest)
            prompt = plan.prompt.tolist() if plan.prompt is not None else plain
            message = self.reply()
            both = self.sampled(messages, message)
            if both is None:
                return
            ending = self.rng.choice(ENDINGS)
            before, honest = self.answered(plan, body, prompt, message, both, ending), ending in ("stop", "cut")
            if before is None:
                return
            answer = self.last
            back = self.sent_back(answer)
            tail = self.after(answer)
            # The truth: the reply as it was, then what the template writes behind it.
            shown = self.text([*messages, answer], False)
            whole = self.text([*messages, answer, *tail], True)
            if shown is None or whole is None:
                return
            sound = whole.startswith(shown)
            rest = ""
            if sound and ending != "cut":
                stop = self.template.stop(answer)
                at = shown.rfind(stop)
                if at >= len((self.text(messages, True) or "").removesuffix("<think>\n")):
                    rest = shown[at + len(stop) :] + whole[len(shown) :]
                elif whole[len(shown) :].startswith(stop):
                    rest = whole[len(shown) + len(stop) :]
                else:
                    sound = False
            messages = [*messages, back, *tail]
            if self.rng.random() < 0.15:
                how = self.rng.choice(EDITS)
                changed = self.edit(how, messages)
                if changed is not None:
                    messages, honest = changed, False
            before = (*before, rest if sound and ending != "cut" else "\0", name)

    def answered(
        self,
        plan: PromptPlan,
        body: dict[str, Any],
        prompt: list[int],
        message: dict[str, Any],
        drawn: str,
        ending: str,
    ) -> Any:
        """The call is over: what the engine reported goes to token-in. Call number, prompt ids and sampled ids."""
        reply = json.loads(json.dumps(message))
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "stop_reason": None, "message": reply}
        if message.get("tool_calls"):
            choice["finish_reason"] = "tool_calls"
        ids = self.tokens(drawn)
        if ending == "cut":
            if message.get("tool_calls") or message.get("reasoning_content") or len(message["content"]) < 4:
                return None
            begin = drawn.find(message["content"].strip()[:3])
            if begin < 0:
                return None
            short = message["content"].strip()[: self.rng.randint(3, len(message["content"].strip()))].rstrip()
            reply["content"] = short
            ids = self.tokens(drawn[:begin] + short)
            choice["finish_reason"] = "length"
        elif ending == "stop_string":
            ids, choice["stop_reason"] = [*ids[:-1], *encode(" END")], "END"
        elif ending == "unread":  # a parser that swallows what stands behind a reply
            ids = [*ids[:-1], *encode(" and more words that no one reads"), ids[-1]]
        self.last = reply
        self.calls += 1
        self.record(plan, body, prompt, ids, choice)
        if ending == "twin":
            self.calls += 1
            self.record(PromptPlan(conversation=plan.conversation), body, prompt, [*encode("\n"), *ids], choice)
        return self.calls, prompt, ids

    def record(
        self, plan: PromptPlan, body: dict[str, Any], prompt: list[int], ids: list[int], choice: dict[str, Any]
    ) -> None:
        capture = TokenCapture.of(
            wire="openai-chat",
            provider="vllm",
            requested={},
            prompt_token_ids=Ids.of(prompt),
            completions=[Completion(0, Ids.of(ids), logprobs=[-0.5] * len(ids))],
            unavailable={},
        )
        reader: Any = Assembled(choice)
        row = self.token_in.record_call(plan, self.calls, self.engine, body, "ok", capture, reader)
        assert row["bridged"] is (plan.prompt is not None)

    def judge(self, plan: PromptPlan, before: Any, plain: list[int], honest: bool) -> None:
        tally, name = self.tally, self.template.name
        call, prompt, sampled, rest, _ = before
        past = prompt + sampled
        tally.continuing[name] += 1
        tally.honest[name] += honest
        tally.extended_plainly[name] += plain[: len(past)] == past
        if plan.prompt is None:
            tally.refused.setdefault(name, Counter())[plan.reason or "?"] += 1
            if honest:
                tally.honest_refused.setdefault(name, Counter())[plan.reason or "?"] += 1
            return
        tally.bridged[name] += 1
        ids = plan.prompt.tolist()
        where = f"{name}: call {call}"
        if not honest:
            tally.wrong.append(f"{where}: bridged although it is another conversation")
        elif ids[: len(past)] != past:
            tally.wrong.append(f"{where}: does not extend the call")
        elif rest != "\0" and decode(ids[len(past) :]) != rest:
            tally.wrong.append(f"{where}: goes on with {decode(ids[len(past) :])!r}, not {rest!r}")
        elif rest == "\0" and not reads_alike(decode(ids), decode(plain)):
            tally.wrong.append(f"{where}: reads {decode(ids)!r}, not {decode(plain)!r}")
        tally.exact += rest != "\0"


async def talk(templates: list[str], conversations: int, seed: int = 0) -> Tally:
    tally = Tally()
    for number in range(conversations):
        await Talk(_template(templates[number % len(templates)]), seed + number, tally).run()
    return tally


_made: dict[str, ChatTemplate] = {}


def _template(name: str) -> ChatTemplate:
    return _made.setdefault(name, ChatTemplate(name))


if __name__ == "__main__":
    import asyncio
    import sys

    from tests.chat_templates import TEMPLATES

    made = asyncio.run(talk([*TEMPLATES, "engines"], int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
    print(made.table(), *made.wrong, sep="\n")
