"use strict";
(() => {
  const panels = JSON.parse(document.getElementById("panels").textContent);
  const root = document.documentElement;
  const remembered = () => { try { return localStorage.getItem("mfwrap-theme"); } catch { return null; } };
  const remember = (theme) => { try { localStorage.setItem("mfwrap-theme", theme); } catch { /* browsers may refuse storage to a local file */ } };
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const plots = panels.map((panel) => document.getElementById(panel.name).querySelector(".plot"));
  const linked = plots.filter((_, i) => panels[i].has_steps);

  const colors = () => {
    const style = getComputedStyle(root);
    const of = (name) => style.getPropertyValue(name).trim();
    const axis = { gridcolor: of("--line"), zerolinecolor: of("--line"), linecolor: of("--line") };
    const flat = (prefix) => Object.fromEntries(Object.entries(axis).map(([k, v]) => [`${prefix}.${k}`, v]));
    return {
      paper_bgcolor: of("--paper"), plot_bgcolor: of("--paper"), "font.color": of("--ink"),
      "hoverlabel.bgcolor": of("--tile"), "hoverlabel.font.color": of("--ink"), ...flat("xaxis"), ...flat("yaxis"),
    };
  };
  const paint = (theme) => {
    root.dataset.theme = theme;
    return Promise.all(plots.map((plot) => Plotly.relayout(plot, colors())));
  };

  let moving = false;
  const follow = (source) => (change) => {
    if (moving) return;
    const range = change["xaxis.range[0]"] !== undefined
      ? { "xaxis.range": [change["xaxis.range[0]"], change["xaxis.range[1]"]] }
      : change["xaxis.range"] ? { "xaxis.range": change["xaxis.range"] }
      : change["xaxis.autorange"] ? { "xaxis.autorange": true } : null;
    if (!range) return;
    moving = true;
    Promise.all(linked.filter((p) => p !== source).map((p) => Plotly.relayout(p, range)))
      .finally(() => { moving = false; });
  };

  const show = (step, last) => {
    const width = Math.max(10, Math.round(Number(root.dataset.lastStep) * 0.03));
    const mark = { type: "line", x0: step, x1: step, yref: "paper", y0: 0, y1: 1,
                   name: "chosen", line: { color: "#c0392b", width: 1.5, dash: "dot" } };
    moving = true;
    Promise.all(linked.map((plot) => Plotly.relayout(plot, {
      "xaxis.range": [step - width, last + width],
      shapes: (plot.layout.shapes || []).filter((s) => s.name !== "chosen").concat([mark]),
    }))).finally(() => { moving = false; });
  };

  Promise.all(panels.map((panel, i) => Plotly.newPlot(
    plots[i], panel.figure.data, panel.figure.layout, { responsive: true, displaylogo: false },
  ))).then(() => {
    linked.forEach((plot) => plot.on("plotly_relayout", follow(plot)));
    return paint(remembered() || (system.matches ? "dark" : "light"));
  }).then(() => { root.dataset.ready = "true"; });

  system.addEventListener("change", (event) => { if (!remembered()) paint(event.matches ? "dark" : "light"); });
  document.getElementById("theme").addEventListener("click", () => {
    const theme = root.dataset.theme === "dark" ? "light" : "dark";
    remember(theme);
    paint(theme);
  });
  document.querySelectorAll("a[data-step]").forEach((link) => {
    link.addEventListener("click", () => show(Number(link.dataset.step), Number(link.dataset.last)));
  });
})();
