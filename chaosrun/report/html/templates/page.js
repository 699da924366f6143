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
