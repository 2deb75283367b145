"""JSON schemas of what commands print with `--json`, and the page that lists them.

A record is declared as words: `name:type`, where a type is one of `_TYPES`, `[]` after it means a list, and `?` means
that it may be null.
"""

import json
from typing import Any

_TYPES: dict[str, dict[str, Any]] = {
    "id": {"type": "string"},
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "num": {"type": ["number", "string", "null"], "description": "NaN and infinities are strings or null."},
    "bool": {"type": "boolean"},
    "obj": {"type": "object"},
    "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
    "nums": {"type": "object", "additionalProperties": {"type": ["number", "string", "null"]}},
}
_ROLLOUT = "rollout:id try_index:int"
# By name of the schema: the command that prints such objects, and their fields.
RECORDS: dict[str, tuple[str, str]] = {
    "ls": (
        "rolltape ls RUN --json",
        f"{_ROLLOUT} group:id step:int task_id:str? source:str? attempt:int model:str? agent:str? foreign_ids:str[] "
        "status:str stop_reason:str? reason:str? reward:num reward_terms:nums filtered:str? tags:str[] "
        "inner_tags:str[] notes:int sessions:int turns:int sampled_tokens:int sealed:bool pruned:str[]",
    ),
    "compare-task": (
        "rolltape compare RUN_A RUN_B --json, per task",
        "source:str? task:str a_rollouts:int? a_attempts:int? a_solved:int? a_mean:num b_rollouts:int? b_attempts:int? "
        "b_solved:int? b_mean:num difference:num",
    ),
    "compare": (
        "rolltape compare RUN_A RUN_B --json, the last line",
        "measure:str tasks:int a:num b:num difference:num low:num high:num p:num higher:int lower:int same:int "
        "sign_p:num verdict:str statement:str only_a:int only_b:int unrewarded:int on_both:int measures:obj[]",
    ),
    "tree": ("rolltape tree RUN ROLLOUT --json", f"{_ROLLOUT} session:id turns:obj[] forks:obj[]"),
    "show": ("rolltape show RUN ROLLOUT --part tokens --json", "sample:id line:str"),
    "samples": (
        "rolltape samples RUN --json",
        f"sample:id {_ROLLOUT} group:id session:id policy:str step:int index:int siblings:int prompt_tokens:int "
        "trained_tokens:int reward:num rollout_reward:num advantage:num loss_weight:num turn_rewards:obj "
        "truncated:bool uses_tools:bool ill_formed:bool logprob_kind:str? versions:obj[] spans:obj[] tokens:int "
        "sampled_tokens:int",
    ),
    "compare-difference": (
        "rolltape samples RUN --compare POLICY --json, per range of tokens",
        f"{_ROLLOUT} turn:id start:int stop:int one:str other:str",
    ),
    "compare-policy": (
        "rolltape samples RUN --compare POLICY --json, per policy",
        "policy:str key:str samples:int trained:int masked:int dropped:int",
    ),
    "ledger": ("rolltape ledger RUN --json", f"{_ROLLOUT} policy:str sampled:int totals:counts"),
    "check": (
        "rolltape check RUN --json, the last line",
        "rollouts:int turns:int sampled_tokens:int policies:str[] token_steps:int breaches:int",
    ),
    "breach": ("rolltape check RUN --json, per breach", "rule:str where:str what:str"),
    "filter": (
        "rolltape filter RUN --json, the last line",
        "judged:int filtered_now:int filtered_already:int taken_back:int unjudged:counts dry_run:bool",
    ),
    "score-rollout": (
        "rolltape score RUN --json, per rollout",
        f"{_ROLLOUT} turn:int? reward:num reward_terms:nums by:str? before:num recorded:bool changed:bool",
    ),
    "score": (
        "rolltape score RUN --json, the last line",
        "rewards:int recorded:int changed:int skipped:int dry_run:bool",
    ),
    "push": (
        "rolltape push RUN --json",
        "step:int split:str there_already:bool traces:int rollouts:int mean_reward:num",
    ),
    "token-step": (
        "rolltape tokens RUN --json",
        "step:int format:str stable:bool ranks:int writers:int? records:int tokens:int bytes:int dropped_records:int "
        "lost_records:int partial_ranks:int[]",
    ),
}
_HEAD = """\
# JSON

Commands print one JSON object per line with `--json`. These are their fields. Each has a JSON Schema beside this page.
`?` means that the value may be null; `num` may also be null, or a string for NaN and infinities.
[Export](export.md) describes the rows of exported files, which carry a `schema` field, and
[the wire API](wire-api.md) describes the gateway's bodies. `python -m reference_docs` writes this page.
"""


def json_schemas() -> dict[str, str]:
    """The schema of each record as JSON text, by its path below docs/reference."""
    return {f"schemas/{name}.json": json.dumps(schema_of(name), indent=2) + "\n" for name in RECORDS}


def schema_of(name: str) -> dict[str, Any]:
    """The JSON Schema of one record. Later releases may add fields."""
    command, fields = RECORDS[name]
    properties = {field: _schema(kind) for field, kind in _fields(fields)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"rolltape.cli.{name}/1",
        "description": command,
        "type": "object",
        "properties": properties,
        "required": list(properties),
    }


def json_page() -> str:
    """The page as Markdown."""
    parts = [_HEAD]
    for name, (command, fields) in RECORDS.items():
        rows = "\n".join(f"| `{field}` | `{kind}` |" for field, kind in _fields(fields))
        parts.append(
            f"\n## {name}\n\n`{command}` ([schema](schemas/{name}.json))\n\n| field | type |\n| --- | --- |\n{rows}\n"
        )
    return "".join(parts)


def _fields(words: str) -> list[tuple[str, str]]:
    return [(field, kind) for field, _, kind in (word.partition(":") for word in words.split())]


def _schema(kind: str) -> dict[str, Any]:
    if kind.endswith("[]"):
        return {"type": "array", "items": _schema(kind[:-2])}
    if kind.endswith("?"):
        return {"anyOf": [_schema(kind[:-1]), {"type": "null"}]}
    return dict(_TYPES[kind])
