"""How the page looks: Gradio's theme variables, the one stylesheet, and the few lines of script in the page's head."""

from __future__ import annotations

from pathlib import Path

import gradio as gr
from gradio.themes.utils import colors, sizes

from backend.schema.paths import ASSETS
from studio.widgets.field_sync import SCRIPT

STYLESHEET: Path = ASSETS / "style.css"

INK = colors.Color(
    name="ink",
    c50="#eef1fb",
    c100="#dfe4f7",
    c200="#c3ccf0",
    c300="#9dabe5",
    c400="#7687d8",
    c500="#5467c9",
    c600="#4152b3",
    c700="#364492",
    c800="#2f3a77",
    c900="#2a3363",
    c950="#1b2040",
)
SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif")
MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "Liberation Mono", "monospace")

# The wish is kept by the browser too, so that a dark page does not flash white while it loads.
HEAD = (
    """
<script>
  window.loftTheme = (wish) => {
    if (wish) localStorage.setItem("loft-theme", wish);
    const kept = localStorage.getItem("loft-theme") || "system";
    const dark = kept === "dark" || (kept === "system" && matchMedia("(prefers-color-scheme: dark)").matches);
    if (document.body) document.body.classList.toggle("dark", dark);
    document.documentElement.style.colorScheme = dark ? "dark" : "light";
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => window.loftTheme());
  window.loftTheme();
  // Folds that were open are opened again. A fold is known by its own title and those around it.
  (() => {
    const kept = () => JSON.parse(localStorage.getItem("loft-folds") || "{}");
    const name = (button) => {
      const titles = [];
      for (let at = button; at; at = at.parentElement.closest(".block")?.parentElement?.closest(".block")?.querySelector(":scope > button.label-wrap"))
        titles.unshift(at.textContent.trim().replace(/\\W+$/, ""));
      return titles.join("/");
    };
    document.addEventListener("click", (event) => {
      const button = event.target.closest("button.label-wrap");
      if (button) setTimeout(() => {
        localStorage.setItem("loft-folds", JSON.stringify({...kept(), [name(button)]: button.classList.contains("open")}));
      }, 200);
    });
    new MutationObserver(() => {
      for (const button of document.querySelectorAll("button.label-wrap:not([data-seen])")) {
        button.dataset.seen = "1";
        if (!kept()[name(button)]) continue;
        const reopen = () => { if (button.isConnected && !button.classList.contains("open")) button.click(); };
        setTimeout(reopen, 400);  // a button answers only some time after it is there
        setTimeout(reopen, 2000);
      }
    }).observe(document.documentElement, {childList: true, subtree: true});
  })();
  // A studio that was stopped is told in a line; one that was started anew is loaded again.
  (() => {
    const line = document.createElement("div");
    line.id = "away";
    line.setAttribute("role", "status");
    line.textContent = "The studio does not answer. If it was stopped, start it again: this page comes back by itself.";
    const look = async () => {
      if (window.gradio_config) await ask();
      setTimeout(look, window.loftStudio && !line.isConnected ? 3000 : 700);
    };
    const ask = async () => {
      try {
        const answer = await fetch(window.gradio_config.root.replace(/\\/$/, "") + "/gradio_api/app_id", {cache: "no-store"});
        if (answer.status === 401) return location.reload();  // the studio asks for the token or a login again
        const id = (await answer.json()).app_id;
        line.remove();
        if (window.loftStudio && id !== window.loftStudio) location.reload();
        window.loftStudio = id;
      } catch {
        document.body.append(line);
      }
    };
    look();
  })();
  // The tab that is looked at; a reload comes back to it.
  window.loftTab = () => {
    const open = document.querySelector("[role=tabpanel][id^=tab-]:not([style*='display: none'])");
    if (open) localStorage.setItem("loft-tab", open.id.slice(4));
    return localStorage.getItem("loft-tab") || "generate";
  };
"""
    + SCRIPT
    + "</script>\n"
)
APPLY_THEME = "(wish) => { window.loftTheme(wish); }"
LOOK = "(...inputs) => [...inputs.slice(0, -1), window.loftTab()]"
REMEMBER = "(choice, tab, ...fields) => [choice, localStorage.getItem('loft-tab') || 'generate', ...fields]"


def theme() -> gr.themes.Base:
    """Light and dark, one accent colour, the system's own fonts: nothing is fetched from elsewhere."""
    base = gr.themes.Base(
        primary_hue=INK,
        secondary_hue=INK,
        neutral_hue=colors.zinc,
        spacing_size=sizes.spacing_md,
        radius_size=sizes.radius_md,
        text_size=sizes.text_md,
        font=SANS,
        font_mono=MONO,
    )
    return base.set(
        body_background_fill="#f7f7f8",
        body_background_fill_dark="#131316",
        block_background_fill="white",
        block_background_fill_dark="#1c1c20",
        block_border_color="#e6e6ea",
        block_border_color_dark="#2c2c33",
        block_shadow="none",
        block_shadow_dark="none",
        block_label_background_fill="transparent",
        block_label_background_fill_dark="transparent",
        block_label_border_width="0px",
        block_label_text_color="*neutral_600",
        block_label_text_color_dark="*neutral_400",
        block_label_text_weight="500",
        block_title_text_weight="500",
        block_title_text_color="*neutral_700",
        block_title_text_color_dark="*neutral_300",
        block_info_text_color="*neutral_500",
        block_info_text_color_dark="*neutral_400",
        border_color_primary="#dcdce2",
        border_color_primary_dark="#34343c",
        input_background_fill="white",
        input_background_fill_dark="#131316",
        input_border_width="1px",
        input_border_width_dark="1px",
        input_border_color="#dcdce2",
        input_border_color_dark="#34343c",
        input_shadow="none",
        input_shadow_focus="0 0 0 3px *primary_100",
        input_shadow_focus_dark="0 0 0 3px *primary_900",
        panel_background_fill="transparent",
        panel_background_fill_dark="transparent",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_primary_background_fill_dark="*primary_500",
        button_primary_background_fill_hover_dark="*primary_400",
        button_primary_text_color="white",
        button_primary_text_color_dark="white",
        button_primary_shadow="none",
        button_primary_shadow_hover="none",
        button_secondary_background_fill="white",
        button_secondary_background_fill_dark="#26262c",
        button_secondary_background_fill_hover="#f0f0f3",
        button_secondary_background_fill_hover_dark="#30303a",
        button_secondary_border_color="#dcdce2",
        button_secondary_border_color_dark="#34343c",
        button_cancel_background_fill="white",
        button_cancel_background_fill_dark="#26262c",
        button_cancel_background_fill_hover="#fdecec",
        button_cancel_background_fill_hover_dark="#3a2226",
        button_cancel_text_color="#b42318",
        button_cancel_text_color_dark="#f2a19a",
        button_cancel_border_color="#e7c4c0",
        button_cancel_border_color_dark="#57343a",
        button_border_width="1px",
        slider_color="*primary_500",
        slider_color_dark="*primary_400",
        checkbox_background_color_selected="*primary_600",
        checkbox_background_color_selected_dark="*primary_500",
        layout_gap="12px",
        block_padding="10px 12px",
    )
