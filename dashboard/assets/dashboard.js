// Refreshes parts of a page: <section id="..." data-refresh="seconds"> is fetched again, from data-from or the page's own
// URL, and replaced if it changed on the server. Checked boxes stay checked; a part with the focus is not replaced.
// Hidden pages are not refreshed.

export async function fetchPage(url) {
  const answer = await fetch(url, { headers: { Accept: "text/html" }, redirect: "error" });
  if (!answer.ok) throw new Error(answer.statusText);
  return new DOMParser().parseFromString(await answer.text(), "text/html");
}

function replace(part, next) {
  const marked = new Set([...part.querySelectorAll("input:checked")].map((box) => box.value));
  for (const box of next.querySelectorAll("input[type=checkbox]")) box.checked = marked.has(box.value);
  const across = [...part.querySelectorAll(".wide")].map((wide) => wide.scrollLeft);
  part.replaceWith(document.adoptNode(next));
  next.querySelectorAll(".wide").forEach((wide, place) => { wide.scrollLeft = across[place] ?? 0; });
  document.dispatchEvent(new CustomEvent("refreshed"));
}

function refreshPart({ id, outerHTML, dataset: { refresh, from = location.href } }) {
  let known = outerHTML; // the last version of the server, without changes by scripts
  const refetch = async () => {
    const [part, next] = [document, await fetchPage(from)].map((page) => page.getElementById(id));
    if (!part || !next || next.outerHTML === known || part.contains(document.activeElement)) return;
    known = next.outerHTML;
    replace(part, next);
    if (!next.dataset.refresh) clearInterval(timer);
  };
  const failed = (error) => console.info(`not refreshed: ${error.message}`);
  const timer = setInterval(() => document.visibilityState === "visible" && refetch().catch(failed), 1000 * Number(refresh));
}

document.querySelectorAll("[data-refresh][id]").forEach(refreshPart);
