"""The policy that a session calls: the version of its weights, and the name under which the engine serves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from capture.sequences.versions import version_in_name
from proxy.errors import SettingsError
from proxy.settings import SessionOptions, check_version


class Policy(NamedTuple):
    """`model` is the name that is sent to the engine from now on; None leaves it as it is."""

    version: str
    model: str | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Policy:
        """From the body of a request, `{"version": ..., "model": ...}`. Raises `SettingsError`."""
        version, model = fields.get("version"), fields.get("model")
        if model is not None and (not isinstance(model, str) or not model):
            raise SettingsError("`model` must be the name under which the engine serves the policy")
        if version is None and model is not None:
            version = version_in_name(model)
            if version is None:
                raise SettingsError(f'{model} does not end with "-v" and a number: give the policy\'s version too')
        if not isinstance(version, str | int) or isinstance(version, bool):
            raise SettingsError('give the policy\'s version as a string: {"version": "step-120"}')
        check_version(str(version))
        return cls(str(version), model)

    def options(self, options: SessionOptions) -> SessionOptions:
        """The options of a session, with this policy."""
        return replace(options, **self.fields())

    def fields(self) -> dict[str, Any]:
        """As fields of `POST /sessions`."""
        return {"policy_version": self.version} | ({} if self.model is None else {"model": self.model})
