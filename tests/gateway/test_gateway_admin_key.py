"""The admin key: made where none is given, kept where its owner alone finds it, and told to nobody else."""

import asyncio
import logging
import os
import stat
from pathlib import Path

import pytest

from gateways import PATHS, Api, body_of, rig
from rolltape.cli import run as rolltape_command
from rolltape.errors import TapeError
from rolltape.gateway.admin_key import HEADER_FILE, find_gateway, keep_admin_key, read_admin_key


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ROLLTAPE_ADMIN_KEY", raising=False)
    return tmp_path


async def status(*arguments: str) -> int:
    return await asyncio.to_thread(rolltape_command, ["status", *arguments])


async def test_a_key_that_is_made_stays_in_memory_unless_it_is_to_be_kept(run: Path) -> None:
    async with rig(run) as it:
        assert len(it.gateway.admin_key) > 40
        assert (read_admin_key(run), find_gateway(it.gateway.url)) == (None, None)
        kept = [
            file for file in run.rglob("*") if file.is_file() and it.gateway.admin_key.encode() in file.read_bytes()
        ]
        assert kept == []


async def test_status_finds_the_key_by_address_and_by_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(run, keep_admin_key=True) as it:
        await it.open()
        port = it.gateway.url.rpartition(":")[2]
        monkeypatch.chdir(tmp_path)
        for given in (it.gateway.url, f"http://localhost:{port}/", str(run), "run", "run/"):
            assert await status(given) == 0, given
            shown = capsys.readouterr().out
            assert "run run: running" in shown
            assert [line.split("  ")[-1] for line in shown.splitlines() if "forks in" in line] == [
                "0 forks in 1 session"
            ]
        assert read_admin_key(run) == it.gateway.admin_key
    assert find_gateway(str(run)) is None
    assert await status("run") == 2


async def test_the_key_of_a_run_is_the_same_for_its_next_gateway_and_one_that_is_given_is_not_written(
    run: Path,
) -> None:
    keys = []
    for given in (None, None, "a key of my own"):
        async with rig(run, keep_admin_key=True, admin_key=given) as it:
            keys.append(it.gateway.admin_key)
    assert keys == [read_admin_key(run), read_admin_key(run), "a key of my own"]


def test_the_header_file_is_for_its_owner_alone_and_curl_takes_it(run: Path) -> None:
    run.mkdir()
    before = os.umask(0)
    try:
        key = keep_admin_key(run)
    finally:
        os.umask(before)
    assert stat.S_IMODE((run / HEADER_FILE).stat().st_mode) == 0o600
    assert (run / HEADER_FILE).read_text() == f"Authorization: Bearer {key}\n"


def test_a_header_file_that_holds_no_key_is_refused(run: Path) -> None:
    run.mkdir()
    (run / HEADER_FILE).write_text("nonsense")
    with pytest.raises(TapeError, match="remove it"):
        keep_admin_key(run)


async def test_what_a_dead_gateway_left_behind_is_not_trusted(run: Path, home: Path) -> None:
    """Another program may listen there by now, and must not be sent the key."""
    async with rig(run, keep_admin_key=True) as it:
        (entry,) = (home / "cache" / "rolltape" / "gateways").iterdir()
        left = entry.read_bytes()
    entry.write_bytes(left)
    assert find_gateway(it.gateway.url) is None


async def test_the_admin_key_in_a_wrong_place_is_not_logged(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with rig(run) as it:
        key = it.gateway.admin_key
        with caplog.at_level(logging.DEBUG):
            for path in (f"/sessions/{key}", f"/s/{key}{PATHS[Api.CHAT]}", f"/v1/{key}"):
                assert (await it.call("POST", path, body_of(Api.CHAT, "q"))).status in (401, 404, 405)
    assert key not in caplog.text
