"""The `rollout_func` for GRPOTrainer: rows in the order of the prompts, and weights sent when the step has moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.train.build import broken, conversation, uncaptured
from tests.train.online.records import service_record
from tests.train.online.scripted_service import KEY, Answer, ndjson, ok, scripted_service, verdict
from train.errors import BadInput
from train.online.client import RolloutService
from train.online.grpo import ServiceRollouts, rollout_reward

TASKS = [{"name": name, "digest": None, "prompt": f"Write the {name}."} for name in ("number", "word")]


class Weights:
    """A transfer that notes what it was asked for."""

    def __init__(self) -> None:
        self.updates: list[list[str]] = []

    def update(self, weights: Iterator[tuple[str, Any]]) -> int:
        self.updates.append([name for name, _ in weights])
        return len(self.updates)


def trainer(*, step: int = 0, training: bool = True, main: bool = True, **model: Any) -> Any:
    """What a `rollout_func` reads of a GRPOTrainer."""
    parameters = [("lm_head", SimpleNamespace(data=1.0))]
    module = SimpleNamespace(training=training, named_parameters=lambda: parameters, **model)
    return SimpleNamespace(
        args=SimpleNamespace(temperature=0.7, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0),
        state=SimpleNamespace(global_step=step),
        model=module,
        use_vllm=False,
        vllm_importance_sampling_correction=True,
        is_deepspeed_enabled=False,
        is_fsdp_enabled=False,
        accelerator=SimpleNamespace(
            process_index=0, is_main_process=main, unwrap_model=lambda model: model, wait_for_everyone=lambda: None
        ),
    )


def members(tmp_path: Path, size: int) -> list[dict[str, Any]]:
    """Records of rollouts that can be told apart by their ids; rewards 0, 1, 2, ..."""
    return [
        cast(
            dict[str, Any],
            service_record(tmp_path / str(n), conversation(2, first=100 * (n + 1)), reward=float(n), name=f"t__{n}"),
        )
        for n in range(size)
    ]


def answering(group: Callable[[Any], list[dict[str, Any]]], **given: Any) -> Callable[[str, str, Any], Answer]:
    def answer(method: str, path: str, body: Any) -> Answer:
        if path == "/tasks":
            return ok({"tasks": TASKS})
        records = group(body)
        # Records come in the order in which they finish, the verdict has them in order.
        return 200, {}, ndjson(*reversed(records), verdict(body["key"], records, **given))

    return answer


def test_rows_are_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    records = members(tmp_path, 3)
    with scripted_service(answering(lambda body: records[: body["size"]])) as service:
        rows = ServiceRollouts(RolloutService(service.url, KEY))(
            ["Write the word.", "Write the word.", "Write the number.", "Write the number.", "Write the number."],
            trainer(),
        )
        asked = sorted((body["task"], body["size"]) for _, path, body in service.requests if path == "/groups")
    assert asked == [("number", 3), ("word", 2)]
    assert rows["rollout_reward"] == [0.0, 1.0, 0.0, 1.0, 2.0]
    for row, record in enumerate([records[0], records[1], *records]):
        [sequence] = record["sequences"]
        assert rows["prompt_ids"][row] == sequence["prompt_ids"]
        assert rows["completion_ids"][row] == sequence["completion_ids"]
        assert rows["env_mask"][row] == sequence["completion_mask"]
        assert rows["logprobs"][row] == sequence["completion_logprobs"]
    assert rollout_reward(prompts=[], completions=[], rollout_reward=rows["rollout_reward"][:2], word="x") == [0.0, 1.0]


@pytest.mark.parametrize("training", [True, False])
def test_the_service_is_asked_for_what_the_trainer_demands(tmp_path: Path, training: bool) -> None:
    records = members(tmp_path, 1)
    with scripted_service(answering(lambda _: records)) as service:
        rollouts = ServiceRollouts(RolloutService(service.url, KEY), deadline=60.0)
        for _ in range(2):
            rollouts([[{"role": "user", "content": "Write the word."}]], trainer(training=training))
        first, second = (body for _, path, body in service.requests if path == "/groups")
    assert first.pop("key") != second.pop("key")
    assert first == second == {
        "size": 1, "task": "word", "deadline": 60.0, "purpose": "train" if training else "eval",
        "sampling": {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
        | ({"min_p": 0.0} if training else {}),
    }  # fmt: skip


def test_of_several_sequences_one_is_trained_and_the_others_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = cast(dict[str, Any], service_record(tmp_path, broken(3)))
    sequences = [part for part in record["segments"] if part["trainable"]]
    assert len(sequences) == 2
    with scripted_service(answering(lambda _: [record])) as service:
        rollouts = ServiceRollouts(RolloutService(service.url, KEY))
        for _ in range(2):
            rows = rollouts(["word"], trainer())
    assert sum(rows["env_mask"][0]) == max(sum(part["action_mask"]) for part in sequences)
    assert rollouts.left_out == 2
    assert caplog.text.count("takes one per prompt") == 1


def test_a_withheld_group_is_not_trained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = members(tmp_path, 2)
    answer = answering(lambda _: records, state="withheld", detail="t__1 has no reward")
    with scripted_service(answer) as service:
        rows = ServiceRollouts(RolloutService(service.url, KEY))(["word", "word"], trainer())
    assert rows["rollout_reward"] == [None, None]
    assert not any(map(any, rows["env_mask"])) and not any(map(any, rows["logprobs"]))
    assert [len(mask) for mask in rows["env_mask"]] == [len(ids) for ids in rows["completion_ids"]]
    assert "t__1 has no reward" in caplog.text


def test_a_rollout_without_captured_calls_has_a_masked_row(tmp_path: Path) -> None:
    records = [*members(tmp_path, 1), cast(dict[str, Any], service_record(tmp_path / "x", uncaptured(2), name="t__9"))]
    with scripted_service(answering(lambda _: records)) as service:
        rows = ServiceRollouts(RolloutService(service.url, KEY))(["word", "word"], trainer())
    assert rows["rollout_reward"] == [0.0, None] and rows["env_mask"][1] == [0]


def test_weights_are_sent_when_the_step_has_moved(tmp_path: Path) -> None:
    records, weights = members(tmp_path, 1), Weights()
    with scripted_service(answering(lambda _: records)) as service:
        rollouts = ServiceRollouts(RolloutService(service.url, KEY), transfer=weights)
        for step, updates in ((0, 1), (0, 1), (1, 2)):
            rollouts(["word"], trainer(step=step))
            assert weights.updates == [["lm_head"]] * updates


def test_only_the_main_process_sends_weights(tmp_path: Path) -> None:
    records, weights = members(tmp_path, 1), Weights()
    with scripted_service(answering(lambda _: records)) as service:
        ServiceRollouts(RolloutService(service.url, KEY), transfer=weights)(["word"], trainer(main=False))
    assert weights.updates == []


def test_a_peft_model_is_refused(tmp_path: Path) -> None:
    with scripted_service(answering(lambda _: [])) as service:
        rollouts = ServiceRollouts(RolloutService(service.url, KEY), transfer=Weights())
        with pytest.raises(BadInput, match="PEFT"):
            rollouts(["word"], trainer(peft_config={}))


def test_a_prompt_that_is_no_task_is_named(tmp_path: Path) -> None:
    with scripted_service(answering(lambda _: [])) as service:
        with pytest.raises(BadInput, match=r"'Write a poem'.*number, word"):
            ServiceRollouts(RolloutService(service.url, KEY))(["Write a poem"], trainer())


def test_a_loss_that_leaves_our_logprobs_out_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = members(tmp_path, 1)
    with scripted_service(answering(lambda _: records)) as service:
        rollouts = ServiceRollouts(RolloutService(service.url, KEY))
        for _ in range(2):
            rollouts(["word"], trainer())
        assert caplog.text.count("in its loss only with use_vllm=True") == 1
        caplog.clear()
        with_vllm = trainer()
        with_vllm.use_vllm = True
        rows = ServiceRollouts(RolloutService(service.url, KEY))(["word"], with_vllm)
    assert "use_vllm" not in caplog.text
    # The golden calls do not say at which temperature they were sampled: such a loss cannot use them.
    assert "no ratio can be built" in caplog.text and not any(rows["env_mask"][0])
