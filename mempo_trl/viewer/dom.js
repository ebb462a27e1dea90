// Making elements. All text goes in as text: nothing in this program parses markup.

/** An element with attributes, listeners (`onclick: …`) and children; empty children are left out. */
function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

/** `0.25`, `-1.30`, `1,234`; a dash for what is not known. */
function figure(value, digits = 2) {
  if (typeof value !== "number") return "–";
  const shown = Number.isInteger(value) && Math.abs(value) >= 10 ? 0 : digits;
  return value.toLocaleString("en-US", { minimumFractionDigits: shown, maximumFractionDigits: shown }).replace("-", "−");
}

function count(value, noun) {
  return `${value.toLocaleString("en-US")} ${noun}${value === 1 ? "" : "s"}`;
}

function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

/**
 * A text in which spans are marked. `layers` are lists of `[start, end, className, title]`; where several meet, the
 * piece has all their classes.
 */
function styled(text, layers, offset = 0) {
  const spans = layers
    .flat()
    .map(([start, end, ...rest]) => [Math.max(0, start - offset), Math.min(text.length, end - offset), ...rest])
    .filter(([start, end]) => start < end);
  if (!spans.length) return [text];
  const cuts = [...new Set([0, text.length, ...spans.flatMap(([start, end]) => [start, end])])].sort((a, b) => a - b);
  const nodes = [];
  for (let i = 0; i + 1 < cuts.length; i++) {
    const piece = text.slice(cuts[i], cuts[i + 1]);
    const over = spans.filter(([start, end]) => start <= cuts[i] && end >= cuts[i + 1]);
    if (!over.length) nodes.push(piece);
    else {
      const title = over.map((span) => span[3]).filter(Boolean).join("; ");
      nodes.push(el("mark", { class: over.map((span) => span[2]).join(" "), title: title || null }, piece));
    }
  }
  return nodes;
}

const SHOWN_AT_ONCE = 6000;

/** A block of text; of a very long one the beginning, and the rest on demand. `render(text)` gives its nodes. */
function textBlock(text, className, render = (part) => [part]) {
  const block = el("div", { class: `text ${className}` });
  if (text.length <= SHOWN_AT_ONCE * 1.5) {
    block.append(...render(text));
    return block;
  }
  const more = el(
    "button",
    { type: "button", class: "more-text", onclick: () => block.replaceChildren(...render(text)) },
    `Show all ${text.length.toLocaleString("en-US")} characters`,
  );
  block.append(...render(text.slice(0, SHOWN_AT_ONCE)), "…", more);
  return block;
}
