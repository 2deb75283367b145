"""Command lines that the help of each command shows."""

_ENGINE = "sglang:http://gpu1:30000"

EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": ("rolltape demo", "rolltape demo --tasks tasks"),
    "collect": (
        "rolltape collect tasks.jsonl --run runs/exp1 --group-size 8",
        "rolltape collect tasks.jsonl --run runs/exp1 --group-size 8 --resume",
    ),
    "serve": ("rolltape serve runs/exp1", f"rolltape serve runs/exp1 --engine {_ENGINE} --model Qwen3-8B"),
    "status": ("rolltape status runs/exp1",),
    "import": ("rolltape import --guess traces.jsonl", "rolltape import verifiers traces.jsonl runs/imported"),
    "doctor": ("rolltape doctor --engine tiny", f"rolltape doctor --engine {_ENGINE} --model Qwen3-8B"),
    "engine": ("rolltape engine --port 30000",),
    "view": ("rolltape view runs/exp1 runs/exp2", "rolltape view runs/exp1 --static pages"),
    "ls": ("rolltape ls runs/exp1 --step 3", "rolltape ls runs/exp1 --json | jq .reward"),
    "compare": (
        "rolltape compare runs/exp1 runs/exp2 --limit 10",
        "rolltape compare runs/exp1 runs/exp1 --a-step 0 --b-step 10-19",
    ),
    "show": ("rolltape show runs/exp1 4f2a91", "rolltape show runs/exp1 4f2a91 --part tokens --color-by logprob"),
    "tree": ("rolltape tree runs/exp1 4f2a91",),
    "trace": ("rolltape trace runs/exp1 4f2a91", "rolltape trace runs/exp1 4f2a91 --json | jq .steps"),
    "query": ("rolltape query runs/exp1 'SELECT step, avg(reward) FROM rollouts GROUP BY 1'",),
    "push": ("rolltape push runs/exp1 --to wandb:PROJECT --follow",),
    "score": ("rolltape score runs/exp1 4f2a91 0.5 --by judge", "rolltape score runs/exp1 --from rewards.jsonl"),
    "filter": ("rolltape filter runs/exp1 --no-spread --dry-run", "rolltape filter runs/exp1 --undo"),
    "tag": ("rolltape tag runs/exp1 4f2a91 bookmark", "rolltape tag runs/exp1"),
    "note": ("rolltape note runs/exp1 4f2a91 'calls the wrong tool' --turn 0.1", "rolltape note runs/exp1"),
    "samples": ("rolltape samples runs/exp1 --step 3", "rolltape samples runs/exp1 --compare keep-head"),
    "ledger": ("rolltape ledger runs/exp1", "rolltape ledger runs/exp1 4f2a91 --turns"),
    "export": (
        "rolltape export runs/exp1 -o samples.parquet",
        "rolltape export runs/exp1 --format slime -o samples.jsonl",
    ),
    "tokens": ("rolltape tokens runs/exp1 summary", "rolltape tokens runs/exp1 check --step 3"),
    "check": ("rolltape check runs/exp1",),
    "seal": ("rolltape seal runs/exp1", "rolltape seal runs/exp1 --to s3://bucket/exp1"),
    "prune": ("rolltape prune runs/exp1 --before-step 100 --dry-run",),
}
