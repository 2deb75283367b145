"""The server over a real socket: what it answers, what it refuses, and what it tells while a run is recorded."""

import asyncio
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import rolltape
from rolltape.errors import RunNotFound, ViewError
from rolltape.view.rollout import rollout_answers
from rolltape.view.serve import served
from taped import assistant, finished, first_turn, next_turn, python, record_run, user
from viewing import Asking, asking


async def test_runs_are_listed_and_summed_up(tmp_path: Path) -> None:
    record_run(tmp_path / "one")
    record_run(tmp_path / "two", rollouts=1)
    async with asking(tmp_path / "one", tmp_path / "two") as ask:
        for name in ("exp", "exp-2"):
            await ask.caught_up(name)
        first, second = (await ask.json("/api/runs"))["runs"]
        assert (first["r"], first["name"], first["rollouts"], first["mean_reward"]) == ("exp", "exp", 3, 1.0)
        assert (second["r"], second["rollouts"], second["statuses"]) == ("exp-2", 1, {"finished": 1})
        overview = await ask.json("/api/exp/overview")
        assert [step["step"] for step in overview["by_step"]] == [0, 1, 2]
        assert [step["reward"]["mean"] for step in overview["by_step"]] == [0.0, 1.0, 2.0]
        assert (await ask.json("/api/exp/overview?step=1"))["rollouts"] == 1
        assert overview["versions"] == ["7", "8"]


async def test_the_table_is_sorted_filtered_and_paged(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run", rollouts=5)
    with rolltape.open(tmp_path / "run") as tape:
        tape.tag(ids[3], "good", "odd")
        tape.filter(ids[4], "a near duplicate")
        tape.tag(ids[4], "odd")
        tape.tag(ids[4])  # none in the place of those it had
    async with asking(tmp_path / "run") as ask:
        await ask.caught_up("exp")

        async def listed(query: str) -> list[int]:
            return [ids.index(row["id"]) for row in (await ask.json(f"/api/exp/rollouts?{query}"))["rows"]]

        assert await listed("") == [0, 1, 2, 3, 4]
        assert await listed("sort=-reward") == [4, 3, 2, 1, 0]
        assert await listed("sort=-started&limit=2&offset=1") == [3, 2]
        assert await listed("min_reward=1&max_reward=3") == [1, 2, 3]
        assert await listed("task=task-2") == [2]
        assert await listed("step=4") == [4]
        assert await listed("tag=odd") == [3]
        assert await listed("filtered=yes") == [4]
        assert await listed("filtered=no&sort=-task") == [3, 2, 1, 0]
        assert await listed("status=failed,lost") == []
        assert await listed("task=no+such+task") == []
        page = await ask.json("/api/exp/rollouts?min_reward=3&limit=1")
        assert (page["total"], page["matched"], len(page["rows"])) == (5, 2, 1)
        assert page["rows"][0]["tags"] == ["good", "odd"]
        status, message = await ask.refused("/api/exp/rollouts?sort=nonsense")
        assert (status, "nonsense" in message) == (400, True)
        for asked in ("rollouts?cause=nonsense", "overview?step=nan", "overview?step=inf", "overview?step=1.5"):
            assert (await ask.refused(f"/api/exp/{asked}"))[0] == 400
        assert (await ask.refused("/api/exp/rollouts?min_reward=much"))[0] == 400


async def test_one_that_has_no_reward_is_sorted_last_both_ways(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run", name="run") as tape:
        ids = []
        for attempt, reward in enumerate((1.0, None, float("nan"), 2.0)):
            with tape.rollout(task_id="t", attempt=attempt) as rollout:
                first_turn(rollout.session())
                rollout.finish(reward=reward)
                ids.append(rollout.id)
    async with asking(tmp_path / "run") as ask:
        overview = await ask.caught_up("run")
        up = [ids.index(row["id"]) for row in (await ask.json("/api/run/rollouts?sort=reward"))["rows"]]
        down = [ids.index(row["id"]) for row in (await ask.json("/api/run/rollouts?sort=-reward"))["rows"]]
        assert (up, down) == ([0, 3, 1, 2], [3, 0, 1, 2])
        rows = (await ask.json("/api/run/rollouts"))["rows"]
        assert [row["reward"] for row in rows] == [1.0, None, {"$float": "nan"}, 2.0]
        assert (overview["reward"]["mean"], overview["reward"]["rollouts"], overview["rewards_not_finite"]) == (
            1.5,
            2,
            1,
        )


async def test_new_rollouts_turns_and_rewards_appear_while_a_run_is_recorded(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run", name="run") as tape:
        async with asking(tmp_path / "run") as ask, ask.client.get("/api/run/live") as events:
            assert events.headers["Content-Type"].startswith("text/event-stream")
            assert (await _next_event(events))["rollouts"] == []
            rollout = tape.rollout(task_id="t")
            session = rollout.session()
            turn = first_turn(session)
            assert rollout.id in (await _next_event(events))["rollouts"]
            page = await ask.until("/api/run/rollouts", lambda page: page["rows"] and page["rows"][0]["turns"] == 1)
            assert (page["rows"][0]["status"], page["rows"][0]["live"]) == ("running", True)
            next_turn(session, turn)
            await ask.until("/api/run/rollouts", lambda page: page["rows"][0]["turns"] == 2)
            detail = await ask.json(f"/api/run/rollouts/{rollout.id}")
            assert [len(one["turns"]) for one in detail["sessions"]] == [2]
            assert detail["as_if_finished"]
            rollout.finish(reward=0.25)
            page = await ask.until("/api/run/rollouts", lambda page: page["rows"][0]["trained_tokens"] is not None)
            assert (page["rows"][0]["status"], page["rows"][0]["reward"]) == ("finished", 0.25)
            tape.score(rollout.id, reward=0.75)
            await ask.until("/api/run/rollouts", lambda page: page["rows"][0]["reward"] == 0.75)
            tape.filter(rollout.id, "no good")
            page = await ask.until("/api/run/rollouts", lambda page: page["rows"][0]["filter"] == "no good")
            assert page["rows"][0]["trained_tokens"] == 0


async def _next_event(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    async with asyncio.timeout(30):
        while True:
            line = await answer.content.readline()
            if line.startswith(b"data: "):
                event: dict[str, Any] = json.loads(line[6:])
                return event


async def test_a_rollout_whose_writer_dies_is_shown_as_lost(tmp_path: Path) -> None:
    code = """
import sys, time, rolltape
from taped import first_turn
tape = rolltape.open(sys.argv[1], name="run")
first_turn(tape.rollout(task_id="t").session())
print("recorded", flush=True)
time.sleep(120)
"""
    process = python(code, str(tmp_path / "run"))
    assert process.stdout is not None
    process.stdout.readline()
    try:
        async with asking(tmp_path / "run") as ask:
            await ask.until("/api/run/rollouts", lambda page: page["rows"] and page["rows"][0]["status"] == "running")
            process.kill()
            process.wait()
            page = await ask.until("/api/run/rollouts", lambda page: page["rows"][0]["status"] == "lost")
            assert page["rows"][0]["reason"] == "its writer ended, and the tape shows no finish"
            await ask.until("/api/run/overview", lambda one: one["ledger"] == {"dropped:rollout_failed": 2})
    finally:
        process.kill()
        process.communicate()


async def test_a_run_that_is_sealed_meanwhile_stays_as_it_was(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run")
    async with asking(tmp_path / "run") as ask:
        await ask.caught_up("exp")
        before = await ask.json(f"/api/exp/rollouts/{ids[0]}")
        rolltape.seal(tmp_path / "run")
        assert not list((tmp_path / "run" / "journals").glob("*.sqlite"))
        assert await ask.json(f"/api/exp/rollouts/{ids[0]}") == before
        await asyncio.sleep(1.5)
        assert await ask.json(f"/api/exp/rollouts/{ids[0]}") == before
        assert (await ask.json("/api/exp/rollouts"))["total"] == 3


async def test_a_rollout_is_shown_by_a_foreign_id(tmp_path: Path) -> None:
    with rolltape.open(tmp_path, name="run") as tape:
        for attempt, names in enumerate([["trace/a", "same"], ["same"]]):
            tape.rollout(task_id="t", attempt=attempt, foreign_ids=names).finish()
        tape.rollout(task_id="t", foreign_ids=["again"], new_try=True).finish()
    async with asking(tmp_path) as ask:
        await ask.caught_up("run")
        for name, place in (("trace%2Fa", (0, 0)), ("again", (0, 1))):
            row = (await ask.json(f"/api/run/rollouts/{name}"))["row"]
            assert (row["attempt"], row["try"]) == place
        status, why = await ask.refused("/api/run/rollouts/same")
        assert (status, "is a foreign id of 2 rollouts" in why) == (404, True)


async def test_every_answer_carries_the_headers_that_keep_a_page_from_harm(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    async with asking(tmp_path / "run") as ask:
        for path in ("/", "/exp/rollouts", "/api/runs", "/api/nothing/at/all", "/app.js"):
            async with ask.client.get(path) as answer:
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert answer.headers["Referrer-Policy"] == "no-referrer"
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            async with ask.client.request(method, "/api/runs") as answer:
                assert answer.status == 405


@pytest.mark.parametrize("name", ["evil.example", "127.0.0.1.evil.example", "", "[::1", "10.0.0.1"])
async def test_a_page_elsewhere_that_points_its_name_here_is_refused(tmp_path: Path, name: str) -> None:
    record_run(tmp_path / "run")
    async with asking(tmp_path / "run") as ask:
        status, message = await ask.refused("/api/runs", headers={"Host": name})
        assert status in (400, 401)
        assert "exp" not in message


async def test_with_a_key_nothing_is_told_without_it(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    async with asking(tmp_path / "run", key="secret") as ask:
        for path in ("/", "/api/runs", "/api/exp/live", "/app.js", "/api/runs?key=wrong", "/?key="):
            assert (await ask.refused(path))[0] == 401
        assert (await ask.json("/api/runs", headers={"Authorization": "Bearer secret"}))["runs"]
        # Once in the address, and from then on in a cookie: the address can be shared without it.
        async with ask.client.get("/exp/rollouts?sort=reward&key=secret", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (303, "/exp/rollouts?sort=reward")
            cookie = answer.headers["Set-Cookie"]
            assert "HttpOnly" in cookie
            assert "SameSite=Lax" in cookie  # a link that somebody was sent opens with it
            assert "secret" not in cookie
        headers = {"Cookie": cookie.partition(";")[0]}
        assert (await ask.json("/api/runs", headers=headers))["runs"]


async def test_off_loopback_it_does_not_start_without_a_key(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    with pytest.raises(ViewError, match="not loopback"):
        async with served([str(tmp_path / "run")], host="0.0.0.0"):
            pass


async def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ViewError, match="cannot be listened on"):
            async with served([str(tmp_path / "run")], port=taken.getsockname()[1]):
                pass


async def test_no_path_leads_out_of_what_is_served(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run")
    others = record_run(tmp_path / "other", rollouts=4)
    secret = tmp_path / "run.txt"
    secret.write_text("not for everybody")
    async with asking(tmp_path / "run") as ask:
        await ask.caught_up("exp")
        ways = [
            *("/../run.txt", "/..%2f..%2frun.txt", "/%2e%2e/run.txt", f"/{secret}", "/page/../../run.txt"),
            *(f"/api/{tmp_path}/other/overview", "/api/..%2fother/overview", "/api/other/overview"),
            *(f"/api/exp/rollouts/{others[3]}", f"/api/exp/rollouts/..%2f{ids[0]}", "/api/exp/groups/%00"),
            *(f"/api/exp/rollouts/{ids[0]}/messages/..%2f..", f"/api/exp/rollouts/{ids[0]}/turns/x/tokens"),
        ]
        host, port = ask.client._base_url.host, ask.client._base_url.port  # type: ignore[union-attr]
        for way in ways:
            answer = await _raw(str(host), int(port or 0), way)
            assert b"not for everybody" not in answer
            assert answer.split()[1] in (b"404", b"400") or b"<!doctype html>" in answer.lower()
            assert b"task-3" not in answer


async def _raw(host: str, port: int, path: str) -> bytes:
    """The answer to a request that no client has tidied up."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer


async def test_a_run_that_is_not_there_is_said_before_anything_is_served(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="no run there"):
        async with served([str(tmp_path / "nothing")]):
            pass


async def test_texts_of_any_kind_and_length_arrive_whole(tmp_path: Path) -> None:
    texts = [
        "<script>alert(1)</script>",
        "javascript:alert(1)",
        "\u202eright to left\u2066",
        "a\u200bb",
        "\x00\x1b[31m",
    ]
    long = "x" * 10_000_000
    with rolltape.open(tmp_path / "run", name="run") as tape, tape.rollout(task_id="t") as rollout:
        session = rollout.session()
        turn = first_turn(session, prompt_messages=[user(text) for text in texts], reply=assistant("lone \ud800 half"))
        next_turn(session, turn, reply=assistant(long))
        rollout.finish(reward=1.0)
    async with asking(tmp_path / "run") as ask:
        await ask.caught_up("run")
        detail = await ask.json(f"/api/run/rollouts/{rollout.id}")
        first, second = detail["sessions"][0]["turns"]
        assert [message["text"] for message in first["new_messages"]] == texts
        assert first["reply"]["text"] == "lone \ufffd half"
        assert first["flags"] == ["repaired_unicode"]
        reply = second["reply"]
        assert (len(reply["text"]), reply["cut"]) == (200_000, 10_000_000)
        whole = await ask.json(f"/api/run/rollouts/{rollout.id}/messages/{reply['digest']}")
        assert whole["message"]["content"] == long


async def test_a_run_that_another_process_records_is_followed(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from taped import record_run; record_run(Path(sys.argv[1]))"
    rolltape.open(tmp_path / "run", name="exp").close()
    async with asking(tmp_path / "run") as ask:
        assert (await ask.caught_up("exp"))["rollouts"] == 0
        finished(python(code, str(tmp_path / "run")))
        await ask.until("/api/exp/overview", lambda one: one["rollouts"] == 3 and not one["pending"])


async def test_it_ends_though_the_worker_has_much_to_do(tmp_path: Path) -> None:
    record_run(tmp_path / "run", rollouts=1500, turns=1)
    async with asyncio.timeout(60), asking(tmp_path / "run") as ask:
        await ask.until("/api/exp/overview", lambda one: one["progress"]["summarized"])  # by then it is at it


async def test_a_worker_that_dies_is_started_again(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    async with served([str(tmp_path / "run")]) as there, aiohttp.ClientSession(there.address) as client:
        ask = Asking(client)
        await ask.caught_up("exp")
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        for child in children:
            if b"rolltape.view.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(int(child), signal.SIGKILL)
        with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="later") as rollout:
            first_turn(rollout.session())
            rollout.finish(reward=1.0)
        await ask.until("/api/exp/overview", lambda one: one["rollouts"] == 4 and not one["pending"])


async def test_rollouts_are_found_by_the_cause_of_a_fork(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run", name="run") as tape:
        ids = []
        for attempt in range(3):
            with tape.rollout(task_id="t", attempt=attempt) as rollout:
                session = rollout.session()
                turn = first_turn(session)
                for _ in range(attempt):  # the same prompt again
                    first_turn(session, reply=assistant("another"))
                next_turn(session, turn)
                ids.append(rollout.id)
                rollout.finish(reward=1.0)
        running = tape.rollout(task_id="t", attempt=3)
        first_turn(running.session())
        async with asking(tmp_path / "run") as ask:
            overview = await ask.until("/api/run/overview", lambda one: one["fork_causes"] and not one["pending"])
            (cause,) = overview["fork_causes"]
            assert (overview["fork_causes"][cause], overview["fork_cause_rollouts"][cause]) == (3, 2)
            page = await ask.json(f"/api/run/rollouts?cause={cause}&sort=-forks")
            assert [row["id"] for row in page["rows"]] == [ids[2], ids[1]]
            # How many forks one that runs has is not known: it comes last either way, and is not within bounds.
            for sort, order in (("forks", [*ids, running.id]), ("-forks", [*reversed(ids), running.id])):
                page = await ask.json(f"/api/run/rollouts?sort={sort}")
                assert [row["id"] for row in page["rows"]] == order
            assert (await ask.json("/api/run/rollouts?max_forks=0"))["matched"] == 1


@pytest.mark.parametrize("key", ["a&b=c d+e#f%67", 'ünï;"cödé"', "x"])
async def test_a_key_may_hold_any_character(tmp_path: Path, key: str) -> None:
    record_run(tmp_path / "run")
    async with asking(tmp_path / "run", key=key) as ask:
        async with ask.client.get("/", params={"key": key}, allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (303, "/")
            cookie = answer.headers["Set-Cookie"].partition(";")[0]
        assert (await ask.json("/api/runs", headers={"Cookie": cookie}))["runs"]
        # A key of the same length, and another server on this host with another key.
        assert (await ask.refused("/api/runs", params={"key": "y" * len(key)}))[0] == 401
        async with asking(tmp_path / "run", key="another") as other:
            assert (await other.refused("/api/runs", headers={"Cookie": cookie}))[0] == 401
            async with other.client.get("/", params={"key": "another"}, allow_redirects=False) as answer:
                assert answer.headers["Set-Cookie"].partition("=")[0] != cookie.partition("=")[0]


async def test_the_key_leads_to_no_other_host(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    async with asking(tmp_path / "run", key="secret") as ask:
        host, port = ask.client._base_url.host, ask.client._base_url.port  # type: ignore[union-attr]
        answer = await _raw(str(host), int(port or 0), "//evil.example/?key=secret")
        assert b"\r\nLocation: /evil.example/\r\n" in answer


@pytest.mark.parametrize(
    ("site", "mode", "status"),
    [
        ("cross-site", "no-cors", 401),
        ("same-site", "cors", 401),  # another port of this host
        ("cross-site", "navigate", 200),  # a link
        ("same-origin", "cors", 200),
        ("none", "navigate", 200),
    ],
)
async def test_a_page_of_another_site_cannot_ask(tmp_path: Path, site: str, mode: str, status: int) -> None:
    record_run(tmp_path / "run")
    async with asking(tmp_path / "run") as ask:
        headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode}
        async with ask.client.get("/api/runs", headers=headers) as answer:
            assert answer.status == status


async def test_long_answers_are_compressed_for_those_who_take_them_so(tmp_path: Path) -> None:
    (rollout_id,) = record_run(tmp_path / "run", rollouts=1)
    async with asking(tmp_path / "run") as ask:
        await ask.caught_up("exp")
        path = f"/api/exp/rollouts/{rollout_id}"
        async with ask.client.get(path, headers={"Accept-Encoding": "identity"}) as plain:
            assert "Content-Encoding" not in plain.headers
            async with ask.client.get(path) as packed:
                assert (packed.headers["Content-Encoding"], packed.headers["Vary"]) == ("gzip", "Accept-Encoding")
                assert await packed.read() == await plain.read()


async def test_a_person_without_the_key_reads_what_to_do(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    async with asking(tmp_path / "run", key="secret") as ask:
        async with ask.client.get("/exp/<b>", headers={"Accept": "text/html,*/*"}) as answer:
            assert (answer.status, answer.content_type) == (401, "text/html")
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            text = await answer.text()
        assert "give the key" in text
        assert "<b>" not in text


async def test_a_group_too_large_to_show_counts_all_of_its_attempts_and_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_answers, "_MOST_IN_A_GROUP", 2)
    with rolltape.open(tmp_path / "run", name="run") as tape:
        for attempt in range(3):
            with tape.rollout(task_id="t", attempt=attempt) as rollout:
                first_turn(rollout.session())
                rollout.finish(reward=float(attempt))
    async with asking(tmp_path / "run") as ask:
        await ask.caught_up("run")
        group = await ask.json(f"/api/run/groups/{rollout.head.group}")
        assert [one["attempt"] for one in group["rollouts"]] == [0, 1]
        assert (group["attempts"], group["reward"]["rollouts"], group["reward"]["mean"]) == (3, 3, 1.0)
