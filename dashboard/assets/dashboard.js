// Keeps every part of a page up that says so: <section id="..." data-refresh="seconds"> is fetched again, from
// data-from or the page's own address, and replaced where the server has it otherwise. What is marked in it stays
// marked, and nothing is replaced in which somebody is at work. Hidden pages rest.

const known = new Map(); // id -> markup as the server had it last, whatever scripts made of it here

async function refresh(from, ids) {
  const answer = await fetch(from, { headers: { Accept: "text/html" }, redirect: "error" });
  if (!answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const id of ids) {
    const now = document.getElementById(id);
    const next = page.getElementById(id);
    if (!now || !next || next.outerHTML === known.get(id) || now.contains(document.activeElement)) continue;
    known.set(id, next.outerHTML);
    const marked = new Set([...now.querySelectorAll("input:checked")].map((box) => `${box.name} ${box.value}`));
    for (const box of next.querySelectorAll("input[type=checkbox]")) box.checked = marked.has(`${box.name} ${box.value}`);
    const across = [...now.querySelectorAll(".wide")].map((part) => part.scrollLeft);
    now.replaceWith(document.adoptNode(next));
    next.querySelectorAll(".wide").forEach((part, place) => { part.scrollLeft = across[place] ?? 0; });
    document.dispatchEvent(new CustomEvent("refreshed", { detail: id }));
  }
}

const parts = new Map(); // "seconds from" -> ids: what comes from one address at one pace is fetched once
for (const part of document.querySelectorAll("[data-refresh][id]")) {
  known.set(part.id, part.outerHTML);
  const group = `${part.dataset.refresh} ${part.dataset.from ?? location.href}`;
  parts.set(group, [...(parts.get(group) ?? []), part.id]);
}
for (const [group, ids] of parts) {
  const [seconds, from] = group.split(" ");
  setInterval(() => {
    if (document.visibilityState === "visible") {
      refresh(from, ids).catch((error) => console.info(`not refreshed: ${error.message}`));
    }
  }, 1000 * Number(seconds));
}
