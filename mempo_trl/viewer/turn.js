// One turn of a rollout as a card.

const view = { byAdvantage: false, changes: true }; // how turns are shown, for all rollouts

const OUTCOME_WORDS = {
  tool_call: "tool call", answer: "answer", bad_call: "bad call", no_action: "no action", truncated: "truncated",
  out_of_turns: "out of turns", out_of_context: "out of context", failed: "failed",
};

/** Spans of all golden answers in a text, each objective in its own colour. */
function answerSpans(text, patterns) {
  return patterns.flatMap((pattern, i) =>
    pattern === null ? [] : occurrences(text, pattern).map(([start, end]) => [start, end, `gold o${i % 6}`, goldTitle(i, patterns)]),
  );
}

function goldTitle(i, patterns) {
  return patterns.length > 1 ? `Golden answer of objective ${i + 1}` : "Golden answer";
}

function turnCard(rollout, number, patterns, scale) {
  const turn = rollout.turns[number - 1];
  const previous = rollout.turns[number - 2];
  const marked = (text) => styled(text, [answerSpans(text, patterns)]);
  const parts = view.byAdvantage
    ? [part("completion", "Completion", shadedCompletion(rollout, turn, scale))]
    : [memoryPart(turn, previous, patterns, number), ...spokenParts(rollout, turn, marked)];
  return el(
    "section",
    { class: "turn", id: `turn-${number}`, "aria-label": `Turn ${number}` },
    turnHead(turn, number),
    parts,
    problems(turn),
    responsePart(turn, marked),
    promptPart(turn, marked),
  );
}

function part(kind, label, ...content) {
  return el("div", { class: `part ${kind}` }, el("h3", {}, label), el("div", { class: "content" }, content));
}

function turnHead(turn, number) {
  const facts = [];
  if (turn.prompt_tokens !== undefined) {
    const words = `${count(turn.prompt_tokens, "token")} read, ${turn.completion_tokens} written`;
    facts.push(el("span", { title: words }, `${figure(turn.prompt_tokens)} → ${figure(turn.completion_tokens)} tokens`));
  }
  const number3 = (name, title) => {
    if (typeof turn[name] !== "number") return;
    const sign = name !== "R_M" && name !== "A_M" ? "" : turn[name] < 0 ? " down" : turn[name] > 0 ? " up" : "";
    facts.push(el("span", { class: `measure${sign}`, title }, el("i", {}, name), figure(turn[name], 3)));
  };
  number3("R_M", "Memory reward: P_mem − P_full");
  number3("P_mem", "Probability of the golden answer after the memory alone");
  number3("P_full", "Probability of the golden answer after the history");
  number3("A_M", "Memory advantage");
  if (typeof turn.kept_frac_mem === "number" || typeof turn.kept_frac_full === "number") {
    const share = (value) => (typeof value === "number" ? `${Math.round(100 * value)}%` : "–");
    const title = "Share of the answer's tokens that passed the confidence filter, after memory and after history";
    facts.push(el("span", { class: "measure", title }, el("i", {}, "kept"), `${share(turn.kept_frac_mem)} / ${share(turn.kept_frac_full)}`));
  }
  const pills = [outcomePill(turn.outcome)];
  if (turn.well_formed === false) pills.push(el("span", { class: "pill warn" }, "not well formed"));
  return el("header", { class: "turn-head" }, el("h2", {}, `Turn ${number}`), pills, el("span", { class: "facts" }, facts));
}

function outcomePill(outcome) {
  if (!outcome) return null;
  const kind = outcome === "answer" ? "good" : outcome === "tool_call" ? "plain" : "warn";
  return el("span", { class: `pill ${kind}` }, OUTCOME_WORDS[outcome] || outcome);
}

function memoryPart(turn, previous, patterns, number) {
  if (typeof turn.memory !== "string") {
    return number === 1 ? null : part("memory", "Memory", el("p", { class: "missing" }, "No memory block."));
  }
  const memory = turn.memory.trim();
  if (!memory) return part("memory", "Memory", el("p", { class: "missing" }, "Empty."));
  const plain = (...more) => part("memory", "Memory", textBlock(memory, "prose", (text) => styled(text, [answerSpans(text, patterns)])), more);
  // A very long memory is shown plainly, where it is cut to what is read at once.
  if (!view.changes || typeof previous?.memory !== "string" || memory.length + previous.memory.length > 4 * SHOWN_AT_ONCE) return plain();
  const changes = diffWords(previous.memory.trim(), memory);
  if (changes.every(([kind]) => kind === "same")) return plain(el("p", { class: "missing" }, "Unchanged."));
  const spans = answerSpans(memory, patterns);
  let offset = 0;
  const nodes = changes.map(([kind, text]) => {
    if (kind === "removed") return el("del", {}, styled(text, [answerSpans(text, patterns)]));
    const pieces = styled(text, [spans], offset);
    offset += text.length;
    return kind === "same" ? pieces : el("ins", {}, pieces);
  });
  return part("memory", "Memory", el("div", { class: "text prose" }, nodes));
}

/** Think, call and answer, and whatever else the model wrote around them. */
function spokenParts(rollout, turn, marked) {
  const parts = [];
  const completion = typeof turn.completion === "string" ? turn.completion : "";
  let rest = completion;
  const cut = (block) => {
    const start = rest.indexOf(block);
    if (start !== -1) rest = `${rest.slice(0, start)}\n${rest.slice(start + block.length)}`;
  };
  if (typeof turn.memory === "string") cut(`<mem>${turn.memory}</mem>`);
  if (typeof turn.think === "string") {
    cut(`<think>${turn.think}</think>`);
    parts.push(part("think", "Think", textBlock(turn.think.trim(), "prose", marked)));
  }
  if (turn.call) {
    cut((rest.match(/<tool_call>[^]*?<\/tool_call>/) || [""])[0]);
    parts.push(part("call", "Call", callLine(turn.call)));
  }
  if (turn.outcome === "answer" || (turn === rollout.turns[rollout.turns.length - 1] && typeof rollout.answer === "string")) {
    const block = rest.match(/<answer>([^]*?)<\/answer>/);
    if (block) cut(block[0]);
    parts.push(part("answer", "Answer", textBlock(block ? block[1].trim() : String(rollout.answer ?? ""), "prose strong", marked)));
  }
  if (rest.trim()) parts.push(part("rest", parts.length ? "Other text" : "Text", textBlock(rest.trim(), "code", marked)));
  else if (!completion) parts.push(part("rest", "Text", el("p", { class: "missing" }, "The completion is empty.")));
  return parts;
}

function callLine(call) {
  const query = call.arguments && Object.keys(call.arguments).length === 1 ? Object.values(call.arguments)[0] : undefined;
  const shown = typeof query === "string" ? query : JSON.stringify(call.arguments ?? {}, null, 1);
  return el("p", { class: "call-line" }, el("code", { class: "tool-name" }, String(call.name)), el("span", { class: "query" }, shown));
}

function problems(turn) {
  const parts = [];
  if (turn.error) parts.push(part("problem", "Bad call", textBlock(String(turn.error), "prose")));
  if (turn.tool_error) parts.push(part("problem", "Tool error", textBlock(String(turn.tool_error), "prose")));
  return parts;
}

function responsePart(turn, marked) {
  if (typeof turn.response !== "string") return null;
  const documents = splitDocuments(turn.response);
  const seconds = typeof turn.tool_seconds === "number" ? el("span", { class: "quiet" }, ` ${figure(turn.tool_seconds)} s`) : null;
  if (documents === null) return part("response", ["Tool response", seconds], textBlock(turn.response, "prose", marked));
  const items = documents.map((document) =>
    el("li", {}, el("h4", {}, marked(document.title)), textBlock(document.text, "prose", marked)),
  );
  return part("response", [documents.length === 1 ? "Document" : "Documents", seconds], el("ol", { class: "documents" }, items));
}

/** What the model read after the prefix; rendered when it is opened. */
function promptPart(turn, marked) {
  return turn.prompt ? unfolding("What this turn read after the prefix", String(turn.prompt), marked) : null;
}

function unfolding(label, text, marked) {
  const details = el("details", { class: "folded" }, el("summary", {}, `${label}, ${count(text.length, "character")}`));
  details.addEventListener("toggle", () => details.append(textBlock(text, "code", marked)), { once: true });
  return details;
}

/** The completion as it was sampled, its background the advantage that its tokens are trained with. */
function shadedCompletion(rollout, turn, scale) {
  if (scale === null) return textBlock(turn.completion || "", "code");
  const { runs } = advantageRuns(turn, rollout.A_T, scale.weight);
  const text = runs.map(([run]) => run).join("");
  let start = 0;
  const spans = runs.map(([run, advantage, inMemory]) => {
    const sign = advantage < 0 ? "negative" : "positive";
    const level = scale.largest ? Math.ceil((10 * Math.abs(advantage)) / scale.largest) : 0;
    const title = `A = ${figure(advantage, 3)}${inMemory ? ", memory block" : ""}`;
    const span = [start, start + run.length, `advantage ${sign} level${level}`, title];
    start += run.length;
    return span;
  });
  return textBlock(text, "code", (part) => styled(part, [spans]));
}
