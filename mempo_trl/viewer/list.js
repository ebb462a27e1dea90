// The list of rollouts: filters, order, and rows that exist only while they are in sight.

const ROW_HEIGHT = 74;
const byId = (id) => document.getElementById(id);
const list = {
  filters: {}, // those that are set
  largeReward: 1, // |R_M| of a little bar of full height
  all: [], // entries of the index, in the order of the files; `number` is the place there
  shown: [], // those that pass the filters, in the chosen order
  selected: null, // an entry
  scan: 0, // which scan of whole rollouts is the current one
};

/** What a rollout's answer is worth: "right", "partly", "wrong", or null where no golden answer is known. */
function verdict(entry) {
  if (entry.score === null) return null;
  const { score } = entry;
  return score === 1 ? "right" : score > 0 ? "partly" : "wrong";
}

const VERDICTS = { right: ["✓", "right"], partly: ["◐", "partly right"], wrong: ["✗", "wrong"] };

// Name in the address → words, the value of an entry that is sorted by, and whether the highest comes first.
const SORTS = {
  "": ["Order of the files", "number", false],
  "R_M": ["R_M, lowest first", "rewardMean", false],
  "-R_M": ["R_M, highest first", "rewardMean", true],
  "score": ["Exact match, lowest first", "score", false],
  "-turns": ["Most turns first", "turns", true],
  "-tokens": ["Most tokens first", "tokens_total", true],
  "-step": ["Latest step first", "step", true],
};

function prepareEntries(entries) {
  list.all = entries;
  const sizes = entries.flatMap((entry) => entry.R_M || []).map(Math.abs).sort((a, b) => a - b);
  list.largeReward = sizes[Math.floor(0.9 * sizes.length)] || 1;
  entries.forEach((entry, number) => {
    entry.number = number;
    entry.score = mean(entry.scores || []);
    entry.verdict = verdict(entry);
    entry.rewardMean = mean((entry.R_M || []).filter((value) => value !== null));
    entry.searchable = [entry.question, entry.answer, ...entry.golden, entry.id].join("\n").toLowerCase();
  });
}

/** Controls for what differs between these rollouts; what is the same everywhere needs no filter. */
function buildFilters() {
  const distinct = (key) => [...new Set(list.all.map((entry) => entry[key]))].filter((v) => v !== undefined && v !== null);
  const choice = (name, label, values, words = (value) => value) => {
    if (values.length < 2) return null;
    const options = values.map((value) => el("option", { value }, String(words(value))));
    return field(label, el("select", { name, "aria-label": label }, el("option", { value: "" }, "any"), options));
  };
  const range = (name, label, title, step) => {
    const input = (end, placeholder) =>
      el("input", { type: "number", step, name: `${name}_${end}`, placeholder, "aria-label": `${label}, ${placeholder}` });
    return field(label, el("span", { class: "range", title }, input("min", "from"), input("max", "to")));
  };
  const field = (label, control) => el("label", { class: "field" }, el("span", {}, label), control);
  const check = (name, label, title) =>
    el("label", { class: "check", title }, el("input", { type: "checkbox", name, value: "1" }), label);
  const numbers = (key) => distinct(key).sort((a, b) => a - b);
  const several = (key) => new Set(list.all.map((entry) => entry[key])).size > 1;
  const sorts = Object.entries(SORTS).filter(([, [, key]]) => several(key));
  byId("fields").append(
    ...[
      choice("verdict", "Answer", ["right", "partly", "wrong"].filter((v) => distinct("verdict").includes(v)), (v) => VERDICTS[v][1]),
      choice("outcome", "Outcome", distinct("outcome").sort(), (value) => value.replaceAll("_", " ")),
      choice("dataset", "Dataset", distinct("dataset").sort()),
      choice("objectives", "Objectives", numbers("objectives")),
      choice("mode", "Mode", distinct("mode").sort()),
      several("turns") ? range("turns", "Turns", "Number of turns", 1) : null,
      list.all.some((entry) => entry.R_M) ? range("R_M", "R_M", "A turn whose memory reward is in this range", "any") : null,
      several("step") ? range("step", "Step", "Optimiser step", 1) : null,
      field(
        "Sort by",
        el("select", { name: "sort" }, sorts.map(([value, [label]]) => el("option", { value }, label))),
      ),
      check("lost", "A golden answer is lost for good", "See “lost” in the help. Reads every rollout."),
      check("deep", "Search in prompts, memories and documents too", "Reads every rollout."),
      el("button", { type: "reset", class: "reset" }, "Clear all"),
    ].filter(Boolean),
  );
}

/** The filters as an object, without those that are not set. */
function readFilters() {
  return Object.fromEntries([...new FormData(byId("filters"))].filter(([, value]) => value !== ""));
}

function writeFilters(values) {
  for (const control of byId("filters").elements) {
    if (!control.name) continue;
    if (control.type === "checkbox") control.checked = values.get(control.name) === "1";
    else {
      control.value = values.get(control.name) || "";
      if (control.tagName === "SELECT" && control.selectedIndex === -1) control.selectedIndex = 0;
    }
  }
}

function passes(entry, filters) {
  const within = (value, name) =>
    !(filters[`${name}_min`] !== undefined && !(value >= Number(filters[`${name}_min`]))) &&
    !(filters[`${name}_max`] !== undefined && !(value <= Number(filters[`${name}_max`])));
  const asksRewards = filters.R_M_min !== undefined || filters.R_M_max !== undefined;
  return (
    ["verdict", "outcome", "dataset", "objectives", "mode"].every(
      (key) => filters[key] === undefined || String(entry[key]) === filters[key],
    ) &&
    within(entry.turns, "turns") &&
    within(entry.step, "step") &&
    (!asksRewards || (entry.R_M || []).some((value) => value !== null && within(value, "R_M"))) &&
    (!filters.q || filters.deep || entry.searchable.includes(filters.q.trim().toLowerCase()))
  );
}

/** Filter and sort anew. What needs whole rollouts is read in the background, and the list grows as they are read. */
async function applyFilters() {
  const filters = readFilters();
  const settings = Object.keys(filters).filter((name) => name !== "q").length;
  byId("active").hidden = !settings;
  byId("active").textContent = settings;
  const passing = list.all.filter((entry) => passes(entry, filters));
  const [, key, highestFirst] = SORTS[filters.sort] || SORTS[""];
  // Equal ones stay in their order, and those without a value come last.
  const known = passing.filter((entry) => typeof entry[key] === "number");
  known.sort((a, b) => (highestFirst ? b[key] - a[key] : a[key] - b[key]));
  const candidates = known.concat(passing.filter((entry) => typeof entry[key] !== "number"));
  const mine = ++list.scan;
  const needle = filters.deep && filters.q ? filters.q.trim().toLowerCase() : "";
  if (!needle && !filters.lost) return showEntries(candidates);

  const hits = new Set();
  const visit = (rollout, entry) => {
    if ((!needle || mentions(rollout, needle)) && (!filters.lost || losesAnswer(rollout))) hits.add(entry);
  };
  const show = (note) => showEntries(candidates.filter((entry) => hits.has(entry)), note);
  const inFileOrder = [...candidates].sort((a, b) => a.number - b.number);
  let shown = -Infinity;
  const whole = await scan(inFileOrder, visit, () => mine !== list.scan, (done) => {
    if (performance.now() - shown < 300) return;
    shown = performance.now();
    show(`reading ${Math.floor((100 * done) / candidates.length)}% …`);
  });
  if (whole) show();
}

function showEntries(entries, note = "") {
  list.shown = entries;
  byId("rows").style.height = `${Math.max(entries.length, 1) * ROW_HEIGHT}px`;
  byId("status").replaceChildren(...summaryOf(entries), ...(note ? [el("span", { class: "note" }, note)] : []));
  renderRows();
}

/** Figures of what is listed, so that a filter answers a question. */
function summaryOf(entries) {
  const total = list.all.length;
  const shown = entries.length === total ? count(total, "rollout") : `${entries.length.toLocaleString("en-US")} of ${count(total, "rollout")}`;
  const facts = [el("b", {}, shown)];
  const average = (label, values, digits) => {
    const known = values.filter((value) => typeof value === "number");
    if (known.length) facts.push(el("span", {}, `${label} ${figure(mean(known), digits)}`));
  };
  average("EM", entries.map((entry) => entry.score));
  average("R_M", entries.map((entry) => entry.rewardMean), 3);
  average("turns", entries.map((entry) => entry.turns), 1);
  average("tokens", entries.map((entry) => entry.tokens_total), 0);
  return facts;
}

function renderRows() {
  const box = byId("list");
  const first = Math.max(0, Math.floor(box.scrollTop / ROW_HEIGHT) - 5);
  const last = Math.min(list.shown.length, Math.ceil((box.scrollTop + box.clientHeight) / ROW_HEIGHT) + 5);
  const rows = list.shown.slice(first, last).map((entry, i) => rowOf(entry, first + i));
  if (!list.shown.length) rows.push(el("p", { class: "empty" }, "No rollout passes these filters."));
  byId("rows").replaceChildren(...rows);
  const selected = list.shown.indexOf(list.selected);
  if (selected >= first && selected < last) box.setAttribute("aria-activedescendant", `row-${list.selected.number}`);
  else box.removeAttribute("aria-activedescendant");
}

function rowOf(entry, place) {
  const chosen = entry === list.selected;
  const [mark, words] = VERDICTS[entry.verdict] || ["·", "no golden answer"];
  const small = [];
  if (entry.outcome && entry.outcome !== "answer") small.push(el("span", { class: "pill warn" }, entry.outcome.replaceAll("_", " ")));
  small.push(el("span", { class: "row-answer" }, entry.answer || ""));
  small.push(rewardBars(entry.R_M));
  small.push(el("span", {}, count(entry.turns, "turn")));
  if (entry.step !== undefined) small.push(el("span", {}, `step ${entry.step}`));
  const row = el(
    "a",
    {
      class: `row${chosen ? " chosen" : ""}`, role: "option", id: `row-${entry.number}`, tabindex: "-1",
      "aria-selected": String(chosen), "aria-posinset": place + 1, "aria-setsize": list.shown.length,
      href: hashOf({ rollout: entry.number }),
    },
    el("span", { class: `mark ${entry.verdict || "none"}`, title: words }, mark),
    el("span", { class: "row-question" }, entry.question || entry.id || `rollout ${entry.number}`),
    el("span", { class: "row-facts" }, small),
  );
  row.style.transform = `translateY(${place * ROW_HEIGHT}px)`;
  return row;
}

/** R_M of each turn as little bars up or down. */
function rewardBars(rewards) {
  if (!rewards) return null;
  const width = rewards.length * 4;
  const bars = rewards.map((value, i) => {
    if (value === null) return null;
    const height = Math.max(1, 8 * Math.min(1, Math.abs(value) / list.largeReward));
    return svg("rect", { x: i * 4, y: value < 0 ? 8 : 8 - height, width: 3, height, class: value < 0 ? "negative" : "positive" });
  });
  return svg("svg", { class: "bars", width, height: 16, viewBox: `0 0 ${width} 16`, role: "img", "aria-label": "R_M per turn" }, bars);
}

/** Bring the selected row into sight. */
function scrollToSelected() {
  const place = list.shown.indexOf(list.selected);
  if (place === -1) return;
  const box = byId("list");
  const top = place * ROW_HEIGHT;
  if (top < box.scrollTop) box.scrollTop = top;
  else if (top + ROW_HEIGHT > box.scrollTop + box.clientHeight) box.scrollTop = top + ROW_HEIGHT - box.clientHeight;
}
