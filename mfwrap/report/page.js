"use strict";
(async () => {
  const root = document.documentElement;
  if (typeof DecompressionStream === "undefined") {
    document.getElementById("old").style.display = "block";
    return;
  }
  const unpacked = (id) => {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  const program = document.createElement("script");
  program.textContent = await unpacked("plotly");
  document.head.append(program);
  const { runs, panels, spans, colors } = JSON.parse(await unpacked("data"));

  // ---- What the reader has chosen. It survives a reload, as of a page that follows a run.

  const KEY = `mfwrap-page ${location.pathname}`;
  // Browsers may refuse storage to a local file, and to a page within a notebook.
  const attempt = (action) => { try { return action(); } catch { return null; } };
  const saved = JSON.parse(attempt(() => sessionStorage.getItem(KEY)) || "{}");
  const state = {
    x: "step", smoothing: 0.03, weights: "both", range: null, chosen: null, log: {}, choice: {}, hidden: [], ...saved,
  };
  const hasAxis = (name) => name === "step" || runs.some((run) => run.axes[name]);
  if (!hasAxis(state.x)) state.x = "step";
  state.hidden = state.hidden.filter((number) => number < runs.length);
  const remember = () => attempt(() => sessionStorage.setItem(KEY, JSON.stringify({ ...state, scroll: scrollY })));
  const isHidden = (run) => state.hidden.includes(run);

  // ---- The horizontal axis: steps, tokens or time.

  const TIMES = [["s", 1], ["min", 60], ["h", 3600], ["days", 86400]];
  const longest = Math.max(0, ...runs.map((run) => (run.axes.seconds ? run.axes.seconds.y.at(-1) : 0)));
  const [unitOfTime, secondsOfUnit] = TIMES.findLast(([, seconds]) => longest >= 3 * seconds) || TIMES[0];
  const AXES = {
    step: { title: "step", divisor: 1 },
    tokens: { title: "tokens", divisor: 1 },
    seconds: { title: `time of training (${unitOfTime})`, divisor: secondsOfUnit },
  };

  /** Return a function from a step of a run to its place on the horizontal axis. */
  const along = (run) => {
    if (state.x === "step") return (step) => step;
    const axis = runs[run].axes[state.x];
    if (!axis) return () => null;
    const xs = [0, ...axis.x], ys = [0, ...axis.y], { divisor } = AXES[state.x];
    return (step) => {
      let low = 0, high = xs.length - 1;
      if (step >= xs[high]) return ys[high] / divisor;
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (xs[middle] <= step) low = middle; else high = middle;
      }
      const share = (step - xs[low]) / (xs[high] - xs[low] || 1);
      return (ys[low] + share * (ys[high] - ys[low])) / divisor;
    };
  };

  const wholeRange = () => {
    const ends = runs.flatMap((run, i) => (isHidden(i) ? [] : [along(i)(run.first), along(i)(run.last)]));
    const known = ends.filter((end) => end !== null);
    if (!known.length) return [0, 1];
    const low = Math.min(...known), high = Math.max(...known);
    const margin = 0.01 * (high - low) + (state.x === "step" ? 0.5 : 0.01 * high);
    return [low - margin, high + margin];
  };

  // ---- Curves.

  /** Return means over a centered window; near an end it shrinks on both sides. curves.py does the same. */
  const smoothed = (y, share) => {
    const reach = Math.max(1, Math.round((share * y.length) / 2));
    return y.map((_, i) => {
      const near = Math.min(reach, i, y.length - 1 - i);
      // Not by differences of running sums: after a loss of 1e30 they have no digit left.
      let sum = 0, count = 0;
      for (let j = i - near; j <= i + near; j += 1) if (y[j] !== null) { sum += y[j]; count += 1; }
      return count ? sum / count : null;
    });
  };

  const style = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const isNarrow = () => innerWidth <= 640;
  const hasMaps = panels.some((panel) => panel.kind === "map");
  const leftMargin = () => (isNarrow() ? (hasMaps ? 78 : 64) : hasMaps ? 132 : 72);
  const MARKS = { circle: "●", "diamond-open": "◇", "x-thin": "✕", x: "✕" };

  const chosenOf = (panel) => {
    const wanted = state.choice[panel.name] ?? panel.start ?? 0;
    const is = (number) => panel.kind !== "map" || !isHidden(panel.maps[number].run);
    if (is(wanted) && wanted < (panel.choices || []).length) return wanted;
    return Math.max(0, (panel.choices || []).findIndex((_, number) => is(number)));
  };

  const curves = (panel) => {
    const choice = chosenOf(panel), data = [], legend = [];
    for (const trace of panel.traces) {
      if (isHidden(trace.run) || (trace.choice ?? choice) !== choice) continue;
      if (trace.weights && state.weights !== "both" && trace.weights !== state.weights) continue;
      const color = trace.color === undefined ? runs[trace.run].color : colors[trace.color % colors.length];
      const at = along(trace.run);
      const common = { name: trace.name, type: "scatter", hovertemplate: "%{y:.5g}", x: trace.x.map(at), y: trace.y };
      const isAverage = trace.weights === "averaged";
      if (trace.symbol) {
        const marker = { symbol: trace.symbol, color, size: 9, line: { width: 2, color } };
        data.push({ ...common, mode: "markers", marker });
        legend.push([trace.name, color, MARKS[trace.symbol]]);
      } else {
        const isSmoothed = trace.smooth && state.smoothing > 0 && trace.x.length > 8;
        const line = { color, width: isSmoothed ? 1 : 2, shape: trace.shape || "linear", dash: isAverage ? "dot" : "solid" };
        const mode = trace.x.length === 1 ? "markers" : trace.marks ? "lines+markers" : "lines";
        data.push({ ...common, mode, line, marker: { color }, opacity: isSmoothed ? 0.4 : 1 });
        legend.push([trace.name, color, isAverage ? "┅" : ""]);
        if (isSmoothed) {
          const mean = trace.means || trace;
          data.push({
            ...common, name: `${trace.name}, smoothed`, mode: "lines", line: { color, width: 2 },
            x: mean.x.map(at), y: smoothed(mean.y, state.smoothing),
          });
        }
      }
      if (trace.bad) {
        const every = Math.ceil(trace.bad.length / 400);
        const steps = trace.bad.filter((_, i) => i % every === 0);
        const name = runs.length > 1 ? `${trace.name}: not finite` : "not finite";
        data.push({
          name, type: "scatter", mode: "markers", x: steps.map(at), y: steps.map(() => 0.97), yaxis: "y2",
          hovertemplate: "NaN or infinite", marker: { symbol: "x", size: 9, color: style("--bad") },
        });
        legend.push([name, style("--bad"), "✕"]);
      }
    }
    return { data, legend };
  };

  const isLog = (panel) => (panel.may_log ? state.log[panel.name] ?? panel.log : panel.log);

  /** Return ticks at 1, 2 and 5 of each decade with their whole numbers; plotly would write a 5 for 50. */
  const twoAndFive = (low, high) => {
    const tickvals = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += 1) {
      tickvals.push(...[1, 2, 5].map((digit) => Number(`${digit}e${e}`)));
    }
    return { tickvals, ticktext: tickvals.map((value) => (value >= 1e5 || value < 1e-3 ? value.toExponential() : String(value))) };
  };

  /** Return the ticks of a vertical axis, chosen so that labels never touch. */
  const ticks = (panel, data) => {
    if (panel.ticks) {
      return { tickvals: panel.ticks.map((e) => 2 ** e), ticktext: panel.ticks.map((e) => `2<sup>${e}</sup>`) };
    }
    let low = Infinity, high = -Infinity;
    for (const { y, yaxis } of data) {
      if (yaxis === "y2") continue;
      for (const value of y) {
        if (value === null || (isLog(panel) && value <= 0)) continue;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
    if (low > high) return {};
    if (low === high) {
      // Plotly would show a constant on an axis from one below it to one above it.
      const reach = Math.abs(low) || 1;
      return isLog(panel) ? {} : { range: [low - reach / 2, high + reach / 2] };
    }
    if (!isLog(panel)) return {};
    const decades = Math.log10(high / low);
    if (decades < 0.5) return { nticks: 6 };
    if (decades < 1.5) return twoAndFive(low, high);
    return { dtick: Math.max(1, Math.ceil(decades / 7)) };
  };

  const frame = (height) => ({
    template: "none", height, showlegend: false,
    margin: { l: leftMargin(), r: 14, t: 8, b: 42 },
    font: { family: "system-ui, sans-serif", size: 12, color: style("--ink") },
    paper_bgcolor: style("--paper"), plot_bgcolor: style("--paper"),
    hoverlabel: { bgcolor: style("--tile"), font: { color: style("--ink") } },
  });
  const axis = () => ({ gridcolor: style("--line"), zerolinecolor: style("--line"), linecolor: style("--line") });
  const horizontal = () => ({
    ...axis(), title: { text: AXES[state.x].title, standoff: 6 }, range: state.range || wholeRange(),
    exponentformat: "SI", nticks: isNarrow() ? 5 : 0,
  });

  /** Return the episodes of some runs as spans on the horizontal axis, with the number of the run. */
  const placed = (ofRuns) => spans.filter(([run]) => ofRuns(run)).flatMap(([run, first, last]) => {
    const at = along(run), [x0, x1] = [at(Math.max(0, first - 0.5)), at(last + 0.5)];
    return x0 === null ? [] : [{ run, x0, x1 }];
  });

  const chosenStep = () => {
    if (!state.chosen) return [];
    const x = along(state.chosen.run)(state.chosen.step);
    return [{ type: "line", name: "chosen", x0: x, x1: x, yref: "paper", y0: 0, y1: 1,
              line: { color: style("--bad"), width: 1.5, dash: "dot" } }];
  };

  const marks = () => {
    const shapes = placed((run) => !isHidden(run)).map(({ run, x0, x1 }) => {
      const color = runs.length > 1 ? runs[run].color : style("--bad");
      return { type: "rect", name: "episode", x0, x1, yref: "paper", y0: 0, y1: 1, fillcolor: color, opacity: 0.22,
               line: { color, width: 1 }, layer: "below" };
    });
    return [...shapes, ...chosenStep()];
  };

  /** Frame the episodes of a run; a filled span would change the colors of a map. */
  const framed = (run) => [...placed((one) => one === run).map(({ x0, x1 }) => ({
    type: "rect", name: "episode", x0, x1, yref: "paper", y0: 0, y1: 1, line: { color: style("--bad"), width: 1.5 },
  })), ...chosenStep()];

  const drawCurves = (panel, section) => {
    const { data, legend } = curves(panel), choice = chosenOf(panel);
    const limits = (panel.limits || []).filter((limit) => !isHidden(limit.run));
    const told = limits.filter(({ text }, i) => limits.findIndex((other) => other.text === text) === i);
    const type = isLog(panel) ? "log" : "linear";
    const layout = {
      ...frame(isNarrow() ? 250 : 310), hovermode: "x unified", xaxis: horizontal(),
      yaxis: { ...axis(), type, exponentformat: "power", zeroline: false, ...ticks(panel, data) },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
      shapes: [...marks(), ...limits.map(({ run, y }) => ({
        type: "line", name: "limit", xref: "paper", x0: 0, x1: 1, y0: y, y1: y,
        line: { dash: "dash", width: 1.5, color: runs[run].color },
      }))],
      annotations: told.map(({ y, text }, i) => ({
        text, xref: "paper", x: 0.005 + 0.25 * i, xanchor: "left", y: type === "log" ? Math.log10(y) : y, yanchor: "bottom",
        showarrow: false, bgcolor: style("--paper"), opacity: 0.9, font: { size: 11 },
      })),
    };
    section.querySelector(".unit").textContent = panel.units ? panel.units[choice] : panel.unit || "";
    const list = section.querySelector(".legend");
    list.replaceChildren(...legend.map(([name, color, mark]) => {
      const entry = document.createElement("span");
      entry.textContent = name;
      entry.style.setProperty("--color", color);
      if (mark) entry.dataset.mark = mark;
      return entry;
    }));
    return [data, layout];
  };

  // ---- Maps.

  /** Shorten the names of rows: leave out what all begin and end with, and the middle. */
  const shortened = (rows, length) => {
    const words = rows.map((row) => row.split("."));
    // A head is often outside of the model that holds all other layers.
    const inner = words.filter((each) => each.length > 1);
    const shortest = Math.min(...inner.map((each) => each.length));
    const isShared = (place) => inner.length > 1 && inner.every((each) => each.at(place) === inner[0].at(place));
    let start = 0, end = 0;
    while (start < shortest - 1 && isShared(start)) start += 1;
    while (end < shortest - 1 - start && isShared(-1 - end)) end += 1;
    const names = words.map((each) => (each.length > 1 ? each.slice(start, each.length - end) : each).join("."));
    const cut = (name, keepsEnd) => {
      if (name.length <= length) return name;
      // The number of the layer tells long names apart, so the words before it go first.
      const inLayer = name.replace(/^\D+\.(?=\d+\.)/, "");
      if (inLayer.length <= length) return inLayer;
      const head = /^\d+\./.exec(inLayer)?.[0] || inLayer.slice(0, keepsEnd ? Math.floor(length / 3) : 0);
      if (keepsEnd) return `${head}…${inLayer.slice(head.length + 1 - length).replace(/^\./, "")}`;
      return `${head}${inLayer.slice(head.length).split(".").at(-1).slice(0, length - head.length - 1)}…`;
    };
    const labels = names.map((name) => cut(name, true));
    const times = new Map();
    for (const one of labels) times.set(one, (times.get(one) || 0) + 1);
    // Where the ends are the same, as of two kinds of norms, the beginnings of the last words differ.
    return labels.map((one, i) => (times.get(one) > 1 ? cut(names[i], false) : one));
  };
  const escaped = (text) => text.replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);

  /** Return the decades of several maps, so that a color means the same in all runs that are shown. */
  const rangeOf = (maps) => {
    let low = Infinity, high = -Infinity;
    for (const { z } of maps) for (const row of z) for (const value of row) {
      if (value === null) continue;
      low = Math.min(low, value / 1000);
      high = Math.max(high, value / 1000);
    }
    return [Math.floor(low), Math.max(Math.floor(low) + 1, Math.ceil(high))];
  };

  const drawMap = (panel, section) => {
    const isRanks = panel.kind === "ranks";
    const place = isRanks ? Math.min(state.choice[panel.name] ?? Infinity, panel.maps.length - 1) : chosenOf(panel);
    const map = panel.maps[place], at = along(map.run);
    const x = isRanks ? map.x : map.x.map(at), rows = map.rows.map((_, i) => i);
    const z = map.z.map((row) => row.map((value) => (value === null ? null : value / 1000)));
    const bad = z.map((row) => row.map(() => null));
    map.bad.forEach(([row, column]) => { bad[row][column] = 1; });
    const [low, high] = rangeOf(isRanks ? [map] : panel.maps.filter(({ run, family }) => family === map.family && !isHidden(run)));
    const every = Math.max(1, Math.ceil((high - low) / (isNarrow() ? 4 : 8)));
    const powers = Array.from({ length: Math.floor((high - low) / every) + 1 }, (_, i) => low + i * every);
    const names = map.rows.map((row) => rows.map(() => escaped(row)));
    const text = z.map((row, i) => row.map((value) => `${escaped(map.rows[i])}: ${value === null ? "" : Number((10 ** value).toPrecision(3))}`));
    const data = [
      { type: "heatmap", x, y: rows, z, text, hovertemplate: `%{text}<extra>${isRanks ? "%{x}" : `${AXES[state.x].title} %{x}`}</extra>`,
        colorscale: "Viridis", zmin: low, zmax: high, hoverongaps: false,
        colorbar: { orientation: "h", x: 1, xanchor: "right", y: 1, yanchor: "bottom", len: isNarrow() ? 0.8 : 0.4, thickness: 8,
                    tickvals: powers, ticktext: powers.map((e) => `10<sup>${e}</sup>`), outlinewidth: 0, ypad: 2 } },
      { type: "heatmap", x, y: rows, z: bad, showscale: false, hoverongaps: false, zmin: 0, zmax: 1,
        colorscale: [[0, style("--bad")], [1, style("--bad")]],
        text: names, hovertemplate: `%{text}: NaN or infinite<extra></extra>` },
    ];
    const height = Math.min(900, Math.max(190, 100 + (isNarrow() ? 13 : 17) * rows.length));
    const skip = Math.ceil((12 * rows.length) / (height - 92));
    const labels = shortened(map.rows, isNarrow() ? 10 : 19);
    const layout = {
      ...frame(height),
      xaxis: isRanks ? { ...axis(), type: "category" } : horizontal(),
      yaxis: { ...axis(), autorange: "reversed", tickfont: { size: 10 }, showgrid: false, zeroline: false,
               tickvals: rows.filter((i) => i % skip === 0), ticktext: labels.filter((_, i) => i % skip === 0).map(escaped) },
      shapes: isRanks ? [] : framed(map.run),
    };
    layout.margin.t = 44;
    const slider = section.querySelector("input[type=range]");
    if (slider) {
      slider.value = place;
      section.querySelector("output").textContent = `step ${map.name}`;
    }
    return [data, layout];
  };

  // ---- The page.

  const sections = panels.map((panel) => document.getElementById(panel.name));
  const plots = sections.map((section) => section.querySelector(".plot"));
  const config = {
    responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
  };
  let isMoving = false;
  const isLinked = (panel) => panel.kind !== "ranks";

  const draw = async (i) => {
    const panel = panels[i];
    const [data, layout] = (panel.kind === "curves" ? drawCurves : drawMap)(panel, sections[i]);
    await Plotly.react(plots[i], data, layout, config);
  };
  const drawAll = async () => {
    isMoving = true;
    for (let i = 0; i < panels.length; i += 1) await draw(i);
    isMoving = false;
    remember();
  };

  const move = async (range, source = null) => {
    if (isMoving) return;
    isMoving = true;
    state.range = range;
    const change = { "xaxis.range": range || wholeRange() };
    await Promise.all(plots.filter((plot, i) => isLinked(panels[i]) && (plot !== source || !range))
      .map((plot) => Plotly.relayout(plot, { ...change })));
    isMoving = false;
    remember();
  };
  const follow = (source) => (change) => {
    const ends = change["xaxis.range"] || [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (change["xaxis.autorange"]) move(null);
    else if (ends[0] !== undefined) move([...ends], source);
  };

  const fill = (select, entries, value, choose) => {
    select.replaceChildren(...entries.map(([key, words, hidden]) => {
      const option = new Option(words, key);
      option.hidden = option.disabled = Boolean(hidden);
      return option;
    }));
    select.value = String(value);
    select.onchange = () => choose(select.value);
  };

  const menus = () => panels.forEach((panel, i) => {
    const menu = sections[i].querySelector(".menu");
    menu.replaceChildren();
    if (panel.kind === "ranks") {
      const slider = document.createElement("input"), shown = document.createElement("output");
      Object.assign(slider, { type: "range", min: 0, max: panel.maps.length - 1, ariaLabel: "step" });
      slider.oninput = () => { state.choice[panel.name] = Number(slider.value); draw(i); };
      menu.append(slider, shown);
    } else if ((panel.choices || []).length > 1) {
      const select = document.createElement("select");
      select.ariaLabel = `what ${panel.title} shows`;
      const entries = panel.choices.map((words, number) => [number, words, panel.kind === "map" && isHidden(panel.maps[number].run)]);
      fill(select, entries, chosenOf(panel), (value) => { state.choice[panel.name] = Number(value); draw(i).then(remember); });
      menu.append(select);
    }
    if (panel.may_log) {
      const label = document.createElement("label"), box = document.createElement("input");
      Object.assign(box, { type: "checkbox", checked: isLog(panel) });
      box.onchange = () => { state.log[panel.name] = box.checked; draw(i).then(remember); };
      label.append(box, " log axis");
      menu.append(label);
    }
  });

  document.querySelectorAll("button.run").forEach((button, run) => {
    const show = () => button.setAttribute("aria-pressed", String(!isHidden(run)));
    button.addEventListener("click", () => {
      state.hidden = isHidden(run) ? state.hidden.filter((one) => one !== run) : [...state.hidden, run];
      show();
      menus();
      drawAll();
    });
    show();
  });
  const control = (name, entries, choose) => {
    const select = document.querySelector(`select[name=${name}]`);
    if (!select) return;
    fill(select, entries, state[name], choose);
    if (select.selectedIndex < 0) select.selectedIndex = 0;
  };
  control("x", Object.entries({ step: "step", tokens: "tokens", seconds: "time" }).filter(([key]) => hasAxis(key)), (value) => {
    Object.assign(state, { x: value, range: null });
    drawAll();
  });
  control("smoothing", [[0, "none"], [0.01, "light"], [0.03, "medium"], [0.1, "strong"]], (value) => {
    state.smoothing = Number(value);
    drawAll();
  });
  control("weights", [["both", "raw and averaged"], ["raw", "raw"], ["averaged", "averaged"]], (value) => {
    state.weights = value;
    drawAll();
  });
  document.getElementById("whole").addEventListener("click", () => { state.chosen = null; state.range = null; drawAll(); });

  document.querySelectorAll("a[data-step]").forEach((link) => link.addEventListener("click", () => {
    const [run, step, last] = ["run", "step", "last"].map((name) => Number(link.dataset[name]));
    state.hidden = state.hidden.filter((one) => one !== run);
    document.querySelectorAll("button.run")[run]?.setAttribute("aria-pressed", "true");
    state.chosen = { run, step };
    const [low, high] = wholeRange(), at = along(run);
    const margin = Math.max((high - low) * 0.03, (at(last) - at(step)) / 3, state.x === "step" ? 10 : 0);
    state.range = [Math.max(low, at(step) - margin), Math.min(high, at(last) + margin)];
    drawAll();
  }));

  const system = matchMedia("(prefers-color-scheme: dark)");
  const theme = () => attempt(() => localStorage.getItem("mfwrap-theme")) || (system.matches ? "dark" : "light");
  root.dataset.theme = theme();
  system.addEventListener("change", () => { root.dataset.theme = theme(); drawAll(); });
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
    attempt(() => localStorage.setItem("mfwrap-theme", root.dataset.theme));
    drawAll();
  });
  let wasNarrow = isNarrow();
  addEventListener("resize", () => { if (wasNarrow !== isNarrow()) { wasNarrow = isNarrow(); drawAll(); } });

  menus();
  await drawAll();
  plots.forEach((plot, i) => { if (isLinked(panels[i])) plot.on("plotly_relayout", follow(plot)); });
  if (saved.scroll) scrollTo(0, saved.scroll);
  addEventListener("pagehide", remember);
  root.dataset.ready = "true";

  const seconds = Number(root.dataset.watch || 0);
  if (seconds) setTimeout(() => { remember(); location.reload(); }, 1000 * seconds);
})();
