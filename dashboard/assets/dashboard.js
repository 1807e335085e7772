// Refreshes parts of a page: <section id="..." data-refresh="seconds"> is fetched again, from data-from or the page's own
// URL, and replaced if it changed on the server. Checked boxes stay checked and opened details open; a part with the focus is
// not replaced, unless a table as a whole has it. Hidden pages are not refreshed. A part that cannot be fetched says so; a
// server that is slow is not asked again before it has answered.

const LONGEST = 60_000; // milliseconds for an answer

export async function fetchPage(url, options = {}) {
  const answer = await fetch(url, { headers: { Accept: "text/html" }, redirect: "error", ...options });
  if (!answer.ok) throw new Error(answer.statusText);
  return new DOMParser().parseFromString(await answer.text(), "text/html");
}

function replace(part, next) {
  const marked = new Set([...part.querySelectorAll("input:checked")].map((box) => box.value));
  for (const box of next.querySelectorAll("input[type=checkbox]")) box.checked = marked.has(box.value);
  const opened = [...part.querySelectorAll("details")].map((each) => each.open);
  next.querySelectorAll("details").forEach((each, place) => { each.open = opened[place] ?? each.open; });
  const across = [...part.querySelectorAll(".wide")].map((wide) => wide.scrollLeft);
  part.replaceWith(document.adoptNode(next));
  next.querySelectorAll(".wide").forEach((wide, place) => { wide.scrollLeft = across[place] ?? 0; });
  document.dispatchEvent(new CustomEvent("refreshed"));
}

// Parts of one address are fetched together.
function refreshParts(from, parts) {
  const known = new Map(parts.map(({ id, outerHTML }) => [id, outerHTML])); // as the server sent them, without changes by scripts
  const refetch = async () => {
    const page = await fetchPage(from, { signal: AbortSignal.timeout(LONGEST) });
    for (const id of known.keys()) {
      const [part, next] = [document, page].map((each) => each.getElementById(id));
      if (!part || !next || next.outerHTML === known.get(id)) continue;
      const table = [...part.querySelectorAll(".wide")].indexOf(document.activeElement);
      if (table < 0 && part.contains(document.activeElement)) continue;
      known.set(id, next.outerHTML);
      replace(part, next);
      next.querySelectorAll(".wide")[table]?.focus({ preventScroll: true });
      if (!next.dataset.refresh) known.delete(id);
    }
    if (!known.size) clearInterval(timer);
  };
  const tell = (live) => document.getElementById([...known.keys()][0])?.setAttribute("data-live", live);
  const failed = (error) => { console.info(`not refreshed: ${error.message}`); tell("no"); };
  const pause = 1000 * Math.min(...parts.map(({ dataset }) => Number(dataset.refresh)));
  let waiting = false;
  const timer = setInterval(async () => {
    if (waiting || document.visibilityState !== "visible") return;
    waiting = true;
    await refetch().then(() => tell("yes"), failed);
    waiting = false;
  }, pause);
}

const refreshed = [...document.querySelectorAll("[data-refresh][id]")];
for (const [from, parts] of Map.groupBy(refreshed, ({ dataset }) => dataset.from ?? location.href)) refreshParts(from, parts);

// Shows how long ago each <time datetime> is, or how soon; on hover the time in the zone of the visitor.
const SPANS = [["d", 86_400, 172_800], ["h", 3600, 7200], ["min", 60, 60], ["s", 1, 0]];

export function fromNow(at, now) {
  const seconds = Math.round((now - at) / 1000);
  const [unit, size] = SPANS.find(([, , from]) => Math.abs(seconds) >= from);
  const count = Math.floor(Math.abs(seconds) / size);
  return seconds < 0 ? `in ${count} ${unit}` : `${count} ${unit} ago`;
}

function showTimes() {
  for (const each of document.querySelectorAll("time[datetime]")) {
    const at = new Date(each.dateTime);
    each.title = at.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "long" });
    each.textContent = fromNow(at, Date.now());
  }
}

showTimes();
document.addEventListener("refreshed", showTimes);
setInterval(showTimes, 10_000);
