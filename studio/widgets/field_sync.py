"""A question to the server whose answer may come late: it changes only fields that are still as they were when it was
asked.

The browser keeps what the fields held (`ask` in the page's script), hands the question a ticket, and compares when the
answer comes (`answer`). What was typed meanwhile stays; the fields that were changed are kept as if the user had typed
them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import gradio as gr

# How every event of the page is sent: no veil over what it changes, no queue behind a long one.
QUIET = {"show_progress": "hidden", "queue": False}

MOST_PAGES = 100  # open at the same time

SCRIPT = """
  // Questions and answers: see studio/widgets/field_sync.py.
  (() => {
    for (const kind of ["keydown", "input", "paste", "drop", "pointerdown"])
      document.addEventListener(kind, (event) => { if (event.isTrusted) window.loftTouched = true; }, true);
    window.loftTurn = 0;
    const tickets = new Map();
    const leave = {__type__: "update"};
    const isUpdate = (wish) => wish !== null && typeof wish === "object" && wish.__type__ === "update";
    let number = 0;
    window.loftTicket = (...fields) => {
      tickets.set(++number, fields.map((value) => JSON.stringify(value)));
      return [number];
    };
    window.loftAsk = (first) => (...values) => {
      const sent = values.slice(0, -1);
      return [...sent, ...window.loftTicket(...sent.slice(first))];
    };
    const judged = (answer, now) => {
      const sent = answer && tickets.get(answer.ticket);
      if (!sent) return {fields: now.map(() => leave)};
      tickets.delete(answer.ticket);
      let changed = false, stayed = false;
      const fields = now.map((value, i) => {
        const wish = answer.changes[i];
        if (isUpdate(wish) && !("value" in wish)) return wish;
        if (JSON.stringify(value) === sent[i]) {
          changed = true;
          return wish;
        }
        stayed = true;
        if (!isUpdate(wish)) return leave;
        const {value: late, ...rest} = wish;
        return rest;
      });
      return {fields, changed, stayed};
    };
    const mark = () => { window.loftMark = performance.timeOrigin + performance.now(); };
    window.loftAnswer = (answer, ...now) => {
      const {fields, changed} = judged(answer, now);
      if (changed) mark();
      return fields;
    };
    window.loftFill = (answer, ...now) => {
      const {fields, stayed} = judged(answer, now);
      if (stayed !== undefined) window.loftFilled = true;
      if (stayed) mark();
      return fields;
    };
    // Only now that every field has its value: an update of several properties takes a while.
    window.loftNudge = () => [window.loftMark ?? leave];
    window.loftReady = (forms) => () => [
      ...Array(forms).fill(window.loftFilled ? 1 : leave), ...Array(forms).fill(window.loftMark ?? leave),
    ];
  })();
"""


@dataclass(frozen=True)
class Keeping:
    """What says when a form is to be kept: `ready` once it is filled, `nudge` changes when an answer changed its
    fields."""

    ready: gr.Number
    nudge: gr.Number

    def keep(
        self, handler: Callable, fields: Sequence, head: Sequence, inputs: Sequence, outputs: Sequence, *more
    ) -> None:
        """Calls `handler(*head, *inputs)` whenever one of `fields` was edited or an answer (or one of the events
        `more`) changed it.

        One after the other, and never one that is older than what was kept from the same page. Not before the form is
        filled, and not by a page that nobody has touched: it would put back what was typed in another.
        """
        lock, turns = threading.Lock(), {}

        def kept(request: gr.Request, turn: float | None, *values):
            with lock:
                if not turn or turn < turns.get(request.session_hash, 0):
                    return unchanged(outputs)
                turns[request.session_hash] = turn
                while len(turns) > MOST_PAGES:
                    turns.pop(next(iter(turns)))
                return handler(*values)

        events = [*map(edited, fields), *more, self.nudge.change]
        js = "(ready, ...values) => [ready && window.loftTouched ? ++window.loftTurn : 0, ...values]"
        gr.on(events, kept, [self.ready, *head, *inputs], outputs, js=js, trigger_mode="always_last", **QUIET)


def edited(field) -> Callable:
    """The event of a field that the user edits. That of texts is `change`: their `input` comes with keys that print,
    not when text is pasted, deleted, dictated or composed from several keys."""
    return field.change if isinstance(field, gr.Textbox) else field.input


def keeping() -> Keeping:
    return Keeping(gr.Number(value=0, visible=False), gr.Number(visible=False))


def ask(
    trigger: Callable, handler: Callable, head: Sequence, fields: Sequence, outputs: Sequence, form: Keeping, **look
):
    """Binds `handler(*head, *fields) -> (changes, *outputs)`; `changes` has an update, a value or `gr.skip()` for each
    of `fields`.

    `form.nudge` changes where a field was changed: whoever keeps the form listens to it. Returns the event after which
    all is in place.
    """
    answer, asked = _asked(trigger, handler, head, fields, outputs, f"window.loftAsk({len(head)})", look)
    put = asked.then(None, [answer, *fields], list(fields), js="window.loftAnswer", show_progress="hidden")
    return put.then(None, None, form.nudge, js="window.loftNudge", show_progress="hidden")


def ask_at_first(
    trigger: Callable,
    handler: Callable,
    head: Sequence,
    fields: Sequence,
    outputs: Sequence,
    forms: Sequence[Keeping],
    *,
    js: str,
):
    """As `ask`, for the answer of `handler(*head)` that fills `forms` when the page is opened; `js` alters what is
    asked.

    They are ready then, and kept at once only where something was typed before. What the fields hold stays in the
    browser: it would note something of each of an event's inputs at every later event.
    """
    answer, ticket = gr.JSON(visible=False), gr.Number(visible=False)
    noted = trigger(None, list(fields), ticket, js="window.loftTicket", show_progress="hidden")
    asked = noted.then(_answering(handler, fields), [*head, ticket], [answer, *outputs], js=js, **QUIET)
    marks = [*(form.ready for form in forms), *(form.nudge for form in forms)]
    put = asked.then(None, [answer, *fields], list(fields), js="window.loftFill", show_progress="hidden")
    return put.then(None, None, marks, js=f"window.loftReady({len(forms)})", show_progress="hidden")


def _asked(
    trigger: Callable, handler: Callable, head: Sequence, fields: Sequence, outputs: Sequence, js: str, look: dict
):
    answer, ticket = gr.JSON(visible=False), gr.Number(visible=False)
    inputs = [*head, *fields, ticket]
    return answer, trigger(_answering(handler, fields), inputs, [answer, *outputs], js=js, **(QUIET | look))


def _answering(handler: Callable, fields: Sequence) -> Callable:
    """`handler` with the ticket, its last input, beside its changes."""

    @functools.wraps(handler)
    def asked(*values):
        *mine, number = values
        changes, *rest = handler(*mine)
        assert len(changes) == len(fields), handler
        return [{"ticket": number, "changes": list(changes)}, *rest]

    return asked


def unchanged(fields: Sequence) -> list:
    """No change to any of `fields`."""
    return [gr.skip()] * len(fields)
