"""`oracle`: runs the task's own solution. A task that fails with it is broken. No other agent gets the solution."""

from __future__ import annotations

from sandbox.agents.agent_run import AgentRun
from sandbox.agents.base import Agent
from sandbox.containers.archives import folder_archive
from sandbox.containers.base import run
from sandbox.errors import TaskError
from sandbox.scoring.verifier import fill_env
from sandbox.tasks.task import Task


class Oracle(Agent):
    name = "oracle"
    about = "runs the task's own solution: a task that fails with it is broken"
    needs_model = False

    def check_task(self, task: Task) -> None:
        if not (task.oracle_dir / "solve.sh").is_file():
            raise TaskError(f"Oracle requires oracle/solve.sh or legacy solution/solve.sh: {task.path}")

    def act(self, agent_run: AgentRun) -> str:
        task = agent_run.task
        folder = "/oracle" if task.layout == "native" else "/solution"
        run(agent_run.sandbox, ["mkdir", "-p", folder])
        agent_run.sandbox.put(folder_archive(task.oracle_dir), folder)
        env = {**agent_run.env, **fill_env(task.oracle.env, f"{task.name}: oracle.env")}
        if task.oracle.timeout_sec:
            agent_run.budget = task.oracle.timeout_sec
        agent_run.begin()
        command = f"{folder}/solve.sh"
        done = run(
            agent_run.sandbox,
            ["/bin/sh", "-c", 'exec "$0"', command],
            user=task.agent.user or "root",
            env=env,
            cwd=agent_run.prepared.workdir,
            timeout=agent_run.seconds_left(),
        )
        agent_run.logs.mkdir(parents=True, exist_ok=True)
        (agent_run.logs / "oracle.txt").write_bytes(done.stdout + done.stderr)
        agent_run.trajectory.add("oracle", command=command, return_code=done.exit_code, stdout=done.output[:2000])
        if done.timed_out:
            raise agent_run.out_of_time()
        if done.exit_code != 0:
            raise agent_run.died("oracle", done)
        return "end_turn"
