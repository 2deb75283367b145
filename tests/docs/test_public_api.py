"""What `help(rolltape)` shows: every public name, with a docstring and an example that is Python."""

import ast
import inspect
import pydoc
import re
import subprocess
import sys
import textwrap
import warnings

import pytest

import rolltape

# A block of code in a docstring: indented lines after a blank one; or lines that call this package.
BLOCK = re.compile(r"(?:^|\n\n)((?:    .*(?:\n|$)|\n(?=    ))+)")
PUBLIC = [name for name in rolltape.__all__ if name != "__version__"]


def examples(text: str) -> list[str]:
    blocks = [textwrap.dedent(block) for block in BLOCK.findall(text)]
    return blocks or re.findall(r"^.*rolltape\..*\(.*$", text, re.MULTILINE)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_a_docstring_with_an_example(name: str) -> None:
    text = inspect.getdoc(getattr(rolltape, name)) or ""
    assert re.match(r"[A-Z].*[.:]", text.splitlines()[0])
    found = examples(text)
    assert found, "no example"
    for example in found:
        compile(example, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_help_lists_every_public_name_and_none_that_is_deprecated() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        shown = pydoc.plain(pydoc.render_doc(rolltape))
    assert shown.splitlines()[3].strip() == "rolltape - The flight recorder for LLM reinforcement learning."
    for name in PUBLIC:
        assert re.search(rf"\b{name}\b", shown), name
        assert (
            re.search(rf"\b{name}\b", rolltape.__doc__ or "")
            or name.endswith(("_to_jsonl", "_to_parquet"))
            or name.startswith("read_")
        ), f"{name} is not in the overview"


def test_importing_the_package_loads_none_of_its_parts() -> None:
    code = "import rolltape, sys; print(sorted(name for name in sys.modules if name.startswith('rolltape.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['rolltape.errors', 'rolltape.renamed']"


def test_the_version_is_that_of_the_package() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", rolltape.__version__)
