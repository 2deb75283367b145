"""Write every generated page. `tests/docs/test_reference.py` fails while one of them is not current."""

from pathlib import Path

from reference_docs.pages import generated_pages

ROOT = Path(__file__).parents[1]


def main() -> None:
    for name, text in generated_pages().items():
        path = ROOT / "docs" / "reference" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
