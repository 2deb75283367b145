"""The command line, in this process."""

import pytest

from commands import Cli, Result
from rolltape.cli import run as rolltape_command


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command line."""

    def called(*arguments: object) -> Result:
        capsys.readouterr()
        code = rolltape_command([str(argument) for argument in arguments])
        return Result(code, *capsys.readouterr())

    return called
