"""How the studio is started."""

from __future__ import annotations

from studio import app


def test_a_public_address_without_a_login_is_refused(data, capsys):
    assert app.main(["--host", "0.0.0.0"]) == 2
    assert "--auth" in capsys.readouterr().err


def test_choices_of_an_older_version_are_completed():
    assert app._whole(None) == app._whole({}) == app.saved_forms.CHOICES
    assert app._whole({"run": "x", "gone": 1}) == app.saved_forms.CHOICES | {"run": "x"}
