"""Self-contained pieces of HTML: no scripts, no external resources, all text escaped."""

from collections.abc import Iterable, Sequence
from html import escape

from rolltape.records.wording import visible

# Backgrounds are tints and the text color is inherited, so that both light and dark notebooks show them well.
_STYLE = """
.rolltape{font-size:13px;line-height:1.5;max-width:1100px}
.rolltape *{box-sizing:border-box}
.rolltape .rt-title{font-weight:600}
.rolltape .rt-quiet{opacity:.7}
.rolltape .rt-mono,.rolltape .rt-text{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12px}
.rolltape .rt-text{white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:plaintext}
.rolltape .rt-box{border:1px solid rgba(128,128,128,.35);border-radius:6px;padding:8px 10px;margin:6px 0;
max-height:26em;overflow:auto}
.rolltape summary{cursor:pointer;font-weight:600;margin-top:6px}
.rolltape .rt-trained{background:rgba(64,150,220,.3)}
.rolltape .rt-trained:nth-of-type(even){background:rgba(64,150,220,.44)}
.rolltape .rt-masked{background:rgba(224,130,20,.34)}
.rolltape .rt-masked:nth-of-type(even){background:rgba(224,130,20,.48)}
.rolltape .rt-elsewhere{border-bottom:1.5px solid rgba(64,150,220,.9)}
.rolltape .rt-key{padding:0 6px;border-radius:3px;margin-right:8px}
.rolltape .rt-gap{display:inline-block;padding:0 8px;margin:2px 4px;border-radius:9px;
background:rgba(128,128,128,.22);font-style:italic}
.rolltape .rt-cause{padding:0 7px;border-radius:9px;background:rgba(224,130,20,.3);font-size:11.5px;white-space:nowrap}
.rolltape .rt-row{background:repeating-linear-gradient(90deg,rgba(128,128,128,.5) 0 2px,transparent 2px 18px) no-repeat}
.rolltape .rt-turn{border-left:2px solid rgba(128,128,128,.5);padding:1px 0 4px 10px}
.rolltape .rt-off{border-left-color:rgba(224,130,20,.8)}
.rolltape .rt-root{margin-top:8px}
.rolltape .rt-part{display:grid;grid-template-columns:7.5em minmax(0,1fr);column-gap:8px}
.rolltape .rt-block{border-top:1px solid rgba(128,128,128,.25);padding:5px 0}
.rolltape .rt-block:first-child{border-top:0}
.rolltape table.rt-rows{border-collapse:collapse;margin:4px 0}
.rolltape table.rt-rows td,.rolltape table.rt-rows th{padding:1px 10px 1px 0;text-align:left;background:none}
.rolltape table.rt-rows .rt-number{text-align:right;font-variant-numeric:tabular-nums}
""".replace("\n", "")


def framed(*parts: str) -> str:
    """The content of a cell: the parts with their shared styles."""
    return f'<div class="rolltape"><style>{_STYLE}</style>{"".join(parts)}</div>'


def text(value: str) -> str:
    """Escaped text. Characters that hide or reorder other text are made visible."""
    return escape(visible(value.replace("\r\n", "\n"), keep="\n\t"))


def clipped(value: str, longest: int = 2_000) -> str:
    """Escaped text for names, cut at `longest` characters."""
    return text(value if len(value) <= longest else f"{value[:longest]}…")


def div(kind: str, *parts: str, style: str = "") -> str:
    return f'<div class="rt-{kind}"{f" style={chr(34)}{style}{chr(34)}" if style else ""}>{"".join(parts)}</div>'


def span(kind: str, value: str, title: str = "") -> str:
    """A span of text with an optional title; both are escaped."""
    attribute = f' title="{text(title)}"' if title else ""
    return f'<span class="rt-{kind}"{attribute}>{text(value)}</span>'


def details(summary: str, *parts: str, opened: bool = True) -> str:
    """Parts that can be collapsed."""
    return f"<details{' open' if opened else ''}><summary>{text(summary)}</summary>{''.join(parts)}</details>"


def gap(what: str) -> str:
    """A label in place of content that is left out."""
    return f'<span class="rt-gap">{text(what)}</span>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[str]) -> str:
    """A table of texts. Columns are right-aligned, so that digits line up, unless they are named in `left`."""
    sides = ["" if name in left else ' class="rt-number"' for name in header]
    lines = ["".join(f"<th{side}>{text(cell)}</th>" for side, cell in zip(sides, header, strict=True))]
    lines += [
        "".join(f"<td{side}>{clipped(cell, 80)}</td>" for side, cell in zip(sides, row, strict=True)) for row in rows
    ]
    return f'<table class="rt-rows">{"".join(f"<tr>{line}</tr>" for line in lines)}</table>'
