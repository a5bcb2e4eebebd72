"""How the studio is started."""

from __future__ import annotations

from studio import app
from studio.state import saved_forms


def test_a_public_address_without_a_login_is_refused(data, capsys):
    assert app.main(["--host", "0.0.0.0"]) == 2
    assert "--auth" in capsys.readouterr().err


def test_choices_of_an_older_version_are_completed():
    known = saved_forms.known_choices
    assert known(None) == known({}) == known(5) == known({"run": 5}) == saved_forms.CHOICES
    assert known({"run": "x", "gone": 1}) == saved_forms.CHOICES | {"run": "x"}
