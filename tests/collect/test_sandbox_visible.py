"""What a program in a sandbox sees of this machine, by where it lies."""

import os
import sys
from pathlib import Path

import pytest

from rolltape.collect.sandboxes.visible import install_mounts, with_parents


def shown(*command: object, search: str = "", **how: tuple[str, ...]) -> dict[str, str]:
    """What is mounted where: "=" for itself, read-only, a link by its target."""
    mounts = install_mounts(tuple(map(str, command)), search, **how)
    kinds = {"--ro-bind": "=", "--tmpfs": "hidden"}
    return {mount[-1]: kinds.get(mount[0], mount[1]) for mount in mounts}


def program(path: Path, text: str = "\x7fELF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_a_program_by_itself_comes_alone_with_its_links_and_files_that_it_is_given(tmp_path: Path) -> None:
    real = program(tmp_path / "share/tool/1.0/tool")
    (tmp_path / "bin").mkdir()
    link = tmp_path / "bin/tool"
    link.symlink_to("../share/tool/1.0/tool")
    (tmp_path / "task.py").write_text("")
    (tmp_path / "answers.jsonl").write_text("")
    assert shown(link, tmp_path / "task.py", "--fast") == {
        str(real): "=",
        str(link): "../share/tool/1.0/tool",
        str(tmp_path / "task.py"): "=",
    }


def test_a_script_of_npm_comes_with_its_packages_and_the_node_that_runs_it(tmp_path: Path) -> None:
    script = program(tmp_path / "app/node_modules/agent/cli.js", "#!/usr/bin/env node\n")
    (tmp_path / "app/node_modules/.bin").mkdir()
    link = tmp_path / "app/node_modules/.bin/agent"
    link.symlink_to("../agent/cli.js")
    node = program(tmp_path / "nvm/bin/node")
    (tmp_path / "nvm/include/node").mkdir(parents=True)
    assert script.exists()
    assert shown(link, search=str(node.parent)) == {
        str(tmp_path / "app/node_modules"): "=",
        str(tmp_path / "nvm/bin"): "=",
        str(tmp_path / "nvm/include"): "=",
    }


def test_of_an_environment_that_is_a_project_too_only_the_environment_is_seen(tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").write_text("")
    (tmp_path / "lib").mkdir()
    (tmp_path / "answers.jsonl").write_text("")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to("/usr/bin/python3")
    script = program(tmp_path / "bin/agent", f"#!{tmp_path}/bin/python\n")
    assert shown(script) == {str(tmp_path / name): "=" for name in ("bin", "lib", "pyvenv.cfg")}


def test_a_shim_of_pyenv_comes_with_its_versions(tmp_path: Path) -> None:
    shim = program(tmp_path / ".pyenv/shims/python3", "#!/bin/sh\n")
    (tmp_path / ".pyenv/versions").mkdir()
    assert shown(shim) == {str(tmp_path / ".pyenv"): "="}


@pytest.mark.parametrize("name", ["sh", "env"])
def test_the_system_needs_no_mount_of_its_own(name: str) -> None:
    assert shown(f"/usr/bin/{name}") == {}


def test_this_interpreter_can_be_shown() -> None:
    seen = shown(sys.executable)
    real = os.path.realpath(sys.executable)
    assert real.startswith("/usr/") or any(real.startswith(f"{path}/") for path in seen)


def test_a_hidden_folder_is_covered_where_something_above_it_is_seen(tmp_path: Path) -> None:
    run = tmp_path / "project/runs/one"
    run.mkdir(parents=True)
    hidden = (str(run), str(tmp_path / "elsewhere"))
    seen = shown("/usr/bin/env", reads=(str(tmp_path / "project"),), hidden=hidden)
    assert seen == {str(tmp_path / "project"): "=", str(run): "hidden"}


def test_a_hidden_folder_is_covered_by_whichever_link_it_is_seen(tmp_path: Path) -> None:
    run = tmp_path / "disk/project/runs/one"
    run.mkdir(parents=True)
    (tmp_path / "project").symlink_to("disk/project")
    seen = shown("/usr/bin/env", reads=(str(tmp_path / "project"),), hidden=(str(run),))
    assert seen == {str(tmp_path / "project"): "=", str(tmp_path / "project/runs/one"): "hidden"}


def test_folders_above_a_mount_can_be_passed_by_anybody() -> None:
    mounts = [
        ("--tmpfs", "/tmp"),
        ("--ro-bind", "/a", "/tmp/x/y"),
        ("--tmpfs", "/tmp/x/y/z"),
        ("--bind", "/b", "/tmp/x/w"),
    ]
    made = list(with_parents(mounts))
    assert made == [
        *("--tmpfs", "/tmp", "--perms", "0755", "--dir", "/tmp/x", "--ro-bind", "/a", "/tmp/x/y"),
        *("--tmpfs", "/tmp/x/y/z", "--bind", "/b", "/tmp/x/w"),
    ]
