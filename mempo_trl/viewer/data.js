// The data of the page: gzip in base64 in elements that no browser runs, unpacked when they are wanted.

const CHUNKS_KEPT = 8;
const chunks = new Map(); // number of a chunk → promise of its lines, the last used one last

async function unpack(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

/** The page is read from the front, and the list is there before the last chunks are. */
function pageIsRead() {
  if (document.readyState !== "loading") return Promise.resolve();
  return new Promise((resolve) => document.addEventListener("DOMContentLoaded", resolve, { once: true }));
}

async function chunkLines(number) {
  let lines = chunks.get(number);
  chunks.delete(number);
  if (lines === undefined) {
    const id = `chunk-${number}`;
    // An element that is still being read has only a part of its text: one that something follows is complete.
    if (!document.getElementById(id)?.nextElementSibling) await pageIsRead();
    lines = unpack(id).then((text) => text.split("\n"));
  }
  chunks.set(number, lines);
  if (chunks.size > CHUNKS_KEPT) chunks.delete(chunks.keys().next().value);
  return lines;
}

async function loadRollout(entry) {
  return JSON.parse((await chunkLines(entry.chunk))[entry.position]);
}

/** Call `visit(rollout, entry)` on whole rollouts, chunk by chunk, until `stopped()`; the page stays usable meanwhile. */
async function scan(entries, visit, stopped, onProgress) {
  let pause = performance.now();
  let [done, number, lines] = [0, -1, []];
  for (const entry of entries) {
    if (entry.chunk !== number) {
      number = entry.chunk;
      if (!chunks.has(number) && !document.getElementById(`chunk-${number}`)?.nextElementSibling) await pageIsRead();
      // Not through the cache, which holds what is being looked at.
      lines = chunks.has(number) ? await chunks.get(number) : (await unpack(`chunk-${number}`)).split("\n");
    }
    visit(JSON.parse(lines[entry.position]), entry);
    done++;
    if (performance.now() - pause > 50) {
      onProgress(done);
      await new Promise((resolve) => setTimeout(resolve));
      pause = performance.now();
    }
    if (stopped()) return false;
  }
  return true;
}

/** Whether a text is anywhere in a rollout; `needle` is in lower case. */
function mentions(value, needle) {
  if (typeof value === "string") return value.toLowerCase().includes(needle);
  if (value === null || typeof value !== "object") return false;
  return Object.values(value).some((part) => mentions(part, needle));
}
