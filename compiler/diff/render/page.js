"use strict";
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const SAME = 0, CHANGED = 1, REMOVED = 2, ADDED = 3, MOVED = 4, REPLACED = 5;
  const HEIGHT = 22;

  const make = (tag, attributes = {}, ...children) => {
    const e = document.createElement(tag);
    for (const [k, v] of Object.entries(attributes)) {
      if (k.startsWith("on")) e.addEventListener(k.slice(2), v);
      else if (k === "style") e.style.cssText = v;
      else if (v !== null && v !== undefined && v !== false) e.setAttribute(k, v === true ? "" : v);
    }
    e.append(...children.filter((c) => c !== null && c !== undefined && c !== ""));
    return e;
  };
  // Redrawing replaces the focused element: focus its successor, so that the keyboard stays where it was.
  const keepFocus = (box, key, redraw) => {
    const focused = document.activeElement, name = focused && box.contains(focused) ? focused.dataset[key] : undefined;
    redraw();
    if (name !== undefined) [...box.querySelectorAll(`[data-${key}]`)].find((e) => e.dataset[key] === name)?.focus({ preventScroll: true });
  };
  // The attributes of an element that a click, Enter or Space activates.
  const pressed = (act) => ({ role: "button", tabindex: "0", onclick: act,
    onkeydown: (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); act(); } } });
  const us = (x) => (x === null || x === undefined ? "" : (Math.abs(x) < 100 ? x.toFixed(1) : Math.round(x).toLocaleString("en")) + " us");
  const bytes = (x) => {
    if (x === null || x === undefined) return "";
    const units = ["B", "KiB", "MiB", "GiB"];
    let k = 0;
    while (x >= 1024 && k < 3) { x /= 1024; k += 1; }
    return `${x < 10 && k ? x.toFixed(1) : Math.round(x)} ${units[k]}`;
  };
  const brief = (dtype) => dtype.replace("bfloat", "bf").replace(/^float(?=\d)/, "f").replace(/^int(?=\d)/, "i");

  // ---- the data, unpacked: nodes are created on first use

  const graphs = DATA.graphs.map((g) => {
    const side = (s) => {
      const columns = s.columns, texts = s.texts, op = columns.indexOf("op");
      const users = [];
      const node = (i) => {
        const row = s.nodes[i], n = { place: i, name: row[0], inputs: row[1] };
        for (let k = 2; k < columns.length; k += 1) n[columns[k]] = texts[row[k]];
        return n;
      };
      const readers = (i) => {
        if (!users.length) {
          for (let k = 0; k < s.nodes.length; k += 1) users.push([]);
          s.nodes.forEach((row, k) => new Set(row[1]).forEach((p) => users[p].push(k)));
        }
        return users[i];
      };
      const call = (n) => {
        let k = 0;
        const said = n.args.replace(/%/g, () => (k < n.inputs.length ? s.nodes[n.inputs[k++]][0] : "%"));
        return n.op === "call_function" ? `${n.target.replace(/\.default$/, "").replace(/^_c10d_functional\./, "c10d.")}(${said})` : n.op === "output" ? said : n.args || n.op;
      };
      const isInput = (i) => texts[s.nodes[i][op]] === "placeholder";
      return { size: s.nodes.length, label: s.label, torch: s.torch, node, call, readers, isInput };
    };
    const sites = DATA.sites.filter((d) => d.plan === g.plan && g.phase !== "joint");
    return { ...g, before: side(g.before), after: side(g.after), sites, bySite: new Map(sites.map((d) => [d.id, d])) };
  });
  if (!graphs.length && DATA.sites.length) {
    const nothing = { size: 0, label: "", torch: "", node: () => null, call: () => "", readers: () => [] };
    for (const plan of new Set(DATA.sites.map((d) => d.plan))) {
      const sites = DATA.sites.filter((d) => d.plan === plan), phase = sites[0].phase;
      graphs.push({ name: `${phase} ${plan}`, phase, plan, counts: "no snapshots were stored", before: nothing, after: nothing,
        rows: [], edits: [], sites, bySite: new Map(sites.map((d) => [d.id, d])) });
    }
  }
  // Diffs of graphs without decisions have only edits: they are listed like sites.
  for (const g of graphs) {
    if (g.sites.length) continue;
    g.sites = g.edits.map((e, k) => ({ id: e.site || `edit ${k + 1}`, kind: e.title, module: e.module, source: e.source, line: e.line, edit: k, strategy: "", phase: g.phase }));
    g.bySite = new Map(g.sites.map((d) => [d.id, d]));
  }

  const group = (d) => (d.edit !== undefined ? "other" : d.outcome);
  const NAMES = { ...DATA.outcomes, other: "edit" };
  const colour = (d) => `--c: var(--${group(d)})`;
  const gain = (d) => (!d.gain_us ? "" : d.gain_us > 0 ? `saves ${us(d.gain_us)}` : `costs ${us(-d.gain_us)}`);
  const outcome = (d) => (d.edit !== undefined ? "" : d.reason ? `${d.reason.replace(/_/g, " ")}` : d.strategy);

  // ---- state

  const state = { graph: -1, site: null, node: null, filter: "all", query: "", only: false, inputs: false, shown: [] };
  const now = () => graphs[state.graph];

  // ---- rows

  const textOf = (g, row) => {
    const parts = [];
    for (const [side, i] of [[g.before, row[0]], [g.after, row[1]]]) {
      if (i < 0) continue;
      const n = side.node(i);
      parts.push(n.name, n.target, n.module, n.source, n.site, n.shape, n.dtype);
    }
    return parts.join(" ").toLowerCase();
  };
  const siteOf = (g, row) => {
    const after = row[1] >= 0 ? g.after.node(row[1]).site : "";
    return after || (row[0] >= 0 ? g.before.node(row[0]).site : "");
  };

  // An input of the graph that the rewrite left as it was.
  const isInput = (g, row) => (row[2] === SAME || row[2] === MOVED) && (row[0] >= 0 ? g.before.isInput(row[0]) : g.after.isInput(row[1]));

  const refilter = () => {
    const g = now();
    if (!g) return;
    const words = state.query.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = [];
    g.rows.forEach((row, k) => {
      if (state.only && (row[2] === SAME || row[2] === MOVED) && !siteOf(g, row)) return;
      if (words.length) {
        const text = textOf(g, row);
        if (!words.every((w) => text.includes(w))) return;
      } else if (!state.inputs && isInput(g, row)) return;
      shown.push(k);
    });
    state.shown = shown;
    $("space").style.height = `${shown.length * HEIGHT}px`;
    draw();
    status();
  };

  const cell = (g, side, i, kind, site) => {
    if (i < 0) return make("div", { class: "cell" });
    const n = side.node(i), d = site && g.bySite.get(site);
    const looks = { [REMOVED]: "gone", [ADDED]: "came", [REPLACED]: side === g.before ? "gone" : "came", [CHANGED]: "other", [MOVED]: "moved" };
    const signs = { gone: "\u2212", came: "+", other: "~", moved: side === g.before ? "\u2193" : "\u2191" };
    const look = looks[kind] || "";
    return make("div", { class: `cell full ${look}`, style: d ? colour(d) : "", title: `${n.source}\n${n.module}`.trim() },
      make("span", { class: "sign" }, signs[look] || ""), make("span", { class: "name" }, n.name),
      make("span", { class: "call" }, side.call(n)), make("span", { class: "value" }, `${n.shape} ${brief(n.dtype)}`.trim()));
  };

  const draw = () => {
    const g = now(), list = $("list"), box = $("rows");
    if (!g) return;
    const first = Math.max(0, Math.floor(list.scrollTop / HEIGHT) - 8);
    const last = Math.min(state.shown.length, Math.ceil((list.scrollTop + list.clientHeight) / HEIGHT) + 8);
    box.style.transform = `translateY(${first * HEIGHT}px)`;
    const out = [];
    for (let k = first; k < last; k += 1) {
      const row = g.rows[state.shown[k]], site = siteOf(g, row), here = state.node;
      const marked = state.site && site === state.site;
      const d = marked && g.bySite.get(site);
      const at = here && ((here.side === "before" && row[0] === here.place) || (here.side === "after" && row[1] === here.place));
      out.push(make("div", { class: `row${marked ? " site" : ""}${at ? " here" : ""}${state.query ? " hit" : ""}`, "data-row": state.shown[k],
        style: d ? colour(d) : "" }, cell(g, g.before, row[0], row[2], site), cell(g, g.after, row[1], row[2], site)));
    }
    box.replaceChildren(...out);
  };

  const status = () => {
    const g = now();
    const only = make("input", { type: "checkbox", id: "only", onchange: (e) => { state.only = e.target.checked; refilter(); } });
    only.checked = state.only;
    const inputs = make("input", { type: "checkbox", id: "inputs", onchange: (e) => { state.inputs = e.target.checked; refilter(); } });
    inputs.checked = state.inputs;
    $("status").replaceChildren(
      make("label", {}, only, " only sites and differences (d)"), make("label", {}, inputs, " inputs (i)"), make("span", { class: "grow" }),
      `${state.shown.length.toLocaleString("en")} of ${g.rows.length.toLocaleString("en")} rows`);
  };

  const reveal = (side, i) => {
    const g = now(), column = side === "before" ? 0 : 1;
    const find = () => state.shown.findIndex((k) => g.rows[k][column] === i);
    let k = find();
    if (k < 0) {
      state.query = $("search").value = "";
      state.only = false;
      state.inputs = true;
      refilter();
      k = find();
    }
    if (k < 0) return;
    const list = $("list");
    list.scrollTop = Math.max(0, (k - 4) * HEIGHT);
    draw();
  };

  // ---- sites

  const visible = () => {
    const words = state.query.toLowerCase().split(/\s+/).filter(Boolean);
    return now().sites.filter((d) => {
      const text = [d.id, d.kind, d.module, d.source, d.strategy, d.reason, d.detail].join(" ").toLowerCase();
      const inside = state.filter === "all" || group(d) === state.filter;
      return inside && words.every((w) => text.includes(w));
    });
  };

  const drawSites = () => {
    const g = now(), counts = { all: g.sites.length };
    g.sites.forEach((d) => { counts[group(d)] = (counts[group(d)] || 0) + 1; });
    keepFocus($("filters"), "filter", () => $("filters").replaceChildren(...Object.entries({ all: "all", ...NAMES })
      .filter(([k]) => counts[k]).map(([k, name]) => make("button", { "aria-pressed": String(state.filter === k), "data-filter": k,
        style: k === "all" ? "" : `color: var(--${k})`, onclick: () => { state.filter = k; drawSites(); } }, `${name} ${counts[k]}`))));
    const found = visible();
    keepFocus($("sites"), "site", () => $("sites").replaceChildren(...(found.length ? found.map((d) => make("li", {}, make("button", {
      "data-site": d.id, "aria-current": String(d.id === state.site), "aria-controls": "detail", style: colour(d), onclick: () => open(d.id),
    }, make("span", { class: "stripe" }), make("span", { class: "id" }, d.id),
    make("span", { class: "gain" }, gain(d)),
    make("span", { class: "kind", title: d.kind }, [d.kind, d.module].filter(Boolean).join("  \u00b7  ")),
    make("span", { class: "what", title: d.detail || "" }, outcome(d) || d.line)))) : [make("li", { class: "none" }, "no sites")])));
  };

  // ---- detail

  const row = (name, value) => (value === "" || value === null || value === undefined ? null
    : make("tr", {}, make("th", {}, name), make("td", {}, value)));

  const MOST = 300;  // lines of a list: an edit may be as long as the graph
  const more = (all) => (all.length > MOST ? make("p", { class: "none" }, `and ${(all.length - MOST).toLocaleString("en")} more`) : null);
  const nodes = (side, places, look) => make("ul", { class: "nodes" }, ...places.slice(0, MOST).map((i) => {
    const n = now()[side].node(i);
    return make("li", { class: look, title: n.source, ...pressed(() => { state.node = { side, place: i }; reveal(side, i); }) },
      `${n.name} `, make("small", {}, `${now()[side].call(n)} ${n.shape}`));
  }), more(places));

  const open = (id) => {
    const g = now(), d = g.bySite.get(id);
    if (!d) return;
    state.site = id;
    state.node = null;
    const k = d.edit !== undefined ? d.edit : g.edits.findIndex((e) => e.site === id), edit = g.edits[k];
    const parts = [
      make("h2", { style: colour(d) }, make("a", { href: `#site-${g.plan}/${id}`, title: "Link to this site" }, make("code", {}, id)), make("span", { class: "tag" }, outcome(d) || NAMES[group(d)]),
        make("button", { class: "close", title: "Close (Esc)", onclick: shut }, "\u2715")),
      make("p", {}, edit ? edit.title : d.kind), d.detail ? make("p", {}, d.detail) : null,
      d.source ? make("h3", {}, "Where") : null, d.source ? make("pre", {}, d.source) : null,
      make("table", {}, row("module", d.module), row("group", d.group ? `${d.group}, ${d.ranks} ranks` : ""), row("dtype", d.dtype),
        row("bytes sent", bytes(d.bytes)), row("options", (d.options || []).join(", ")), row("executed", d.executed),
        row("transport", d.transport), row("calls", d.calls),
        row("bytes copied", d.bytes_copied ? `${bytes(d.bytes_copied)}${d.bytes_overlapped === null ? "" : `, ${Math.round(100 * d.bytes_overlapped / d.bytes_copied)}% concurrent with a matmul`}` : ""),
        row("error", d.error === null || d.error === undefined ? "" : String(d.error))),
    ];
    if (d.shapes && Object.keys(d.shapes).length) {
      parts.push(make("h3", {}, "Shapes"), make("table", {}, ...Object.entries(d.shapes).map(([k, v]) => row(k, make("code", {}, v)))));
    }
    parts.push(...predictions(d), ...schedule(d));
    if (edit) {
      if (edit.removed.length) parts.push(make("h3", {}, "Before"), nodes("before", edit.removed, "gone"));
      if (edit.added.length) parts.push(make("h3", {}, "After"), nodes("after", edit.added, "came"));
      if (edit.changed.length) {
        parts.push(make("h3", {}, "Changed"), make("table", {}, ...edit.changed.slice(0, MOST).flatMap(([, j, fields]) => fields.map(([f, old, fresh]) =>
          row(`${g.after.node(j).name} ${f}`, make("code", {}, `${old} \u2192 ${fresh}`))))), more(edit.changed));
      }
    } else {
      const mine = [];
      for (let i = 0; i < g.before.size; i += 1) if (g.before.node(i).site === id) mine.push(i);
      if (mine.length) parts.push(make("h3", {}, "Unchanged"), nodes("before", mine, ""));
    }
    show(parts, `Site ${id}`);
    drawSites();
    currentSite()?.scrollIntoView({ block: "nearest" });
    if (edit) {
      const side = edit.removed.length ? "before" : "after";
      const at = edit.removed[0] ?? edit.added[0] ?? (edit.changed[0] || [])[1];
      if (at !== undefined) reveal(side, at);
    } else {
      for (let i = 0; i < g.before.size; i += 1) if (g.before.node(i).site === id) { reveal("before", i); break; }
    }
    draw();
  };

  const predictions = (d) => {
    const times = d.predicted_us && typeof d.predicted_us === "object" ? Object.entries(d.predicted_us) : [];
    if (!times.length) return [];
    const most = Math.max(...times.map(([, t]) => t), d.measured_us || 0);
    const line = (name, t, chosen) => make("tr", { class: chosen ? "chosen" : "", style: colour(d) }, make("td", { style: "white-space:nowrap;width:1%" }, name),
      make("td", { class: "num" }, us(t)), make("td", {}, make("div", { class: "bar", style: `width:${Math.max(1, 100 * t / most)}%` })));
    return [make("h3", {}, "Predicted"), make("table", {},
      ...times.map(([name, t]) => line(name + (name === d.best ? " \u2605" : ""), t, name === d.choice)),
      d.measured_us ? line("measured", d.measured_us, false) : null),
    make("p", { style: "color:var(--soft)" }, `matmuls ${us(d.matmul_us)}, communication ${us(d.communication_us)}${d.choice_reason && !(d.detail || "").startsWith(d.choice_reason.slice(0, 12)) ? `; ${d.choice_reason}` : ""}; \u2605 chosen${times.some(([, t]) => t < (d.predicted_us[d.best] ?? t)) ? ": within the error of the smallest" : ""}, bold: decided`)];
  };

  const SVG = "http://www.w3.org/2000/svg";
  const svg = (tag, attributes, ...children) => {
    const e = document.createElementNS(SVG, tag);
    for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
    e.append(...children);
    return e;
  };
  const schedule = (d) => {
    const lanes = DATA.lanes[`${d.plan}/${d.id}`] || [];
    if (!lanes.length) return [];
    const most = Math.max(...lanes.flatMap((l) => l.steps.map((s) => s[3])), 1e-9), width = 400, left = 58;
    const x = (t) => left + (width - left - 4) * t / most;
    const height = lanes.length * 58 + 16, out = svg("svg", { class: "lanes", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "schedule" });
    for (let k = 0; k <= 4; k += 1) {
      const t = most * k / 4;
      out.append(svg("line", { class: "grid", x1: x(t), x2: x(t), y1: 0, y2: height - 14 }),
        svg("text", { x: x(t), y: height - 3, "text-anchor": k === 4 ? "end" : "middle" }, k ? us(t) : "0"));
    }
    lanes.forEach((lane, k) => {
      const top = k * 58;
      out.append(svg("text", { x: left, y: top + 10 }, `${lane.what}: ${us(lane.us)}`));
      ["COMPUTE", "COPY"].forEach((queue, q) => {
        const y = top + 14 + q * 19;
        out.append(svg("rect", { class: "lane", x: left, y, width: width - left - 4, height: 16, rx: 2 }), svg("text", { x: 0, y: y + 12 }, queue.toLowerCase()));
        lane.steps.filter((s) => s[0] === queue).forEach(([, text, begin, end, kind]) => {
          out.append(svg("rect", { x: x(begin), y: y + 1, width: Math.max(0.8, x(end) - x(begin) - 0.4), height: 14, rx: 1.5, fill: `var(--${kind})` },
            svg("title", {}, `${text}: ${us(begin)} to ${us(end)}`)));
        });
      });
    });
    return [make("h3", {}, "Schedule"), out, make("div", { class: "legend" }, ...Object.entries(DATA.step_kinds).map(([k, name]) =>
      make("span", {}, make("i", { style: `background:var(--${k})` }), name)))];
  };

  const openNode = (side, i) => {
    const g = now(), n = g[side].node(i);
    state.node = { side, place: i };
    if (n.site && g.bySite.has(n.site)) { state.site = n.site; drawSites(); }
    const jump = (places) => make("span", {}, ...places.slice(0, 40).flatMap((p) => [make("a", { href: "#", onclick: (e) => {
      e.preventDefault(); openNode(side, p); reveal(side, p); } }, g[side].node(p).name), " "]));
    show([make("h2", {}, make("code", {}, n.name), make("button", { class: "close", title: "Close (Esc)", onclick: shut }, "\u2715")),
      make("pre", {}, g[side].call(n)),
      make("table", {}, row("side", side), row("shape", n.shape), row("stride", n.stride), row("dtype", n.dtype), row("module", n.module),
        row("site", n.site && g.bySite.has(n.site) ? make("a", { href: "#", onclick: (e) => { e.preventDefault(); open(n.site); } }, n.site) : n.site),
        row("derived from", n.origin), row("reads", n.inputs.length ? jump([...new Set(n.inputs)]) : ""), row("read by", g[side].readers(i).length ? jump(g[side].readers(i)) : "")),
      n.source ? make("h3", {}, "Where") : null, n.source ? make("pre", {}, n.source) : null], `Node ${n.name}`);
    draw();
  };

  const currentSite = () => document.querySelector("#sites [aria-current=true]");
  const show = (parts, label) => {
    const box = $("detail");
    box.setAttribute("aria-label", label);
    box.replaceChildren(...parts.filter(Boolean));
    box.hidden = false;
    box.scrollTop = 0;
    document.querySelector("main").classList.add("open");
  };
  const shut = () => {
    if ($("detail").contains(document.activeElement)) currentSite()?.focus();  // the focus returns to where the panel came from
    $("detail").hidden = true;
    document.querySelector("main").classList.remove("open");
    state.site = state.node = null;
    drawSites();
    draw();
  };

  // ---- the frame

  const choose = (k) => {
    if (k < 0 || k >= graphs.length) return;
    state.graph = k;
    state.filter = "all";
    const g = now();
    keepFocus($("tabs"), "graph", () => $("tabs").replaceChildren(...graphs.map((h, i) => make("button", { role: "tab", "data-graph": i,
      "aria-selected": String(i === k), "aria-controls": "graphs", onclick: () => choose(i) }, h.phase || "graph", make("small", {}, h.plan.slice(0, 8))))));
    $("before-head").replaceChildren(make("b", {}, g.before.label || "before"), `  ${g.before.size.toLocaleString("en")} nodes`);
    $("after-head").replaceChildren(make("b", {}, g.after.label || "after"), `  ${g.after.size.toLocaleString("en")} nodes`);
    const done = g.sites.filter((d) => DATA.overlapped.includes(group(d)));
    const decided = g.sites.filter((d) => d.edit === undefined);
    const sum = (key, of) => decided.reduce((t, d) => t + (of(d) ?? 0), 0);
    const none = sum("none", (d) => d.predicted_us && d.predicted_us.none), chosen = none - sum("gain", (d) => d.gain_us);
    const during = DATA.during_matmul[g.plan];
    $("summary").replaceChildren(...[
      decided.length ? make("span", {}, make("b", {}, `${done.length} of ${decided.length}`), " collectives overlapped") : null,
      make("span", {}, g.counts),
      none ? make("span", {}, "predicted ", make("b", {}, us(none)), " without overlap, ", make("b", {}, us(chosen)), " as decided") : null,
      during !== undefined && decided.length ? make("span", {}, "measured: ", make("b", {}, `${Math.round(100 * during)}%`), " of bytes copied during a matmul") : null,
      g.after.torch ? make("span", {}, `torch ${[...new Set([g.before.torch, g.after.torch])].join(" \u2192 ")}`) : null,
      DATA.profile ? make("span", {}, `profile ${DATA.profile}`) : null].filter(Boolean));
    $("list").scrollTop = 0;
    shut();
    refilter();
  };

  // "#site-<plan>/<site>", or "#site-<site>" of the first graph that has it.
  const follow = () => {
    const [, plan, id] = decodeURIComponent(location.hash).match(/^#site-(?:(.*)\/)?(.+)$/) || [];
    const k = graphs.findIndex((g) => (!plan || g.plan === plan) && g.bySite.has(id));
    if (k < 0) return;
    if (k !== state.graph) choose(k);
    open(id);
  };
  const step = (by) => {
    const found = visible();
    if (!found.length) return;
    const k = found.findIndex((d) => d.id === state.site);
    open(found[k < 0 ? (by > 0 ? 0 : found.length - 1) : Math.min(found.length - 1, Math.max(0, k + by))].id);
    if ($("sites").contains(document.activeElement)) currentSite()?.focus();
  };
  const theme = (name) => {
    document.documentElement.dataset.theme = name;
    try { localStorage.setItem("ub_overlap theme", name); } catch { /* a page opened from a file may have no storage */ }
  };
  const help = () => {
    const keys = { Tab: "next site, filter, button", Enter: "open the focused site", "\u2191  \u2193": "focus the previous, next site", "/": "search", "j  k": "open the next, previous site", "[  ]": "previous, next graph", d: "only sites and differences", i: "inputs of the graph", t: "light or dark", Esc: "close panel, clear search", "?": "this help" };
    $("help").replaceChildren(make("table", {}, ...Object.entries(keys).map(([k, what]) => make("tr", {}, make("td", {}, make("kbd", {}, k)), make("td", {}, what)))));
    $("help").showModal();
  };
  const flip = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");

  let saved = null;
  try { saved = localStorage.getItem("ub_overlap theme"); } catch { /* as above */ }
  document.documentElement.dataset.theme = saved || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  $("title").textContent = DATA.title;
  let waiting = 0;
  $("search").addEventListener("input", (e) => {
    state.query = e.target.value;
    clearTimeout(waiting);
    waiting = setTimeout(() => { $("list").scrollTop = 0; drawSites(); refilter(); }, 120);
  });
  $("list").addEventListener("scroll", draw);  // at most once a frame
  addEventListener("resize", draw);
  $("rows").addEventListener("click", (e) => {
    const line = e.target.closest(".row"), box = e.target.closest(".cell");
    if (!line || !box || !box.classList.contains("full")) return;
    const [i, j] = now().rows[Number(line.dataset.row)], before = box === line.children[0];
    openNode(before ? "before" : "after", before ? i : j);
  });
  $("theme").addEventListener("click", flip);
  $("keys").addEventListener("click", help);
  addEventListener("keydown", (e) => {
    const typing = e.target === $("search");
    const focused = document.activeElement, inSites = focused && $("sites").contains(focused);
    if (inSites && ["ArrowDown", "ArrowUp", "Home", "End"].includes(e.key)) {
      const all = [...$("sites").querySelectorAll("button")], at = all.indexOf(focused), last = all.length - 1;
      all[{ ArrowDown: Math.min(at + 1, last), ArrowUp: Math.max(at - 1, 0), Home: 0, End: last }[e.key]].focus();
      e.preventDefault();
      return;
    }
    if (e.key === "Escape") {
      if (typing || state.query) { $("search").value = state.query = ""; $("search").blur(); drawSites(); refilter(); } else shut();
      return;
    }
    if (typing || e.ctrlKey || e.metaKey || e.altKey) return;
    const keys = { "/": () => $("search").focus(), j: () => step(1), k: () => step(-1), "[": () => choose(state.graph - 1), "]": () => choose(state.graph + 1),
      d: () => { state.only = !state.only; refilter(); }, i: () => { state.inputs = !state.inputs; refilter(); }, t: flip, "?": help };
    if (keys[e.key]) { e.preventDefault(); keys[e.key](); }
  });
  addEventListener("hashchange", follow);
  if (graphs.length) { choose(0); follow(); }
  else $("sites").append(make("li", { class: "none" }, "no graph with collectives was compiled"));
})();
