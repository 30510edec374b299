"""`oracle`: runs the task's own solution. A task that fails with it is broken. The only agent that gets to see it."""

from __future__ import annotations

from sandbox.agents.base import AgentRun
from sandbox.containers.base import Sandbox, folder_archive, run
from sandbox.errors import AgentError
from sandbox.scoring.verifier import fill


class Oracle:
    name = "oracle"
    aliases: tuple[str, ...] = ()
    about = "runs the task's own solution: a task that fails with it is broken"
    needs_model = False
    version = None

    def install(self, sandbox: Sandbox) -> None:
        pass

    def act(self, agent_run: AgentRun) -> str:
        task = agent_run.task
        if not (task.oracle_dir / "solve.sh").is_file():
            raise AgentError(f"Oracle requires oracle/solve.sh or legacy solution/solve.sh: {task.path}", "other")
        where = "/oracle" if task.layout == "native" else "/solution"
        run(agent_run.sandbox, ["mkdir", "-p", where])
        agent_run.sandbox.put(folder_archive(task.oracle_dir), where)
        env = {**agent_run.env, **fill(task.oracle.env, f"{task.name}: oracle.env")}
        if task.oracle.timeout_sec:
            agent_run.budget = task.oracle.timeout_sec
        agent_run.begin()
        command = f"{where}/solve.sh"
        done = run(
            agent_run.sandbox,
            ["/bin/sh", "-c", 'exec "$0"', command],
            user=task.agent.user or "root",
            env=env,
            cwd=agent_run.prepared.workdir,
            timeout=agent_run.left(),
        )
        agent_run.logs.mkdir(parents=True, exist_ok=True)
        (agent_run.logs / "oracle.txt").write_bytes(done.stdout + done.stderr)
        agent_run.trajectory.add("oracle", command=command, return_code=done.exit_code, stdout=done.output[:2000])
        if done.timed_out:
            raise agent_run.out_of_time()
        if done.exit_code != 0:
            raise agent_run.died("oracle", done)
        return "end_turn"
