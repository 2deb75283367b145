"""How a table gives way to a narrow terminal."""

from rolltape.cli.screen import FittedTable, fit_columns

COLUMNS = ["rollout", "try", "task", "turns"]
ROWS = [["857bc8a1", "0", "fix the parser of the tables", "8"], ["1f3d7f7f", "10", "日本語のタスク", "1,204"]]


def table(width: int | None) -> FittedTable:
    return fit_columns(COLUMNS, ROWS, left=["rollout", "task"], flexible=["task"], spare=["try"], width=width)


def test_off_a_terminal_nothing_is_cut() -> None:
    assert table(None) == (
        [
            "rollout   try  task                          turns",
            "857bc8a1    0  fix the parser of the tables      8",
            "1f3d7f7f   10  日本語のタスク                1,204",
        ],
        [],
    )


def test_long_text_gives_way_first() -> None:
    assert table(34) == (
        [
            "rollout   try  task          turns",
            "857bc8a1    0  fix the par…      8",
            "1f3d7f7f   10  日本語のタ…   1,204",
        ],
        [],
    )


def test_then_spare_columns_go() -> None:
    assert table(24) == (
        ["rollout   task     turns", "857bc8a1  fix th…      8", "1f3d7f7f  日本語…  1,204"],
        ["try"],
    )


def test_then_those_on_the_right_and_the_first_stays_whole() -> None:
    assert table(18).left_out == ["try", "turns"]
    assert table(5) == (["rollout", "857bc8a1", "1f3d7f7f"], ["try", "task", "turns"])


def test_columns_of_one_name_are_no_trouble() -> None:
    assert fit_columns(["a", "a"], [["1", "2"]], left=[], flexible=[], spare=[], width=3).lines == ["a", "1"]


def test_two_long_columns_share_the_room() -> None:
    lines = fit_columns(
        ["a", "b"], [["x" * 50, "y" * 40]], left=["a", "b"], flexible=["a", "b"], spare=[], width=22
    ).lines
    assert lines[1] == "xxxxxxxxx…  yyyyyyyyy…"
