"""Which models are given pictures to edit, and how many: told before anything is loaded."""

from __future__ import annotations

from backend.catalog.family import EditRule, Family
from backend.catalog.spec import ModelSpec
from backend.schema.messages import Trouble


def edits(spec: ModelSpec, family: Family) -> bool:
    """Whether the model is one that is given pictures to edit."""
    return spec.variant in family.EDITS


def check(spec: ModelSpec, family: Family, num_pictures: int, *, must: bool = True) -> None:
    """Raises Trouble where the model cannot take so many pictures to edit, or (`must`) wants one and has none."""
    rule = family.EDITS.get(spec.variant)
    if not num_pictures:
        if must and rule is not None and rule.must:
            raise Trouble(
                "bad_value",
                f"{spec.title} changes a picture, and none was given.",
                hint="Add one under “Pictures to edit”, or choose a model that draws from words alone.",
            )
        return
    if rule is None:
        raise Trouble(
            "bad_value",
            f"{spec.title} draws from words alone; it edits no pictures.",
            hint=family.EDIT_HINT,
        )
    check_count(f"{num_pictures} were given", num_pictures, rule, title=spec.title)


def check_count(given: str, count: int, rule: EditRule, *, title: str) -> None:
    """Raises Trouble where `count` pictures, of which `given` says where they come from, are more than the variant of
    `rule` works from."""
    if rule.most is not None and count > rule.most:
        most = "one picture" if rule.most == 1 else f"up to {rule.most} pictures"
        raise Trouble(
            "bad_value", f"{title} works from {most}, and {given}.", hint=rule.hint or f"Give no more than {rule.most}."
        )
