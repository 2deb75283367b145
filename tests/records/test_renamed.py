"""Public names of the release before still work, and warn."""

import importlib

import pytest


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("rolltape", "Room", "RunAheadLimit"),
        ("rolltape.groups", "Room", "RunAheadLimit"),
        ("rolltape.errors", "SupplyError", "GroupsError"),
        ("rolltape.errors", "CaptureError", "GatewayError"),
        ("rolltape.tracking", "Delivery", "DeliveryReport"),
    ],
)
def test_an_old_name_gives_the_new_thing_with_a_warning(module: str, old: str, new: str) -> None:
    home = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{module}.{old} is deprecated; use {new}"):
        assert getattr(home, old) is getattr(home, new)
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = home.nothing_of_that_name
