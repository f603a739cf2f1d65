"""Run standalone scripts, each as ``python PATH`` does."""

import os
import subprocess
import sys
from pathlib import Path

from gradparity.conformance import Scenario
from gradparity.conformance.script.standalone import standalone_script

LIMIT_S = 250
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


class Scripts:
    """Runs scripts in ``folder`` by the command line ``python``."""

    def __init__(self, folder: Path, python: list[str]) -> None:
        self.path, self.python = folder / "script.py", python
        self.limit_s = 120
        """Seconds for which the ranks of a script wait for each other."""

    def __call__(self, scaler: str, scenario: str) -> tuple[int, str]:
        """Return the exit code of a scenario's script, and its output."""
        done = self._run(scaler, scenario, subprocess.STDOUT)
        return done.returncode, done.stdout

    def _run(
        self, scaler: str, scenario: str, errors: int
    ) -> subprocess.CompletedProcess[str]:
        script = standalone_script(Scenario.parse(scenario), scaler)
        limit = "LIMIT = timedelta(seconds=120)"
        assert limit in script
        own = limit.replace("120", str(self.limit_s))
        self.path.write_text(script.replace(limit, own))
        return subprocess.run(
            [*self.python, str(self.path)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=LIMIT_S,
            cwd=self.path.parent,
            env=ENVIRONMENT,
        )


def alone(folder: Path, scaler: str, scenario: str) -> tuple[int, str]:
    """Run a script in a new Python, which must print no warning."""
    done = Scripts(folder, [sys.executable])._run(scaler, scenario, subprocess.PIPE)
    assert done.stderr == ""
    return done.returncode, done.stdout
