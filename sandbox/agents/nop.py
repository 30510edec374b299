"""`nop`: does nothing. A task that passes with it is broken."""

from __future__ import annotations

from sandbox.agents.base import Scene
from sandbox.containers.base import Box


class Nop:
    name = "nop"
    aliases: tuple[str, ...] = ()
    about = "does nothing: a task that passes with it is broken"
    needs_model = False
    version = None

    def install(self, box: Box) -> None:
        pass

    def act(self, scene: Scene) -> str:
        scene.begin()
        return "end_turn"
