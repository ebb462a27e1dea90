// One rollout: question, answers and their traces, the plot, and the turns.

let current = null; // { entry, rollout, turn }

async function openRollout(entry, turnNumber) {
  if (current && current.entry === entry) {
    if (turnNumber) showTurn(turnNumber);
    return;
  }
  current = { entry, rollout: null, turn: 0 };
  const mine = current;
  let rollout;
  try {
    rollout = await loadRollout(entry);
  } catch (error) {
    if (mine === current) byId("detail").replaceChildren(el("p", { class: "empty" }, `This rollout could not be unpacked (${error}). Is the file complete?`));
    return;
  }
  if (mine !== current) return; // another one was chosen meanwhile
  current.rollout = rollout;
  renderRollout();
  byId("detail").scrollTop = 0;
  if (turnNumber) showTurn(turnNumber);
}

function renderRollout() {
  const { entry, rollout } = current;
  const patterns = answerPatterns(rollout);
  const scale = advantageScale(rollout);
  const marked = (text) => styled(text, [answerSpans(text, patterns)]);
  const cards = rollout.turns.map((turn, i) => turnCard(rollout, i + 1, patterns, scale));
  const plot = rewardPlot(rollout.turns, goToTurn);
  byId("detail").replaceChildren(
    el(
      "article",
      { class: "rollout" },
      crumbs(entry),
      el("h1", {}, textBlock(String(rollout.question ?? rollout.id ?? "Rollout"), "question")),
      rolloutFacts(rollout),
      groupChips(entry),
      rollout.error ? el("div", { class: "turn" }, part("problem", "This rollout failed", textBlock(String(rollout.error), "prose"))) : null,
      answersTable(rollout, patterns),
      plot,
      typeof rollout.prefix === "string" ? unfolding("Prefix: system prompt and question", rollout.prefix, (text) => [text]) : null,
      cards.length ? controls(rollout, scale) : el("p", { class: "empty" }, "This rollout has no turns."),
      cards,
    ),
  );
}

function crumbs(entry) {
  const place = list.shown.indexOf(entry);
  const step = (offset, label, title) => {
    const other = place === -1 ? undefined : list.shown[place + offset];
    return el("a", { class: "tool", href: other ? hashOf({ rollout: other.number }) : null, title, "aria-label": title, "aria-disabled": String(!other) }, label);
  };
  const words = place === -1 ? "not in the filtered list" : `${(place + 1).toLocaleString("en-US")} of ${list.shown.length.toLocaleString("en-US")}`;
  return el("nav", { class: "crumbs", "aria-label": "Rollouts" }, el("a", { class: "tool back", href: hashOf({}), "aria-label": "Back to the list" }, "← List"),
    el("span", { class: "place" }, words), step(-1, "↑", "Previous rollout (k)"), step(1, "↓", "Next rollout (j)"));
}

function rolloutFacts(rollout) {
  const facts = [];
  const fact = (label, value, title) => {
    if (value !== undefined && value !== null && value !== "" && value !== "–") facts.push(el("span", { class: "fact", title }, el("i", {}, label), value));
  };
  fact("reward", figure(rollout.reward), "The outcome reward");
  for (const [name, value] of Object.entries(rollout.rewards || {})) fact(name, figure(value));
  fact("A_T", figure(rollout.A_T), "Advantage of the outcome within its group");
  fact("tokens", rollout.tokens_total === undefined ? null : figure(rollout.tokens_total), "Prompt and completion of every turn");
  fact("peak", rollout.tokens_peak === undefined ? null : figure(rollout.tokens_peak), "Prompt and completion of the longest turn");
  fact("turns", String(rollout.turns.length));
  fact("seconds", typeof rollout.seconds === "number" ? figure(rollout.seconds, 1) : null);
  fact("step", rollout.step);
  fact("mode", rollout.mode);
  fact("dataset", rollout.dataset);
  fact("sample", rollout.sample);
  fact("id", rollout.id);
  const pills = [outcomePill(rollout.outcome)];
  if (rollout.well_formed === false) pills.push(el("span", { class: "pill warn" }, "not well formed"));
  if (rollout.excluded === true) pills.push(el("span", { class: "pill warn", title: "Excluded from training and from the baselines of its group" }, "not trained"));
  return el("p", { class: "rollout-facts" }, pills, facts);
}

/** The other rollouts of the same question, of which training compares the rewards. */
function groupChips(entry) {
  if (!entry.question) return null;
  const group = list.all.filter((other) => other.question === entry.question && other.step === entry.step && other.mode === entry.mode);
  if (group.length < 2) return null;
  const chips = group.map((other, i) => {
    const [, words] = VERDICTS[other.verdict] || ["", "no golden answer"];
    return el("a", { class: `chip ${other.verdict || "none"}${other === entry ? " chosen" : ""}`, href: hashOf({ rollout: other.number }), title: `${words}: ${other.answer || "no answer"}` }, String(i + 1));
  });
  return el("p", { class: "group" }, el("span", { class: "quiet" }, "Same question"), chips);
}

/** Per objective: golden answer, given answer, and where the golden answer was seen, kept and lost. */
function answersTable(rollout, patterns) {
  const golden = rollout.golden_answers || [];
  if (!golden.length) return typeof rollout.answer === "string" ? el("p", {}, el("b", {}, "Answer "), rollout.answer) : null;
  const given = golden.length === 1 ? [rollout.answer] : String(rollout.answer ?? "").split(";");
  const rows = golden.map((aliases, i) => {
    const right = (rollout.scores || [])[i];
    const answer = (given[i] ?? "").trim();
    const trace = patterns[i] && traceAnswer(rollout.turns, given[i], patterns[i]);
    return el(
      "li",
      { class: "objective" },
      el("span", { class: `mark ${right ? "right" : "wrong"}`, title: right ? "right" : "wrong" }, right ? "✓" : "✗"),
      el("div", { class: "objective-body" },
        el("div", { class: "objective-answers" },
          el("span", {}, el("i", {}, "golden"), el("mark", { class: `gold o${i % 6}`, title: aliases.join(" | ") }, aliases[0]),
            aliases.length > 1 ? el("span", { class: "quiet", title: aliases.join("\n") }, ` +${aliases.length - 1} alias${aliases.length > 2 ? "es" : ""}`) : null),
          el("span", {}, el("i", {}, "given"), answer ? el("b", {}, answer) : el("span", { class: "missing" }, "no answer")),
        ),
        trace
          ? el("div", { class: "trace" }, traceStrip(rollout.turns, trace), el("p", {}, traceInWords(trace), holds(rollout.question, patterns[i]) ? " · stands in the question itself" : ""))
          : el("p", { class: "trace quiet" }, "A yes or no is not looked for."),
      ),
    );
  });
  return el("ul", { class: "objectives" }, rows);
}

/** One cell per turn: filled at the top where documents hold the answer, at the bottom where the memory does. */
function traceStrip(turns, trace) {
  const cells = turns.map((turn, i) => {
    const [documents, memory, lost] = [trace.documents, trace.memory, trace.lost].map((numbers) => numbers.includes(i + 1));
    const words = [documents && "in documents", memory && "in memory", lost && "lost"].filter(Boolean).join(", ") || "neither in documents nor in memory";
    return el("a", { class: `cell${lost ? " lost" : ""}`, href: hashOf({ rollout: current.entry.number, turn: i + 1 }), title: `Turn ${i + 1}: ${words}` },
      el("span", { class: documents ? "dot documents" : "dot" }), el("span", { class: memory ? "dot memory" : "dot" }));
  });
  return el("div", { class: "strip", title: "Per turn: documents above, memory below" }, cells);
}

/** The largest advantage of the rollout and λ, or null where the record has no advantages. */
function advantageScale(rollout) {
  if (typeof rollout.A_T !== "number") return null;
  const known = typeof rollout.memory_weight === "number";
  const weight = known ? rollout.memory_weight : 1;
  const values = rollout.turns.flatMap((turn) => advantageRuns(turn, rollout.A_T, weight).runs.map(([, advantage]) => Math.abs(advantage)));
  const exact = rollout.turns.length > 0 && rollout.turns.every((turn) => Array.isArray(turn.tokens));
  return { weight, known, exact, largest: Math.max(0, ...values) };
}

function controls(rollout, scale) {
  const button = (label, pressed, title, change) =>
    el("button", { type: "button", "aria-pressed": String(pressed), title, onclick: () => { change(); redraw(); } }, label);
  const hasMemory = rollout.turns.some((turn) => typeof turn.memory === "string");
  const legend = view.byAdvantage ? advantageLegend(scale) : hasMemory && view.changes
    ? el("p", { class: "legend" }, "Memory against the turn before: ", el("ins", {}, "added"), " ", el("del", {}, "dropped")) : null;
  return el("div", { class: "controls" },
    el("div", { class: "segments", role: "group", "aria-label": "How turns are shown" },
      button("Parts", !view.byAdvantage, "Memory, think, call and documents", () => (view.byAdvantage = false)),
      button("Completion", view.byAdvantage, "The completion as sampled, shaded by advantage (a)", () => (view.byAdvantage = true))),
    !view.byAdvantage && hasMemory
      ? el("div", { class: "segments" }, button("Changes", view.changes, "What changed in the memory (d)", () => (view.changes = !view.changes))) : null,
    legend);
}

function advantageLegend(scale) {
  if (scale === null) return el("p", { class: "legend" }, "This record has no advantages: they are made in training.");
  const weight = `λ = ${figure(scale.weight)}${scale.known ? "" : ", assumed: the record does not say"}`;
  return el("p", { class: "legend" },
    figure(-scale.largest), el("span", { class: "ramp" }), `+${figure(scale.largest)}`,
    el("span", { class: "quiet" }, `A_T, in the memory block A_T + λ·A_M (${weight}); ${scale.exact ? "exact to the token" : "by the characters of the block"}`));
}

/** Draw the same rollout again, as it is now to be shown; the turn that is being read stays where it is. */
function redraw() {
  if (!current || !current.rollout) return;
  const box = byId("detail");
  const middle = box.getBoundingClientRect().top + box.clientHeight / 2;
  const place = (id) => byId(id).getBoundingClientRect().top;
  const above = [...box.querySelectorAll("section.turn")].filter((card) => place(card.id) <= middle).pop();
  const before = above && place(above.id);
  renderRollout();
  byId(`turn-${current.turn}`)?.classList.add("at");
  if (above) box.scrollTop += place(above.id) - before;
}

function showTurn(number) {
  const card = byId(`turn-${number}`);
  if (!card) return;
  current.turn = number;
  card.scrollIntoView({ block: "start" });
  for (const other of byId("detail").querySelectorAll(".turn.at")) other.classList.remove("at");
  card.classList.add("at");
}

function goToTurn(number) {
  if (!current || !byId(`turn-${number}`)) return;
  location.replace(hashOf({ rollout: current.entry.number, turn: number }));
  showTurn(number);
}
