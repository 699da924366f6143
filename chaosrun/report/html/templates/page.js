"use strict";
(() => {
  // Copy buttons.
  for (const button of document.querySelectorAll("button[data-copy]")) {
    const code = button.parentElement.querySelector("code");
    const text = button.textContent;
    button.addEventListener("click", async () => {
      let done = true;
      try {
        await navigator.clipboard.writeText(code.textContent);
      } catch {
        const range = document.createRange();
        range.selectNodeContents(code);
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        done = document.execCommand("copy");
      }
      button.textContent = done ? "Copied" : "Press Ctrl+C";
      setTimeout(() => { button.textContent = text; }, 2000);
    });
  }

  // Tips: what a mark's label says, where it is pointed at or focused.
  const tip = document.getElementById("tip");
  let told = null;
  const show = (mark) => {
    told = mark;
    tip.textContent = mark.getAttribute("aria-label");
    tip.hidden = false;
    const at = mark.getBoundingClientRect();
    const own = tip.getBoundingClientRect();
    const left = Math.min(Math.max(at.left + at.width / 2 - own.width / 2, 8), innerWidth - own.width - 8);
    const above = at.top - own.height - 10;
    tip.style.left = `${Math.max(left, 8)}px`;
    tip.style.top = `${above > 4 ? above : at.bottom + 10}px`;
  };
  const hide = () => { told = null; tip.hidden = true; };
  for (const mark of document.querySelectorAll(".mark")) {
    mark.addEventListener("pointerenter", () => show(mark));
    mark.addEventListener("pointerleave", hide);
    mark.addEventListener("focus", () => show(mark));
    mark.addEventListener("blur", hide);
  }
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  addEventListener("scroll", () => { if (told) show(told); }, { passive: true, capture: true });

  // A figure's marks are one stop of the Tab key; the arrows go from mark to mark.
  for (const group of document.querySelectorAll("[data-marks]")) {
    const marks = [...group.querySelectorAll(".mark")];
    group.addEventListener("keydown", (event) => {
      const now = marks.indexOf(document.activeElement);
      const to = { ArrowRight: now + 1, ArrowDown: now + 1, ArrowLeft: now - 1, ArrowUp: now - 1, Home: 0, End: marks.length - 1 }[event.key];
      if (now < 0 || to === undefined || !marks[to]) return;
      event.preventDefault();
      marks[now].setAttribute("tabindex", "-1");
      marks[to].setAttribute("tabindex", "0");
      marks[to].focus();
    });
  }

  // On paper nothing is folded.
  const opened = [];
  const unfold = () => {
    for (const details of document.querySelectorAll("details:not([open])")) { details.open = true; opened.push(details); }
  };
  const fold = () => { for (const details of opened.splice(0)) details.open = false; };
  addEventListener("beforeprint", unfold);
  addEventListener("afterprint", fold);
  matchMedia("print").addEventListener("change", (media) => (media.matches ? unfold() : fold()));
})();
