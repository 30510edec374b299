"""What can be forced: values that no engine takes are refused before a call is made with them."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.errors import SettingsError
from proxy.sampling import check_forced


@pytest.mark.parametrize(
    "forced",
    [{"temperature": 0}, {"temperature": 0.7, "top_p": 1, "top_k": -1}, {"seed": -3}, {"max_tokens": 10**400},
     {"temperature": None, "n": None}, {"stop": ["a"]}, {"an_engine_s_own": [1]}],
)  # fmt: skip
def test_values_that_an_engine_takes(forced: dict[str, Any]) -> None:
    check_forced(forced)


@pytest.mark.parametrize(
    ("forced", "sentence"),
    [
        ({"temperature": "1"}, "temperature: give a number of at least 0, not '1'"),
        ({"temperature": True}, "temperature: give a number of at least 0, not True"),
        ({"temperature": -1}, "temperature: give a number of at least 0, not -1"),
        ({"temperature": float("inf")}, "temperature: give a number of at least 0, not inf"),
        ({"top_p": float("nan")}, "top_p: give a number from 0 to 1, not nan"),
        ({"top_p": 1.1}, "top_p: give a number from 0 to 1, not 1.1"),
        ({"top_k": 1.5}, "top_k: give a whole number of at least -1, not 1.5"),
        ({"n": 0}, "n: give a whole number of at least 1, not 0"),
        ({"seed": "x"}, "seed: give a whole number, not 'x'"),
        ({"max_tokens": []}, "max_tokens: give a whole number of at least -1, not []"),
        ({"post_sampling_probs": True}, "post_sampling_probs: it does not shape how tokens are sampled"),
        ({"prompt_logprobs": 1}, "prompt_logprobs: it does not shape how tokens are sampled"),
    ],
)
def test_values_that_no_engine_takes_are_refused(forced: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError) as refused:
        check_forced(forced)
    assert str(refused.value).startswith(f"--force-sampling {sentence}")
