"""Tests of serializing cards for another process."""

import json

import pytest

from toolkit.gpu.catalogue import CATALOGUE
from toolkit.tune.cards import Card, find_card


@pytest.mark.parametrize("key", CATALOGUE)
def test_a_card_comes_back_from_plain_data(key):
    card = find_card(key)
    assert Card.from_plain(json.loads(json.dumps(card.to_plain()))) == card
