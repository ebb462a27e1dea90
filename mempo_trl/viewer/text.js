// What is in a text: golden answers, the documents of a tool response, and what changed between two memories.
// Nothing here touches the page.

const WORDS = /[\p{L}\p{N}\p{M}]+/gu;
const LETTER = /[\p{L}\p{N}\p{M}]/u;
// Written without spaces between words, so that a name may begin or end anywhere.
const UNSPACED = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}]/u;
const SHORTEST_BARE = 5; // letters that an alias has to have without its article
const MOST_BETWEEN = 4; // characters between two words of an alias

/** Lower case without moving a character: the few letters whose lower case is longer stay as they are. */
function folded(text) {
  const lower = text.toLowerCase();
  if (lower.length === text.length) return lower;
  return Array.from(text, (c) => (c.toLowerCase().length === c.length ? c.toLowerCase() : c)).join("");
}

/** Whether the character at a place (of a pair, its first half or, with `-1`, its second) belongs to a word. */
function isLetter(text, place, half = 0) {
  const code = text.charCodeAt(place);
  if (code < 128) return (code >= 97 && code <= 122) || (code >= 48 && code <= 57) || (code >= 65 && code <= 90);
  if (Number.isNaN(code)) return false;
  const paired = half === -1 && code >= 0xdc00 && code <= 0xdfff ? place - 1 : place;
  return LETTER.test(String.fromCodePoint(text.codePointAt(Math.max(0, paired))));
}

/**
 * The aliases of an answer as lists of words, in lower case and, but for very short ones, without an article in front. `null` where looking is
 * pointless: no letters or digits, or a yes or no.
 */
function answerPattern(aliases) {
  const found = new Map();
  for (const alias of aliases) {
    const whole = folded(String(alias));
    const bare = whole.replace(/^\s*(a|an|the)\s+/, "");
    // "The Beatles" is also Beatles, but "The Who" is not every who.
    const words = (bare.length >= SHORTEST_BARE ? bare : whole).match(WORDS) || [];
    if (!words.length || (words.length === 1 && /^(yes|no|noanswer)$/.test(words[0]))) continue;
    found.set(words.join(" "), words);
  }
  return found.size ? [...found.values()] : null;
}

/** Where the words of an alias end if they begin here, one after the other with a little in between, or -1. */
function endOfWords(text, place, words) {
  if (isLetter(text, place - 1, -1) && !UNSPACED.test(words[0].slice(0, 2))) return -1;
  let end = place + words[0].length;
  for (const word of words.slice(1)) {
    let next = end;
    while (next - end < MOST_BETWEEN && next < text.length && !isLetter(text, next)) next++;
    if (next === end || !text.startsWith(word, next)) return -1;
    end = next + word.length;
  }
  return isLetter(text, end) && !UNSPACED.test(words[words.length - 1].slice(-2)) ? -1 : end;
}

/** `[start, end]` of each occurrence of an alias, whatever its case and the punctuation between words; of several that overlap, the first and longest. */
function occurrences(text, pattern, most = Infinity) {
  const lower = folded(text);
  const found = [];
  for (const words of pattern) {
    for (let place = lower.indexOf(words[0]); place !== -1; place = lower.indexOf(words[0], place + 1)) {
      const end = endOfWords(lower, place, words);
      if (end !== -1) found.push([place, end]);
      if (found.length >= most) return found;
    }
  }
  found.sort((a, b) => a[0] - b[0] || b[1] - a[1]);
  let last = 0;
  return found.filter(([start, end]) => start >= last && ((last = end), true));
}

function holds(text, pattern) {
  return typeof text === "string" && occurrences(text, pattern, 1).length > 0;
}

/**
 * The way of one answer through a rollout, as numbers of turns. The memory of a turn is written before its documents
 * arrive. What the documents or the memory of the last turn held, and neither the memory nor the answer of this turn
 * holds, is lost at this turn; later documents can bring it back.
 */
function traceAnswer(turns, answer, pattern) {
  const trace = { documents: [], memory: [], lost: [], answered: holds(answer, pattern), guessed: false };
  let held = false;
  turns.forEach((turn, i) => {
    const inMemory = holds(turn.memory, pattern);
    const inAnswer = turn.outcome === "answer" && trace.answered;
    if (inMemory) trace.memory.push(i + 1);
    if (inMemory && !trace.documents.length) trace.guessed = true;
    if (held && !inMemory && !inAnswer) trace.lost.push(i + 1);
    held = inMemory;
    if (holds(turn.response, pattern)) {
      trace.documents.push(i + 1);
      held = true;
    }
  });
  trace.gone = trace.lost.length > 0 && !held && !trace.answered;
  return trace;
}

/** Patterns of a rollout's objectives, `null` for those that are not looked for. */
function answerPatterns(rollout) {
  return (rollout.golden_answers || []).map(answerPattern);
}

/** Whether some golden answer was once there, was lost, and never came back. */
function losesAnswer(rollout) {
  return answerPatterns(rollout).some(
    (pattern) => pattern !== null && traceAnswer(rollout.turns, rollout.answer, pattern).gone,
  );
}

/** Turns as ranges: 2–4, 6. */
function ranges(numbers) {
  const parts = [];
  for (let i = 0; i < numbers.length; ) {
    let j = i;
    while (numbers[j + 1] === numbers[j] + 1) j++;
    parts.push(i === j ? `${numbers[i]}` : `${numbers[i]}–${numbers[j]}`);
    i = j + 1;
  }
  return parts.join(", ");
}

function turnsInWords(numbers) {
  return `turn${numbers.length > 1 ? "s" : ""} ${ranges(numbers)}`;
}

/** The trace as one sentence. */
function traceInWords(trace) {
  const parts = [];
  if (trace.documents.length) parts.push(`found in documents at ${turnsInWords(trace.documents)}`);
  else parts.push("never in the documents");
  if (trace.memory.length) {
    const source = trace.guessed ? " (before any document held it)" : "";
    parts.push(`in memory at ${turnsInWords(trace.memory)}${source}`);
  } else if (trace.documents.length) parts.push("never in the memory");
  if (trace.lost.length) parts.push(`lost at ${turnsInWords(trace.lost)}`);
  if (trace.answered) parts.push("in the answer");
  return parts.join(" · ");
}

/**
 * The documents of a tool response, `Doc 1(Title: …) text`, or `null` where it has another form. A title may hold
 * parentheses. A line inside a passage that looks like a document counts only if it has the next number.
 */
function splitDocuments(response) {
  const documents = [];
  const heads = /^Doc (\d+)\(Title: /gm;
  for (let head = heads.exec(response); head !== null; head = heads.exec(response)) {
    if (Number(head[1]) !== documents.length + 1) continue;
    if (!documents.length && head.index !== 0) return null;
    const end = closingParenthesis(response, heads.lastIndex);
    if (end === -1) continue;
    if (documents.length) documents[documents.length - 1].end = head.index;
    documents.push({ title: response.slice(heads.lastIndex, end), start: end + 1, end: response.length });
    heads.lastIndex = end;
  }
  if (!documents.length) return null;
  return documents.map(({ title, start, end }) => ({ title, text: response.slice(start, end).trim() }));
}

function closingParenthesis(text, start) {
  let depth = 0;
  for (let i = start; i < text.length && text[i] !== "\n"; i++) {
    if (text[i] === "(") depth++;
    else if (text[i] === ")" && depth-- === 0) return i;
  }
  return text.indexOf(")", start); // the title itself opens more than it closes
}

const LARGEST_TABLE = 4_000_000;
const PIECES = /\s*(?:[\p{L}\p{N}\p{M}]+|\S)|\s+$/gu; // words and single signs, each with the space before it

/**
 * Word diff of two texts: `[kind, text]` with kind "same", "added" or "removed", in order. The "same" and "added" parts
 * together are the new text. Very long texts that differ everywhere are not compared, but shown as replaced.
 */
function diffWords(before, after) {
  const words = (text) => text.match(PIECES) || [];
  const [a, b] = [words(before), words(after)];
  const same = (i, j) => a[i].trim() === b[j].trim();
  let start = 0;
  while (start < a.length && start < b.length && same(start, start)) start++;
  let [aEnd, bEnd] = [a.length, b.length];
  while (aEnd > start && bEnd > start && same(aEnd - 1, bEnd - 1)) [aEnd, bEnd] = [aEnd - 1, bEnd - 1];

  const parts = [];
  const push = (kind, text) => {
    const last = parts[parts.length - 1];
    if (last && last[0] === kind) last[1] += text;
    else parts.push([kind, text]);
  };
  for (let j = 0; j < start; j++) push("same", b[j]);
  const [rows, columns] = [aEnd - start, bEnd - start];
  if (rows * columns > LARGEST_TABLE) {
    push("removed", a.slice(start, aEnd).join(""));
    push("added", b.slice(start, bEnd).join(""));
  } else {
    // Length of the longest common subsequence of what is left of both.
    const width = columns + 1;
    const longest = new Uint32Array((rows + 1) * width);
    for (let i = rows - 1; i >= 0; i--) {
      for (let j = columns - 1; j >= 0; j--) {
        longest[i * width + j] = same(start + i, start + j)
          ? longest[(i + 1) * width + j + 1] + 1
          : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
      }
    }
    let [i, j] = [0, 0];
    while (i < rows || j < columns) {
      if (i < rows && j < columns && same(start + i, start + j)) {
        push("same", b[start + j]);
        [i, j] = [i + 1, j + 1];
      } else if (i < rows && (j === columns || longest[(i + 1) * width + j] >= longest[i * width + j + 1])) {
        push("removed", a[start + i++]);
      } else push("added", b[start + j++]);
    }
  }
  for (let j = bEnd; j < b.length; j++) push("same", b[j]);
  return parts;
}

/**
 * The completion of a turn as `[text, advantage, inMemory]` runs: the outcome's advantage outside the memory block, plus the
 * weighted memory advantage inside (`memory_mask` in training). By tokens where the record has them, else by the characters of the block.
 */
function advantageRuns(turn, outcomeAdvantage, memoryWeight) {
  const inside = outcomeAdvantage + memoryWeight * (turn.A_M || 0);
  let cuts;
  let exact = false;
  if (Array.isArray(turn.tokens)) {
    const [first, end] = turn.memory_tokens || [0, 0];
    cuts = [turn.tokens.slice(0, first), turn.tokens.slice(first, end), turn.tokens.slice(end)].map((t) => t.join(""));
    exact = true;
  } else {
    const text = turn.completion || "";
    const block = typeof turn.memory === "string" ? `<mem>${turn.memory}</mem>` : "";
    const start = block ? text.indexOf(block) : -1;
    cuts = start === -1 ? ["", "", text] : [text.slice(0, start), block, text.slice(start + block.length)];
  }
  const runs = cuts.map((text, i) => [text, i === 1 ? inside : outcomeAdvantage, i === 1]).filter(([text]) => text);
  return { runs, exact };
}
