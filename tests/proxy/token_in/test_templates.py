"""Token-in on real chat templates: no generated conversation is bridged wrongly, and what bridges is what docs say.

The long form, 10,000 conversations, runs under `make live`; `python -m tests.conversations 3000` prints the table.
"""

from __future__ import annotations

import pytest

from tests.chat_templates import TEMPLATES
from tests.conversations import Tally, talk

#: Templates under which every conversation that nobody changed goes on by ids.
ALWAYS = (
    "qwen2_5", "qwen3_training", "qwen3_instruct_2507", "llama3", "llama3_1", "gemma3", "deepseekv3", "glm4moe",
    "cohere2", "lfm2_v2", "nemotron_3_nano", "engines",
)  # fmt: skip
NAMES = [*TEMPLATES, "engines"]


@pytest.mark.slow
async def test_no_bridge_is_wrong() -> None:
    judged(await talk(NAMES, 500))


@pytest.mark.live
@pytest.mark.timeout(3600)
async def test_no_bridge_is_wrong_in_ten_thousand_conversations() -> None:
    result = await talk(NAMES, 10_000, seed=1_000_000)
    judged(result)
    print("\n" + result.table())


def judged(tally: Tally) -> None:
    assert tally.wrong == []
    assert sum(tally.bridged.values()) > tally.conversations / 2
    assert tally.exact > sum(tally.bridged.values()) / 2, "the oracle's strict half was hardly used"
    for name in ALWAYS:
        assert tally.honest[name] > 3
        assert tally.bridged[name] >= 0.9 * tally.honest[name], (name, tally.honest_refused.get(name))
    # A template that leaves out earlier reasoning, or writes something else at the end, is left alone.
    assert set(tally.honest_refused["phi3"]) == {"template_rewrites_history"}
    assert "template_rewrites_history" in tally.honest_refused["qwen3"]
    reasons = {reason for counted in tally.refused.values() for reason in counted}
    assert reasons >= {
        "begins", "history_edited", "system_changed", "options_changed", "ambiguous_parent", "stop_string",
        "reads_otherwise", "template_rewrites_history",
    }  # fmt: skip
