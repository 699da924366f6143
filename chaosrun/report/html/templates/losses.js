"use strict";
(() => {
  // Which step is told: pointed at, or gone to with the arrow keys.
  const points = JSON.parse(document.getElementById("points").textContent);
  const stage = document.getElementById("steps");
  const readout = document.getElementById("readout");
  const plots = ["curves", "ulps"].map((id) => document.getElementById(id)).filter(Boolean);
  const low = points[0][0], high = points[points.length - 1][0];
  const lines = plots.map((plot) => {
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    line.setAttribute("class", "cross");
    line.setAttribute("y1", "0");
    line.setAttribute("y2", String(plot.height.baseVal.value - 26));
    line.style.display = "none";
    plot.append(line);
    return line;
  });
  let now = -1;
  const number = (value) => (value === null ? "none" : typeof value === "number" ? String(+value.toPrecision(9)) : value);
  const show = (index) => {
    now = index;
    const [step, reference, chaos, ulp, times] = points[index];
    const at = high > low ? `${(100 * (step - low)) / (high - low)}%` : "50%";
    for (const line of lines) { line.setAttribute("x1", at); line.setAttribute("x2", at); line.style.display = ""; }
    const again = times > 1 ? `; done ${times} times, counted once` : "";
    const apart = ulp === null ? "" : ulp === 0 ? "; the same to the last bit" : typeof ulp === "number" ? `; ${ulp} ULP apart` : `; ${ulp} on one side`;
    readout.textContent = `Step ${step}: undisturbed ${number(reference)}, under faults ${number(chaos)}${apart}${again}`;
    stage.setAttribute("aria-valuenow", String(step));
    stage.setAttribute("aria-valuetext", readout.textContent);
  };
  const nearest = (step) => {
    let left = 0, right = points.length - 1;
    while (left < right) { const middle = (left + right) >> 1; if (points[middle][0] < step) left = middle + 1; else right = middle; }
    return left > 0 && step - points[left - 1][0] < points[left][0] - step ? left - 1 : left;
  };
  for (const plot of plots) {
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      show(nearest(low + ((event.clientX - box.left) / box.width) * (high - low)));
    });
  }
  stage.addEventListener("focus", () => { if (now < 0) show(0); });
  stage.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.round(points.length / 10));
    const to = { ArrowRight: now + 1, ArrowUp: now + 1, ArrowLeft: now - 1, ArrowDown: now - 1, PageUp: now + page, PageDown: now - page, Home: 0, End: points.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(Math.min(Math.max(to, 0), points.length - 1));
  });
})();
