// Draws the curves that the page carries as JSON: hover shows values, dragging zooms, boxes show and hide curves.
// Everything goes by keyboard, too: arrows move along the curves, + and - zoom, 0 shows all again.
"use strict";
(() => {
  const HEIGHT = 320;
  const WHOLE = Array.from({ length: 27 }, (_, n) => [1, 2, 5][n % 3] * 10 ** Math.floor(n / 3));  // steps are whole numbers
  const charts = JSON.parse(document.getElementById("curves").textContent);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function show(chart, figure) {
    const box = figure.querySelector(".chart"), said = figure.querySelector(".said");
    const hidden = new Set(), curves = chart.curves;
    let logarithmic = false, plot = null;

    function draw() {
      const range = plot && [plot.scales.x.min, plot.scales.x.max];
      if (plot) plot.destroy();
      const own = curves.filter((curve) => !curve.behind);
      const series = curves.map((curve, n) => ({
        label: curve.name,
        show: !hidden.has(n),
        stroke: curve.behind ? colour("--behind") : colour(`--curve-${own.indexOf(curve) % 4}`),
        width: curve.behind ? 1 : 2,
        dash: curve.behind ? [5, 4] : undefined,
        points: { show: curve.steps.length < 30 },
        value: (_, value) => (value == null ? "–" : value.toPrecision(4)),
      }));
      const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
      const positive = (value) => (logarithmic && value !== null && value <= 0 ? null : value);
      plot = new uPlot(
        {
          width: box.clientWidth,
          height: HEIGHT,
          scales: { x: { time: false }, y: { distr: logarithmic ? 3 : 1 } },
          axes: [{ ...axis, label: "step", labelSize: 20, incrs: WHOLE }, { ...axis, size: 64 }],
          series: [{ label: "step" }, ...series],
          cursor: { drag: { x: true, y: false } },
        },
        uPlot.join(curves.map((curve) => [curve.steps, curve.values.map(positive)])),
        box,
      );
      if (range && range[0] != null) plot.setScale("x", { min: range[0], max: range[1] });
    }

    function choice(text, checked, change) {
      const label = document.createElement("label"), input = document.createElement("input");
      input.type = "checkbox";
      input.checked = checked;
      input.addEventListener("change", () => change(input.checked));
      label.append(input, text);
      figure.querySelector("fieldset").append(label);
    }
    curves.forEach((curve, n) =>
      choice(curve.name, true, (checked) => {
        checked ? hidden.delete(n) : hidden.add(n);
        plot.setSeries(n + 1, { show: checked });
      }),
    );
    choice("logarithmic", false, (checked) => {
      logarithmic = checked;
      draw();
    });

    function zoom(factor) {
      const { min, max } = plot.scales.x, at = plot.cursor.idx == null ? (min + max) / 2 : plot.data[0][plot.cursor.idx];
      plot.setScale("x", { min: at - (at - min) * factor, max: at + (max - at) * factor });
    }

    function move(by) {
      const steps = plot.data[0], before = plot.cursor.idx == null ? (by > 0 ? -1 : steps.length) : plot.cursor.idx;
      const n = Math.min(Math.max(before + by, 0), steps.length - 1);
      plot.setCursor({ left: plot.valToPos(steps[n], "x"), top: HEIGHT / 2 });
      const values = curves.map((curve, k) => [curve.name, plot.data[k + 1][n], hidden.has(k)]);
      const known = values.filter(([, value, away]) => value != null && !away);
      said.textContent = `step ${steps[n]}: ` + known.map(([name, value]) => `${name} ${value.toPrecision(4)}`).join(", ");
    }

    box.addEventListener("keydown", (event) => {
      const far = event.shiftKey ? Math.max(1, Math.round(plot.data[0].length / 20)) : 1;
      const whole = { min: plot.data[0][0], max: plot.data[0].at(-1) };
      const keys = {
        ArrowRight: () => move(far), ArrowLeft: () => move(-far), Home: () => move(-1e9), End: () => move(1e9),
        "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => plot.setScale("x", whole),
      };
      if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
      keys[event.key]();
      event.preventDefault();
    });
    draw();
    new ResizeObserver(() => plot.setSize({ width: box.clientWidth, height: HEIGHT })).observe(box);
    for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", draw);
  }

  charts.forEach((chart, n) => show(chart, document.getElementById(`chart-${n}`)));
})();
