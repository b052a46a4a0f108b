"""How many layers a text means."""

import pytest

from bayeslora.errors import InputError
from bayeslora.layer_ranges import check_depth, upper_layers


@pytest.mark.parametrize(
    "text, count", [("all", 30), ("last:1", 1), ("last:30", 30), ("0.5", 15), ("1.0", 30), ("0.01", 1), ("0.26", 8)]
)
def test_upper_layers(text, count):
    check_depth(text, "layers")
    assert upper_layers(text, 30) == count


@pytest.mark.parametrize(
    "text", ["", "last", "last:", "last:0", "last:-1", "last:1.5", "0", "1.01", "nan", "-0.5", "4", "half"]
)
def test_what_is_no_depth(text):
    with pytest.raises(InputError) as error:
        check_depth(text, "draw_layers")
    assert str(error.value).startswith(
        f"draw_layers is {text!r}; give 'all', 'last:K' with K of at least 1, or a fraction"
    )


def test_more_layers_than_there_are():
    with pytest.raises(InputError, match=r"^layers is 'last:31', but the model has 30 layers; give at most last:30$"):
        upper_layers("last:31", 30)
