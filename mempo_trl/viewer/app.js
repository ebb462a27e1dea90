// The page: what it is about, where one is in it (the part of the address after #), keys, and themes.

let about = null;

/** The address of a place; filters stay as they are. */
function hashOf(place) {
  return `#${new URLSearchParams({ ...list.filters, ...place })}`;
}

/** Go where the address says. */
function route() {
  const params = new URLSearchParams(location.hash.slice(1));
  const number = params.get("rollout");
  const turn = Number(params.get("turn")) || 0;
  const wantsAbout = params.has("about");
  for (const name of ["rollout", "turn", "about"]) params.delete(name);
  const filters = new URLSearchParams(list.filters);
  params.sort();
  filters.sort();
  if (!wantsAbout && params.toString() !== filters.toString()) {
    writeFilters(params);
    refilter();
  }
  const entry = number === null ? undefined : list.all[Number(number)];
  document.body.dataset.view = entry ? "rollout" : wantsAbout ? "about" : "list";
  list.selected = entry || (number === null ? list.selected : null);
  if (entry) {
    openRollout(entry, turn);
    scrollToSelected();
  } else {
    current = null;
    byId("detail").replaceChildren(number === null ? aboutPage() : el("p", { class: "empty" }, `There is no rollout ${number} in this page.`));
    byId("detail").scrollTop = 0;
  }
  renderRows();
}

function refilter() {
  list.filters = readFilters();
  byId("list").scrollTop = 0;
  applyFilters();
}

/** The filters were changed by hand: they become part of the address. */
function filtersChanged() {
  refilter();
  location.replace(hashOf(current ? { rollout: current.entry.number } : {}));
}

// ---- what the page is about

function aboutPage() {
  const { evaluation } = about;
  // Tables of figures are groups of rollouts, by name.
  const isTable = ([name, value]) => name.startsWith("results") && value && Object.values(value).length && Object.values(value).every((row) => row && typeof row === "object");
  const results = Object.entries(evaluation).filter(isTable);
  const kind = results.length ? "Evaluation" : list.all.some((entry) => entry.step !== undefined) ? "Training" : "Rollouts";
  const notes = [];
  if (about.num_found - about.num_broken - about.num_replaced > about.num_rollouts) {
    notes.push(`This page shows ${about.num_rollouts.toLocaleString("en-US")} of ${count(about.num_found, "rollout")}, evenly spread over the files. Raise --max_rollouts for more.`);
  }
  if (about.num_replaced) notes.push(`${count(about.num_replaced, "rollout")} had been played before; the newest of each question and sample is shown.`);
  if (about.num_broken) notes.push(`${count(about.num_broken, "line")} of the files ${about.num_broken === 1 ? "is" : "are"} no JSON and left out, as happens when a run is killed.`);
  const rest = Object.entries(evaluation).filter((entry) => !isTable(entry) && !entry[0].startsWith("results"));
  const plain = Object.fromEntries(rest.filter(([, value]) => value === null || typeof value !== "object"));
  return el("article", { class: "about" },
    el("a", { class: "tool back", href: hashOf({}) }, "← List"),
    el("p", { class: "eyebrow" }, kind),
    el("h1", {}, about.path),
    el("p", { class: "quiet" }, `${count(about.num_rollouts, "rollout")} from ${count(about.files, "file")}`, evaluation.model ? ` · ${evaluation.model}` : ""),
    notes.map((note) => el("p", { class: "notice" }, note)),
    startHere(),
    el("p", { class: "quiet hint" }, "Go through the list with ", el("kbd", {}, "j"), " ", el("kbd", {}, "k"), " and through the turns of a rollout with ", el("kbd", {}, "←"), " ", el("kbd", {}, "→"), ". All keys and words are explained under ", el("kbd", {}, "?"), "."),
    results.map(([name, groups]) => [el("h2", {}, `Figures${name.slice("results".length).replaceAll("_", " ")}`), figures(groups)]),
    rest.length ? el("h2", {}, "Settings") : null,
    settingsTable(plain),
    rest.filter(([, value]) => value !== null && typeof value === "object").map(([name, value]) =>
      el("details", { class: "folded" }, el("summary", {}, name.replaceAll("_", " ")), settingsTable(value))),
  );
}

/** Ways into the list that usually lead somewhere. */
function startHere() {
  const ways = [];
  const way = (label, filters, number) => ways.push(el("li", {}, el("a", { href: `#${new URLSearchParams(filters)}` }, label), number === undefined ? null : el("span", { class: "quiet" }, number.toLocaleString("en-US"))));
  for (const [name, [, words]] of Object.entries(VERDICTS)) {
    const number = list.all.filter((entry) => entry.verdict === name).length;
    if (number) way(`Answers that are ${words}`, { verdict: name }, number);
  }
  for (const outcome of [...new Set(list.all.map((entry) => entry.outcome))].filter((name) => name && name !== "answer").sort()) {
    way(`Ended as “${OUTCOME_WORDS[outcome] || outcome}”`, { outcome }, list.all.filter((entry) => entry.outcome === outcome).length);
  }
  if (list.all.some((entry) => entry.R_M)) way("Lowest memory reward first", { sort: "R_M" });
  if (list.all.some((entry) => entry.golden.length)) way("A golden answer was there and is lost for good", { lost: "1" });
  return [el("h2", {}, "Where to look"), el("ul", { class: "ways" }, ways)];
}

const MAIN_FIGURES = ["num_rollouts", "exact_match", "f1", "pass_at_n", "format_ok_frac", "tokens_total_mean", "tokens_peak_mean", "turns_mean", "searches_mean", "failures"];

/** The figures of groups of rollouts: the main ones, and all of them on demand. */
function figures(results) {
  const groups = Object.entries(results).map(([name, row]) => {
    const values = Object.fromEntries(flatEntries(row).filter(([key]) => !key.startsWith("ci95")));
    return { name, values, ends: row.ci95 && typeof row.ci95 === "object" ? row.ci95 : {} };
  });
  groups.sort((a, b) => (b.name === "all") - (a.name === "all"));
  const keys = [...new Set(groups.flatMap((group) => Object.keys(group.values)))];
  const main = MAIN_FIGURES.filter((key) => keys.includes(key));
  if (!main.length || main.length === keys.length) return figuresTable(groups, keys);
  return [figuresTable(groups, main), el("details", { class: "folded" }, el("summary", {}, "All figures"), figuresTable(groups, keys))];
}

/** One column per group, one row per figure, with its interval where there is one. */
function figuresTable(groups, keys) {
  const rows = keys.map((key) => {
    const whole = groups.every((group) => Number.isInteger(group.values[key] ?? 0));
    const shown = (value) => (typeof value === "number" ? (whole ? value.toLocaleString("en-US") : figure(value, Math.abs(value) < 10 ? 3 : 0)) : value ?? "–");
    const cells = groups.map((group) => {
      const ends = group.ends[key];
      const interval = Array.isArray(ends) && typeof ends[0] === "number" ? el("span", { class: "quiet interval", title: "95% interval" }, `${shown(ends[0])} to ${shown(ends[1])}`) : null;
      return el("td", {}, shown(group.values[key]), interval);
    });
    return el("tr", {}, el("th", { scope: "row" }, key.replace(/_(mean|frac)$/, "").replaceAll("_", " ")), cells);
  });
  const heads = groups.map(({ name }) => el("th", { scope: "col" }, /^\d+$/.test(name) ? count(Number(name), "objective") : name));
  return el("div", { class: "wide" }, el("table", {}, el("thead", {}, el("tr", {}, el("td", {}), heads)), el("tbody", {}, rows)));
}

/** What is nested, as names with dots and values. */
function flatEntries(value, name = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return [[name, value]];
  return Object.entries(value).flatMap(([key, part]) => flatEntries(part, name ? `${name}.${key}` : key));
}

function settingsTable(settings) {
  const words = (value) => (Array.isArray(value) ? JSON.stringify(value) : String(value ?? "–"));
  const rows = flatEntries(settings).map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, words(value))));
  return rows.length ? el("div", { class: "wide" }, el("table", { class: "settings" }, el("tbody", {}, rows))) : null;
}

// ---- help

function buildHelp() {
  const keys = [["j  k", "next, previous rollout (in the list also ↓ ↑)"], ["←  →", "previous, next turn"], ["a", "shade completions by advantage"],
    ["d", "show what changed in the memory"], ["/", "search"], ["f", "filters"], ["t", "light or dark"], ["?", "this help"], ["Esc", "close, leave the search, back to the list"]];
  const words = [
    ["right", `Exact match under the normaliser “${about.normalizer}”, for every objective; partly right for some of them. EM is its mean.`],
    ["R_M", "Memory reward of a turn: P_mem − P_full, the probability of the golden answer after the memory alone, minus that after the baseline (by default the whole history)."],
    ["A_T, A_M", "Advantage of the outcome within its group, and of the memory. A token is trained with A_T, inside the memory block with A_T + λ·A_M."],
    ["golden answer", "Looked for in documents and memories as whole words, any alias, whatever the case and the punctuation between words, and without an article in front unless less than five letters remain. Another wording of the same thing is not found, and a word that merely looks the same is."],
    ["lost", "What the documents or the memory of the last turn held, and neither the memory nor the answer of this turn holds. With context = full the agent can still read it further up; with context = memory it is gone unless it is found again. The filter “lost for good” keeps rollouts where it never came back."],
    ["squares", "One column per turn in front of that sentence: documents above, memory below, red where it is lost."],
    ["changes", "Words added to and dropped from the memory since the turn before."],
    ["tokens", "Prompt and completion of every turn; peak is the longest turn."],
  ];
  byId("help").append(
    el("form", { method: "dialog" }, el("button", { class: "tool", "aria-label": "Close" }, "✕")),
    el("h2", {}, "Keys"), el("dl", { class: "keys" }, keys.map(([key, text]) => [el("dt", {}, key.split("  ").map((one) => [el("kbd", {}, one), " "])), el("dd", {}, text)])),
    el("h2", {}, "Words"), el("dl", {}, words.map(([word, text]) => [el("dt", {}, word), el("dd", {}, text)])),
  );
}

// ---- keys

function moveSelection(offset) {
  const place = list.shown.indexOf(list.selected);
  const next = list.shown[place === -1 ? 0 : Math.max(0, Math.min(list.shown.length - 1, place + offset))];
  if (next) location.hash = hashOf({ rollout: next.number });
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  const typing = event.target.matches("input, select, textarea");
  if (event.key === "Escape") {
    if (typing || !byId("fields").hidden) {
      event.target.blur();
      setFields(false);
      byId("list").focus();
    } else if (current) location.hash = hashOf({});
    return;
  }
  if (typing) return;
  const inList = !byId("detail").contains(event.target);
  const actions = {
    j: () => moveSelection(1),
    k: () => moveSelection(-1),
    ArrowDown: inList && (() => moveSelection(1)),
    ArrowUp: inList && (() => moveSelection(-1)),
    ArrowRight: () => goToTurn((current?.turn || 0) + 1),
    ArrowLeft: () => goToTurn(Math.max(1, (current?.turn || 1) - 1)),
    Enter: event.target === byId("list") && (() => byId("detail").focus()),
    "/": () => byId("search").focus(),
    "?": () => byId("help").showModal(),
    a: () => { view.byAdvantage = !view.byAdvantage; redraw(); },
    d: () => { view.changes = !view.changes; redraw(); },
    f: () => setFields(byId("fields").hidden),
    t: switchTheme,
  };
  const action = actions[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

function setFields(open) {
  byId("fields").hidden = !open;
  byId("more").setAttribute("aria-expanded", String(open));
  renderRows();
}

// ---- themes

function switchTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
  setTheme(now === "dark" ? "light" : "dark");
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("mempo-view-theme", theme);
  } catch { /* a page from a file may have no storage: the theme then lasts as long as the page */ }
}

function savedTheme() {
  try {
    return localStorage.getItem("mempo-view-theme");
  } catch {
    return null;
  }
}

// ---- start

async function start() {
  const theme = savedTheme();
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  if (typeof DecompressionStream === "undefined") throw new Error("this browser is too old (it has no DecompressionStream)");
  let entries;
  [about, entries] = await Promise.all(["about", "index"].map(async (id) => JSON.parse(await unpack(id))));
  prepareEntries(entries);
  const name = about.path.split(/[\\/]/).filter(Boolean).pop();
  document.title = `${name} – mempo view`;
  byId("title").textContent = "mempo view";
  byId("run").textContent = about.path;
  buildFilters();
  buildHelp();

  let waiting;
  byId("filters").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(filtersChanged, 120);
  });
  byId("filters").addEventListener("reset", () => setTimeout(filtersChanged));
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("more").addEventListener("click", () => setFields(byId("fields").hidden));
  byId("list").addEventListener("scroll", () => requestAnimationFrame(renderRows), { passive: true });
  new ResizeObserver(renderRows).observe(byId("list"));
  byId("theme").addEventListener("click", switchTheme);
  byId("open-help").addEventListener("click", () => byId("help").showModal());
  byId("help").addEventListener("click", (event) => event.target === byId("help") && byId("help").close());
  document.addEventListener("keydown", onKey);
  addEventListener("hashchange", route);
  await applyFilters();
  route();
  document.body.dataset.ready = "true";
}

start().catch((error) => {
  byId("detail").replaceChildren(el("p", { class: "empty" }, `The page could not be opened: ${error.message}.`));
  throw error;
});
