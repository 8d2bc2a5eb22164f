"use strict";
(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const readout = document.getElementById("readout");
  document.body.classList.add("scripted");

  // ---- pictures over time
  const sliders = [];
  for (const gallery of document.querySelectorAll("[data-gallery]")) {
    const slider = gallery.querySelector("input[type=range]");
    if (!slider) continue;
    const figures = [...gallery.querySelectorAll(".course figure")];
    const label = gallery.querySelector("output");
    const show = () => {
      const index = Number(slider.value) - 1;
      figures.forEach((figure, i) => {
        figure.classList.toggle("off", i !== index);
        if (i !== index) figure.querySelectorAll("video, audio").forEach((player) => player.pause());
      });
      label.textContent = "cycle " + figures[index].dataset.cycle;
      slider.setAttribute("aria-valuetext", label.textContent);
    };
    slider.addEventListener("input", show);
    show();
    sliders.push({ gallery, slider, show });
  }

  // The arrow keys move the pictures that are on the screen, whatever has the focus, unless a chart or a field uses them.
  document.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const busy = event.target.closest && event.target.closest("input, svg.chart, video, audio");
    if (!step || busy || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const seen = sliders.find(({ gallery }) => {
      const box = gallery.getBoundingClientRect();
      return box.bottom > 0 && box.top < window.innerHeight;
    });
    if (!seen) return;
    seen.slider.value = Number(seen.slider.value) + step;
    seen.show();
    event.preventDefault();
  });

  // ---- values under the pointer, or at the place that the arrow keys have moved to
  const number = (value) => (typeof value === "number" ? Number(value.toPrecision(6)).toString() : value.$float);
  const places = (chart) => [...new Set(chart.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const nearest = (xs, x) => xs.reduce((best, v) => (Math.abs(v - x) < Math.abs(best - x) ? v : best), xs[0]);

  for (const svg of document.querySelectorAll("svg.chart")) {
    const chart = data.charts[svg.id];
    const [x0, x1, left, right] = ["x0", "x1", "left", "right"].map((name) => Number(svg.dataset[name]));
    const xs = places(chart);
    const cursor = svg.querySelector(".cursor");
    let at = null;

    const hide = () => {
      at = null;
      readout.hidden = true;
      cursor.setAttribute("visibility", "hidden");
    };
    const showAt = (x) => {
      at = x;
      const place = left + ((x - x0) / (x1 - x0)) * (right - left);
      cursor.setAttribute("x1", place);
      cursor.setAttribute("x2", place);
      cursor.setAttribute("visibility", "visible");
      const rows = [chart.x_label + " " + x];
      for (const line of chart.lines) {
        const index = line.x.indexOf(x);
        if (index < 0) continue;
        const name = chart.lines.length > 1 ? line.name + ": " : "";
        const band = line.low && typeof line.low[index] === "number" ? " (" + number(line.low[index]) + " to " + number(line.high[index]) + ")" : "";
        rows.push(name + number(line.y[index]) + band);
      }
      readout.replaceChildren(...rows.map((text) => Object.assign(document.createElement("p"), { textContent: text })));
      readout.hidden = false;
      const box = svg.getBoundingClientRect();
      const shown = box.left + (place / svg.viewBox.baseVal.width) * box.width;
      const flip = shown + readout.offsetWidth + 24 > window.innerWidth;
      readout.style.left = Math.max(4, flip ? shown - readout.offsetWidth - 12 : shown + 12) + "px";
      readout.style.top = Math.max(4, box.top + 12) + "px";
    };

    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const px = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      showAt(nearest(xs, x0 + ((px - left) / (right - left)) * (x1 - x0)));
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) {
        if (event.key === "Escape") hide();
        return;
      }
      const index = at === null ? (step > 0 ? -1 : xs.length) : xs.indexOf(at);
      showAt(xs[Math.min(xs.length - 1, Math.max(0, index + step))]);
      event.preventDefault();
    });
  }
})();
