"""The files of deploy/: they parse, name what exists, and speak of metrics that a gateway really has."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped, unused-ignore]

from commands import Cli
from gateways import CALCULATOR, rig, user
from rolltape import __version__

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
_METRIC = re.compile(r"\brolltape_\w+")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((DEPLOY / "grafana" / "gateway.json").read_text())
    return read


def alert_rules() -> list[dict[str, Any]]:
    return [rule for group in documents("prometheus/alerts.yaml")[0]["groups"] for rule in group["rules"]]


def flags_of(arguments: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in arguments if word.startswith("--")}


def known_flags(cli: Cli, command: str) -> set[str]:
    return set(re.findall(r"--[a-z-]+", cli(command, "--help").out))


async def test_dashboard_and_alerts_name_metrics_of_a_real_gateway(tmp_path: Path) -> None:
    broken = '<tool_call>\n{"name": \n</tool_call>'
    async with rig(tmp_path / "run", [broken]) as it:
        await it.ask(await it.open(), [user("hello")], tools=[CALCULATOR])
        await it.call("POST", "/v1/chat/completions", {})
        text = (await it.call("GET", "/metrics")).raw.decode()
    real = {name for name in _METRIC.findall(text) if not name.endswith("_created")}
    expressions = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    expressions += [rule["expr"] for rule in alert_rules()]
    named = {name for expression in expressions for name in _METRIC.findall(expression)}
    assert named <= real
    page = set(_METRIC.findall((ROOT / "docs" / "production.md").read_text()))
    assert page <= real | {"rolltape_added_seconds"}
    assert {f"rolltape_{name}" for name in ("engines_up", "paused", "errors_total", "turns_total")} <= named
    labels = {label for expression in expressions for label in re.findall(r"by \((\w+)\)|\{(\w+)=", expression)}
    used = {one or other for one, other in labels} - {"le", "job"}
    assert used <= set(re.findall(r"(\w+)=\"", text))


def test_dashboard_has_a_place_and_a_unit_for_each_panel() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in panels)
    for rule in alert_rules():
        assert set(rule) == {"alert", "expr", "for", "annotations"}
        assert rule["annotations"]["summary"].endswith((".", "?"))


def test_services_of_the_compose_file_run_commands_with_flags_that_exist(cli: Cli) -> None:
    services = documents("compose.yaml")[0]["services"]
    assert {name: one["command"][0] for name, one in services.items()} == {
        "engine": "engine",
        "gateway": "serve",
        "view": "view",
    }
    for service in services.values():
        assert flags_of(service["command"]) <= known_flags(cli, service["command"][0])
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_kubernetes_manifest_has_probes_and_flags_that_exist(cli: Cli) -> None:
    stateful, service = documents("kubernetes/gateway.yaml")
    assert (stateful["kind"], service["kind"]) == ("StatefulSet", "Service")
    pod = stateful["spec"]["template"]["spec"]
    gateway, view = pod["containers"]
    assert gateway["livenessProbe"]["httpGet"]["path"] == gateway["startupProbe"]["httpGet"]["path"] == "/livez"
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/readyz"
    for container in (gateway, view):
        assert container["image"] == f"rolltape:{__version__}"
        assert flags_of(container["args"]) <= known_flags(cli, container["args"][0])
        assert {key["valueFrom"]["secretKeyRef"]["name"] for key in container["env"]} == {"rolltape"}
    ports = {port["name"] for container in (gateway, view) for port in container["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == ports
    mounted = {mount["name"] for container in (gateway, view) for mount in container["volumeMounts"]}
    claims = {claim["metadata"]["name"] for claim in stateful["spec"]["volumeClaimTemplates"]}
    assert mounted == claims | {volume["name"] for volume in pod["volumes"]}
    assert stateful["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]


def test_systemd_unit_is_valid_and_starts_a_gateway(cli: Cli, tmp_path: Path) -> None:
    unit = DEPLOY / "systemd" / "rolltape-gateway.service"
    (start,) = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
    program, command, *arguments = shlex.split(start)
    assert (Path(program).name, command) == ("rolltape", "serve")
    assert flags_of(arguments) <= known_flags(cli, "serve")
    variables = set(re.findall(r"\$\{(\w+)\}", start))
    assert variables <= set(re.findall(r"^#   (\w+)=", unit.read_text(), re.MULTILINE))
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    # As it would be installed, with a program that exists here.
    copied = tmp_path / unit.name
    copied.write_text(unit.read_text().replace(program, "/bin/true"))
    done = subprocess.run([analyze, "verify", "--man=no", str(copied)], capture_output=True, text=True)
    about_it = [line for line in done.stderr.splitlines() if unit.name in line]
    assert about_it == []
