"""`oracle`: runs the task's own solution. A task that fails with it is broken. The only agent that gets to see it."""

from __future__ import annotations

from sandbox.agents.base import Scene
from sandbox.containers.base import Box, folder_archive, run
from sandbox.errors import AgentError
from sandbox.scoring.verifier import fill


class Oracle:
    name = "oracle"
    aliases: tuple[str, ...] = ()
    about = "runs the task's own solution: a task that fails with it is broken"
    needs_model = False
    version = None

    def install(self, box: Box) -> None:
        pass

    def act(self, scene: Scene) -> str:
        task = scene.task
        if not (task.oracle_dir / "solve.sh").is_file():
            raise AgentError(f"Oracle requires oracle/solve.sh or legacy solution/solve.sh: {task.path}", "other")
        where = "/oracle" if task.layout == "native" else "/solution"
        run(scene.box, ["mkdir", "-p", where])
        scene.box.put(folder_archive(task.oracle_dir), where)
        env = {**scene.env, **fill(task.oracle.env, f"{task.name}: oracle.env")}
        if task.oracle.timeout_sec:
            scene.budget = task.oracle.timeout_sec
        scene.begin()
        command = f"{where}/solve.sh"
        done = run(
            scene.box,
            ["/bin/sh", "-c", 'exec "$0"', command],
            user=task.agent.user or "root",
            env=env,
            cwd=scene.prepared.workdir,
            timeout=scene.left(),
        )
        scene.logs.mkdir(parents=True, exist_ok=True)
        (scene.logs / "oracle.txt").write_bytes(done.stdout + done.stderr)
        scene.trajectory.add("oracle", command=command, return_code=done.exit_code, stdout=done.output[:2000])
        if done.timed_out:
            raise scene.out_of_time()
        if done.exit_code != 0:
            raise scene.died("oracle", done)
        return "end_turn"
