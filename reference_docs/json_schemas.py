"""JSON schemas of what commands print with `--json`, and the page that lists them.

A record is declared by parts: types of which it has the fields, and words `name:type` for what a command puts together
itself. In a word, `[]` after the type means a list and `?` that it may be null; `?` after the name means that the field
may be absent; a type in quotation marks is that very text; the name `*` stands for fields that the user names.
"""

import json
from collections.abc import Iterator, Mapping
from enum import Enum
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from rolltape.collect.collector import Launch
from rolltape.collect.results import RolloutResult, Usage
from rolltape.collect.stats import Figures
from rolltape.doctor.results import CheckResult
from rolltape.gateway.engines.pool import EngineHealth
from rolltape.importers.recording import ImportReport
from rolltape.records.fork import Fork
from rolltape.records.rollout import Note
from rolltape.records.token_record import TokenRecord
from rolltape.records.trace import Trace
from rolltape.samples.check.findings import TokenFinding, UnseenSample
from rolltape.samples.verify import Breach
from rolltape.tape.shards.prune import PruneReport
from rolltape.tape.shards.seal import SealReport
from rolltape.tokens.summary import SequenceFigures, StepFigures

Schema = dict[str, Any]


class Field(NamedTuple):
    name: str
    schema: Schema
    required: bool = True


class Fields(NamedTuple):
    """Some of the fields of a type; of none, all but those left out."""

    of: type
    names: str = ""
    without: str = ""
    required: bool = True


Part = str | type | Fields

_NUMBER: Schema = {
    "anyOf": [
        {"type": ["number", "null"]},
        {"type": "object", "properties": {"$float": {"enum": ["nan", "inf", "-inf"]}}, "required": ["$float"]},
    ]
}
_TYPES: dict[str, Schema] = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "num": _NUMBER,
    "bool": {"type": "boolean"},
    "obj": {"type": "object"},
    "any": {},
    "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
    "nums": {"type": "object", "additionalProperties": _NUMBER},
    "texts": {"type": "object", "additionalProperties": {"type": "string"}},
}
_NAMED: dict[str, type] = {one.__name__: one for one in (EngineHealth, Fork, Usage)}
_ROLLOUT = "rollout:str try_index:int"
_TOKEN_RECORD = "record:str step:int sample:str? rollout:str?"
# By name of the schema: the command that prints such objects, and their parts.
RECORDS: dict[str, tuple[str, tuple[Part, ...]]] = {
    "ls": (
        "rolltape ls RUN --json",
        (
            f"{_ROLLOUT} group:str step:int task_id:str? source:str? attempt:int model:str? agent:str? "
            "foreign_ids:str[] status:str stop_reason:str? reason:str? reward:num reward_terms:nums filtered:str? "
            "tags:str[] inner_tags:str[] notes:int sessions:int turns:int sampled_tokens:int sealed:bool pruned:str[]",
        ),
    ),
    "compare-task": (
        "rolltape compare RUN_A RUN_B --json, per task",
        (
            "source:str? task:str a_rollouts:int? a_attempts:int? a_solved:int? a_mean:num b_rollouts:int? "
            "b_attempts:int? b_solved:int? b_mean:num difference:num",
        ),
    ),
    "compare": (
        "rolltape compare RUN_A RUN_B --json, the last line",
        (
            "measure:str tasks:int a:num b:num difference:num low:num high:num p:num higher:int lower:int same:int "
            "sign_p:num verdict:str statement:str only_a:int only_b:int unrewarded:int on_both:int measures:obj[]",
        ),
    ),
    "tree": ("rolltape tree RUN ROLLOUT --json", (f"{_ROLLOUT} session:str turns:obj[] forks:Fork[]",)),
    "show": (
        "rolltape show RUN ROLLOUT --json; with --color-by also a list of values by that name",
        ("sample:str line:str *:any[]",),
    ),
    "trace": ("rolltape trace RUN ROLLOUT --json", ("schema:str", Trace)),
    "query": ("rolltape query RUN SQL --json; the fields are the columns of the statement", ("*:any",)),
    "samples": (
        "rolltape samples RUN --json",
        (
            f"sample:str {_ROLLOUT} group:str session:str policy:str step:int index:int siblings:int prompt_tokens:int "
            "trained_tokens:int reward:num rollout_reward:num advantage:num loss_weight:num turn_rewards:obj "
            "truncated:bool uses_tools:bool ill_formed:bool logprob_kind:str? versions:obj[] spans:obj[] tokens:int "
            "sampled_tokens:int",
        ),
    ),
    "compare-difference": (
        "rolltape samples RUN --compare POLICY --json, per range of tokens",
        (f"{_ROLLOUT} turn:str start:int stop:int one:str other:str",),
    ),
    "compare-policy": (
        "rolltape samples RUN --compare POLICY --json, per policy",
        ("policy:str key:str samples:int trained:int masked:int dropped:int",),
    ),
    "ledger": (
        "rolltape ledger RUN --json; with --turns also entries",
        (f"{_ROLLOUT} policy:str sampled:int totals:counts filtered?:str entries?:obj[]",),
    ),
    "check": (
        "rolltape check RUN --json, the last line",
        ("rollouts:int turns:int sampled_tokens:int policies:str[] token_steps:int breaches:int",),
    ),
    "breach": ("rolltape check RUN --json, per breach", (Breach,)),
    "filter": (
        "rolltape filter RUN --json, the last line",
        ("judged:int filtered_now:int filtered_already:int taken_back:int unjudged:counts dry_run:bool",),
    ),
    "filter-rollout": (
        "rolltape filter RUN --json, per rollout",
        (f"{_ROLLOUT} by:str? reason:str change:str",),
    ),
    "score-rollout": (
        "rolltape score RUN --json, per rollout",
        (f"{_ROLLOUT} turn:int? reward:num reward_terms:nums by:str? before:num recorded:bool changed:bool",),
    ),
    "score": (
        "rolltape score RUN --json, the last line",
        ("rewards:int recorded:int changed:int skipped:int dry_run:bool",),
    ),
    "ungraded-rollout": (
        "rolltape score RUN --ungraded --json, per rollout",
        (Fields(RolloutResult, "rollout try_index task attempt reward reason"),),
    ),
    "ungraded": (
        "rolltape score RUN --ungraded --json, the last line",
        ("graded:int ungraded:int dry_run:bool",),
    ),
    "tag": ("rolltape tag RUN --json", ("tag:str rollouts:int within_rollouts:int",)),
    "tag-rollout": (
        "rolltape tag RUN ROLLOUT --json",
        (f"{_ROLLOUT} tag:str turn:str? tokens:int[]? by:str?",),
    ),
    "note": ("rolltape note RUN --json", (f"note:str {_ROLLOUT}", Fields(Note, without="id"))),
    "push": (
        "rolltape push RUN --json; a step that was there already has no figures",
        ("step:int split:str there_already:bool traces:int rollouts?:int mean_reward?:num",),
    ),
    "seal": ("rolltape seal RUN --json", (SealReport,)),
    "prune": ("rolltape prune RUN --json", (PruneReport,)),
    "import": (
        "rolltape import KIND PATH --json",
        (Fields(ImportReport, without="broken"), "broken:obj[] token_records:int"),
    ),
    "import-guess": ("rolltape import --guess PATH --json; by kind, why the path looks like it", ("*:str",)),
    "doctor": ("rolltape doctor --json, per check", (CheckResult,)),
    "status": (
        "rolltape status --json",
        (
            "schema:int run:str model:str renderer:str? streams:str up_s:num sessions:int in_flight:int version:str? "
            "weights_folder:str? paused:bool counts:counts unbridged:counts ignored_params:counts rates:nums "
            "forks_per_session:num engines:EngineHealth[] draining:bool workers?:int",
        ),
    ),
    "collect-dry-run": (
        "rolltape collect TASKS --dry-run --json, per task",
        ("task:str where:str environment:str agent:str given:obj",),
    ),
    "collect-launch": (
        "rolltape collect TASKS --json, the first line",
        ("event:'launch'", Fields(Launch, without="confinement"), "sandbox?:str"),
    ),
    "collect-rollout": (
        "rolltape collect TASKS --json, per rollout",
        (
            "event:'rollout'",
            Fields(RolloutResult, "rollout try_index task attempt seat status turns sampled_tokens"),
            Fields(RolloutResult, "reward stop_reason reason", required=False),
        ),
    ),
    "collect-progress": (
        "rolltape collect TASKS --json, from time to time",
        ("event:'progress'", Figures),
    ),
    "collect-ending": ("rolltape collect TASKS --json, when it is told to stop", ("event:'ending' grace_s:num",)),
    "collect-end": (
        "rolltape collect TASKS --json, the last line",
        ("event:'end'", Figures, "rollouts:int endings:obj[] whole:bool usage:Usage stopped:str?"),
    ),
    "token-step": (
        "rolltape tokens RUN --json",
        (
            "step:int format:str stable:bool ranks:int writers:int? records:int tokens:int? bytes:int "
            "dropped_records:int lost_records:int partial_ranks:int[]",
        ),
    ),
    "token-records": (
        "rolltape tokens RUN records --json",
        (
            SequenceFigures,
            Fields(TokenRecord, "step rank micro_step micro_sequence sequence rollout group versions loss"),
        ),
    ),
    "token-summary": ("rolltape tokens RUN summary --json", (StepFigures, "stable:bool")),
    "token-worst": (
        "rolltape tokens RUN worst --json; the value has the name of its column",
        (
            f"{_TOKEN_RECORD} at:int id:int trainer_logprob:num inference_logprob:num turn:str? turn_offset:int? "
            "message:str? first_around:int ids_around:int[] text_around:str *:num",
        ),
    ),
    "token-show": (
        "rolltape tokens RUN show RECORD --json; each column by its name",
        (f"{_TOKEN_RECORD} ids:int[] trained_mask:bool[] *:any",),
    ),
    "token-turns": ("rolltape tokens RUN turns RECORD --json", (f"{_TOKEN_RECORD} spans:obj[]",)),
    "token-check": (
        "rolltape tokens RUN check --json, the last line",
        (
            "steps:int records:int tokens:int unnamed:int pruned:int disagreeing:int findings:int notes:int "
            "unseen:int repeated:int",
        ),
    ),
    "token-finding": ("rolltape tokens RUN check --json, per finding", (TokenFinding,)),
    "token-note": (
        "rolltape tokens RUN check --json, per record that a later filter or grade changed",
        ("note:str", Fields(TokenFinding, without="rule")),
    ),
    "token-unseen": (
        "rolltape tokens RUN check --json, per sample that the trainer never saw",
        ("unseen:str", Fields(UnseenSample, without="sample")),
    ),
}
_HEAD = """\
# JSON

Commands print one JSON object per line with `--json`. These are their fields. Each has a JSON Schema beside this page.
`?` after a type means that the value may be null, and after a name that the field may be absent. `num` may also be
null, or `{"$float": "nan"}` for NaN and likewise `inf` and `-inf`. `*` stands for fields that the command line names.
[Export](export.md) describes the rows of exported files, which carry a `schema` field, and
[the wire API](wire-api.md) describes the gateway's bodies. `python -m reference_docs` writes this page.
"""


def json_schemas() -> dict[str, str]:
    """The schema of each record as JSON text, by its path below docs/reference."""
    return {f"schemas/{name}.json": json.dumps(schema_of(name), indent=2) + "\n" for name in RECORDS}


def schema_of(name: str) -> Schema:
    """The JSON Schema of one record. Later releases may add fields."""
    command, _ = RECORDS[name]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"rolltape.cli.{name}/1",
        "description": command,
        **_object(_fields(name)),
    }


def json_page() -> str:
    """The page as Markdown."""
    parts = [_HEAD]
    for name, (command, _) in RECORDS.items():
        rows = "\n".join(f"| `{_named(field)}` | `{_told(field.schema)}` |" for field in _fields(name))
        typed, remark = command.partition(" --json")[::2]
        parts.append(
            f"\n## {name}\n\n`{typed} --json`{remark} ([schema](schemas/{name}.json))\n\n"
            f"| field | type |\n| --- | --- |\n{rows}\n"
        )
    return "".join(parts)


def _named(field: Field) -> str:
    return field.name if field.required or field.name == "*" else f"{field.name}?"


def _fields(name: str) -> list[Field]:
    return [field for part in RECORDS[name][1] for field in _fields_of_part(part)]


def _fields_of_part(part: Part) -> Iterator[Field]:
    if isinstance(part, str):
        for word in part.split():
            name, _, kind = word.partition(":")
            yield Field(name.removesuffix("?"), _schema_of_word(kind), not name.endswith("?") and name != "*")
    elif isinstance(part, Fields):
        for name in part.names.split() or (name for name in _names(part.of) if name not in part.without.split()):
            yield _field(part.of, name)._replace(required=part.required)
    else:
        yield from _fields_of_type(part)


def _fields_of_type(of: type) -> Iterator[Field]:
    for name in _names(of):
        yield _field(of, name)


def _names(of: type) -> tuple[str, ...]:
    """The fields of a struct or a named tuple."""
    return tuple(getattr(of, "__struct_fields__" if issubclass(of, msgspec.Struct) else "_fields"))


def _field(of: type, name: str) -> Field:
    """A field of such a type. It may be absent if the struct leaves out what has its default."""
    schema = _schema_of_type(get_type_hints(of, include_extras=True)[name])
    if not issubclass(of, msgspec.Struct) or not of.__struct_config__.omit_defaults:
        return Field(name, schema)
    return Field(name, schema, next(one.required for one in msgspec.structs.fields(of) if one.name == name))


def _schema_of_word(kind: str) -> Schema:
    if kind.startswith("'"):
        return {"const": kind.strip("'")}
    if kind.endswith("?"):
        return _or_null(_schema_of_word(kind[:-1]))
    if kind.endswith("[]"):
        return {"type": "array", "items": _schema_of_word(kind[:-2])}
    return dict(_TYPES[kind]) if kind in _TYPES else _schema_of_type(_NAMED[kind])


def _schema_of_type(of: Any) -> Schema:
    origin, arguments = get_origin(of), get_args(of)
    if origin is Annotated:
        return _schema_of_type(arguments[0])
    if NoneType in arguments:
        return _or_null(_any_of([_schema_of_type(one) for one in arguments if one is not NoneType]))
    if origin in (tuple, list):
        return {"type": "array", "items": _schema_of_type(arguments[0])}
    if origin is not None and issubclass(origin, Mapping):
        values = _schema_of_type(arguments[1])
        return {"type": "object", **({"additionalProperties": values} if values else {})}
    if of is Any:
        return {}
    if origin is not None:
        return _any_of([_schema_of_type(one) for one in arguments])
    if issubclass(of, msgspec.Struct):
        return _object(list(_fields_of_type(of)))
    if issubclass(of, Enum):
        return {"type": "string"}  # later releases may add members
    return dict({str: _TYPES["str"], bool: _TYPES["bool"], int: _TYPES["int"], float: _NUMBER}[of])


def _object(fields: list[Field]) -> Schema:
    named = {field.name: field.schema for field in fields if field.name != "*"}
    others = [field.schema for field in fields if field.name == "*"]
    return {
        "type": "object",
        "properties": named,
        "required": [field.name for field in fields if field.required],
        **({"additionalProperties": others[0]} if others else {}),
    }


def _any_of(schemas: list[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _or_null(schema: Schema) -> Schema:
    return schema if schema == _NUMBER else {"anyOf": [schema, {"type": "null"}]}


def _told(schema: Schema) -> str:
    """A schema in the words of the page."""
    if schema in _TYPES.values():
        return next(kind for kind, one in _TYPES.items() if one == schema)
    if "const" in schema:
        return f"'{schema['const']}'"
    if "anyOf" in schema:
        first, *others = schema["anyOf"]
        return f"{_told(first)}?" if others == [{"type": "null"}] else "any"
    return f"{_told(schema['items'])}[]" if schema["type"] == "array" else "obj"
